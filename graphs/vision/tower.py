"""A vision tower as three programs over one tile: patches in, one layer, features out.

A tile is a call of its own, so its features depend on its pixels and on nothing else. The residual stream and norms
are float32; products run in the weights' dtype, by XLA (why not in C++: findings/images.md).
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.inventory import Program
from xla_engine.graphs.linear.products import rows_first
from xla_engine.graphs.ops.norms import centred, rms_norm
from xla_engine.graphs.vision.config import VisionConfig

EMBED, LAYER, PROJECT = "vision_embed", "vision_layer", "vision_project"
CHANNELS = 3
_TOGETHER = 2048  # patches up to which the scores of all heads are in memory at once

Leaves = Mapping[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def embed_shapes(c: VisionConfig) -> Shapes:
    d = c.hidden_size
    return {
        "patch": (d, CHANNELS * c.patch_size * c.patch_size),
        "patch_bias": (d,),
        "positions": (c.patches, d),
    }


def layer_shapes(c: VisionConfig) -> Shapes:
    d, f = c.hidden_size, c.intermediate_size
    return {
        "norm1": (d,),
        "norm1_bias": (d,),
        "qkv": (3 * d, d),
        "qkv_bias": (3 * d,),
        "output": (d, d),
        "output_bias": (d,),
        "norm2": (d,),
        "norm2_bias": (d,),
        "up": (f, d),
        "up_bias": (f,),
        "down": (d, f),
        "down_bias": (d,),
    }


def project_shapes(c: VisionConfig) -> Shapes:
    d = c.hidden_size
    norm = {"final_norm": (d,), "final_norm_bias": (d,)}
    if c.averages:
        return {**norm, "soft_norm": (d,), "projection": (d, c.text_size)}
    return {**norm, "projection": (c.text_size, d * c.scale_factor * c.scale_factor)}


def vision_shapes(c: VisionConfig) -> Shapes:
    """The shapes of all leaves by name."""
    layers = {
        f"layers.{index}.{name}": shape
        for index in range(c.num_hidden_layers)
        for name, shape in layer_shapes(c).items()
    }
    return embed_shapes(c) | layers | project_shapes(c)


def vision_programs(c: VisionConfig, dtype: jnp.dtype) -> list[Program]:
    """The programs of a tower; `LAYER` is called once for each layer, with its leaves."""

    def abstract(shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32)
            for name, shape in shapes.items()
        }

    tile = jax.ShapeDtypeStruct((c.image_size, c.image_size, CHANNELS), jnp.uint8)
    table = jax.ShapeDtypeStruct((CHANNELS, 256), jnp.float32)
    residual = jax.ShapeDtypeStruct((c.patches, c.hidden_size), jnp.float32)

    def embed(leaves: Leaves, table: jax.Array, tile: jax.Array) -> jax.Array:
        return embedded(c, leaves, table, tile)

    def one_layer(leaves: Leaves, x: jax.Array) -> jax.Array:
        return layer(c, leaves, x)

    def project(leaves: Leaves, x: jax.Array) -> jax.Array:
        return projected(c, leaves, x)

    return [
        Program(name=EMBED, function=embed, arguments=(abstract(embed_shapes(c)), table, tile)),
        Program(name=LAYER, function=one_layer, arguments=(abstract(layer_shapes(c)), residual), donate=(1,)),
        Program(name=PROJECT, function=project, arguments=(abstract(project_shapes(c)), residual)),
    ]


def embedded(c: VisionConfig, leaves: Leaves, table: jax.Array, tile: jax.Array) -> jax.Array:
    """The residual stream of `tile [T, T, 3]` before the first layer: float32 `[R, D]`. table: `[3, 256]`."""
    pixels = table[jnp.arange(CHANNELS), tile]  # [T, T, 3]
    cut = pixels[: c.side * c.patch_size, : c.side * c.patch_size]
    patches = cut.reshape(c.side, c.patch_size, c.side, c.patch_size, CHANNELS)
    rows = patches.transpose(0, 2, 4, 1, 3).reshape(c.patches, -1)  # [R, 3 p p], as a convolution's kernel
    return rows_first(leaves["patch"], rows) + leaves["patch_bias"] + leaves["positions"].astype(jnp.float32)


def layer(c: VisionConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """The residual stream `[R, D]` after a layer."""
    mixed = attention(c, leaves, layer_norm(c, leaves, "norm1", x))
    x = x + rows_first(leaves["output"], mixed) + leaves["output_bias"]
    up = rows_first(leaves["up"], layer_norm(c, leaves, "norm2", x)) + leaves["up_bias"]
    hidden = jax.nn.gelu(up, approximate=True)
    return x + rows_first(leaves["down"], hidden) + leaves["down_bias"]


def attention(c: VisionConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """Every patch of the tile sees every other: `x [R, D]` to float32 `[R, D]`."""
    dtype = leaves["qkv"].dtype
    qkv = (rows_first(leaves["qkv"], x) + leaves["qkv_bias"]).astype(dtype)
    heads = qkv.reshape(c.patches, 3, c.num_attention_heads, c.head_dim).transpose(
        1, 2, 0, 3
    )  # [3, H, R, Dh]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = batched(q, k, 2) * (1 / math.sqrt(c.head_dim))  # [H, R, R]
        return batched(jax.nn.softmax(scores, axis=-1).astype(dtype), v, 1)  # [H, R, Dh]

    if c.patches <= _TOGETHER:
        seen = attend(*heads)
    else:
        seen = lax.map(lambda one: attend(*one), heads.swapaxes(0, 1)[:, :, None])[:, 0]
    return seen.transpose(1, 0, 2).reshape(c.patches, c.hidden_size)


def projected(c: VisionConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """The tile's features in the decoder's space, rounded to the weights' dtype as embeddings are: `[tokens, text]`.

    A square of patches becomes one row: its mean, or with the pixel shuffle of Idefics3 all of it.
    """
    s, d, projection = c.scale_factor, c.hidden_size, leaves["projection"]
    squares = layer_norm(c, leaves, "final_norm", x).reshape(c.side // s, s, c.side // s, s, d)
    if c.averages:
        means = squares.mean(axis=(1, 3)).reshape(c.tokens, d)
        rows = rms_norm(means, leaves["soft_norm"], c.layer_norm_eps).astype(projection.dtype)
        features = batched(rows[None], projection[None], 1)[0]
    else:
        rows = squares.transpose(0, 2, 1, 3, 4).reshape(c.tokens, s * s * d)
        features = rows_first(projection, rows)
    return features.astype(projection.dtype).astype(jnp.float32)


def layer_norm(c: VisionConfig, leaves: Leaves, name: str, x: jax.Array) -> jax.Array:
    """LayerNorm (Ba et al. 2016) of `x [R, D]`, float32."""
    return rms_norm(centred(x), leaves[name], c.layer_norm_eps) + leaves[f"{name}_bias"]


def batched(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Contract the last axis of `left [H, M, K]` with `axis` of right: float32 `[H, M, N]`."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left,
        right,
        (((2,), (axis,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
