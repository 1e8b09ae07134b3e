"""The ends of SigLIP's towers, of Idefics3, SmolVLM and Gemma 3: patches of a tile in, features out.

A tile is encoded alone, so its features depend on its pixels and on nothing else.
"""

import jax
import jax.numpy as jnp

from xla_engine.graphs.inventory import Program, program_name
from xla_engine.graphs.linear.products import rows_first
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.vision.config import CHANNELS, VisionConfig
from xla_engine.graphs.vision.layers import (
    EMBED,
    PROJECT,
    Leaves,
    Shapes,
    abstract,
    all_layer_shapes,
    batched,
    layer_norm,
    linear,
    linear_shapes,
    norm_shapes,
)


def embed_shapes(c: VisionConfig) -> Shapes:
    d = c.hidden_size
    patch = linear_shapes("patch", d, CHANNELS * c.patch_size * c.patch_size)
    return {**patch, "positions": (c.patches, d)}


def project_shapes(c: VisionConfig) -> Shapes:
    d = c.hidden_size
    norm = norm_shapes("final_norm", d)
    if c.averages:
        return {**norm, "soft_norm": (d,), "projection": (d, c.text_size)}
    return {**norm, "projection": (c.text_size, d * c.scale_factor * c.scale_factor)}


def leaf_shapes(c: VisionConfig) -> Shapes:
    """The shapes of all leaves by name."""
    return embed_shapes(c) | all_layer_shapes(c) | project_shapes(c)


def end_programs(c: VisionConfig, dtype: jnp.dtype) -> list[Program]:
    """The programs before and behind the layers."""
    rows, residual = c.patches, jax.ShapeDtypeStruct((c.patches, c.hidden_size), jnp.float32)
    tile = jax.ShapeDtypeStruct((c.image_size, c.image_size, CHANNELS), jnp.uint8)
    table = jax.ShapeDtypeStruct((CHANNELS, 256), jnp.float32)

    def embed(leaves: Leaves, table: jax.Array, tile: jax.Array) -> jax.Array:
        return embedded(c, leaves, table, tile)

    def project(leaves: Leaves, taps: list[jax.Array], x: jax.Array, start: jax.Array) -> jax.Array:
        return projected(c, leaves, x)  # there are no taps, and the part is the whole

    return [
        Program(
            name=program_name(EMBED, rows=rows),
            function=embed,
            arguments=(abstract(embed_shapes(c), dtype), table, tile),
        ),
        Program(
            name=program_name(PROJECT, rows=rows),
            function=project,
            arguments=(abstract(project_shapes(c), dtype), [], residual, jax.ShapeDtypeStruct((), jnp.int32)),
        ),
    ]


def embedded(c: VisionConfig, leaves: Leaves, table: jax.Array, tile: jax.Array) -> jax.Array:
    """The residual stream of `tile [T, T, 3]` before the first layer: float32 `[R, D]`. table: `[3, 256]`."""
    pixels = table[jnp.arange(CHANNELS), tile]  # [T, T, 3]
    cut = pixels[: c.side * c.patch_size, : c.side * c.patch_size]
    patches = cut.reshape(c.side, c.patch_size, c.side, c.patch_size, CHANNELS)
    rows = patches.transpose(0, 2, 4, 1, 3).reshape(c.patches, -1)  # [R, 3 p p], as a convolution's kernel
    return linear(leaves, "patch", rows) + leaves["positions"].astype(jnp.float32)


def projected(c: VisionConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """The tile's features in the decoder's space, rounded to the weights' dtype as embeddings are: `[tokens, text]`.

    A square of patches becomes one row: its mean, or with the pixel shuffle of Idefics3 all of it.
    """
    s, d, projection = c.scale_factor, c.hidden_size, leaves["projection"]
    squares = layer_norm(leaves, "final_norm", x, c.layer_norm_eps).reshape(c.side // s, s, c.side // s, s, d)
    if c.averages:
        means = squares.mean(axis=(1, 3)).reshape(c.tokens, d)
        rows = rms_norm(means, leaves["soft_norm"], c.layer_norm_eps).astype(projection.dtype)
        features = batched(rows[None], projection[None], 1)[0]
    else:
        rows = squares.transpose(0, 2, 1, 3, 4).reshape(c.tokens, s * s * d)
        features = rows_first(projection, rows)
    return features.astype(projection.dtype).astype(jnp.float32)
