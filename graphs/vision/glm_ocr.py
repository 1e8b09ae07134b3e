"""The ends of the tower of GLM-OCR: patches of a picture in, features out.

Patches are ordered square by square. A square becomes one token: a convolution joins its patches, then an MLP with a
gate follows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.inventory import Program, program_name
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.vision.config import CHANNELS, PatchConfig
from xla_engine.graphs.vision.layers import (
    EMBED,
    PROJECT,
    Leaves,
    Shapes,
    abstract,
    all_layer_shapes,
    gated,
    layer_norm,
    linear,
    linear_shapes,
    norm_shapes,
)
from xla_engine.graphs.vision.qwen_vl import convolved


def embed_shapes(c: PatchConfig) -> Shapes:
    return linear_shapes("patch", c.hidden_size, CHANNELS * c.frames * c.patch_size * c.patch_size)


def project_shapes(c: PatchConfig) -> Shapes:
    """Of the norm of patches, their convolution and the merger. A row of `downsample` is ordered as joined patches."""
    return {
        "final_norm": (c.hidden_size,),
        **linear_shapes("downsample", c.text_size, c.merged * c.hidden_size),
        "merge": (c.text_size, c.text_size),
        **norm_shapes("merge_norm", c.text_size),
        "merge_gate_up": (2 * c.merger_size, c.text_size),
        "merge_down": (c.text_size, c.merger_size),
    }


def leaf_shapes(c: PatchConfig) -> Shapes:
    """The shapes of all leaves by name."""
    return embed_shapes(c) | all_layer_shapes(c) | project_shapes(c)


def end_programs(c: PatchConfig, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs before and behind the layers, as `qwen_vl.end_programs`; no learned positions, no taps."""
    pixels = jax.ShapeDtypeStruct((rows, CHANNELS, c.patch_size, c.patch_size), jnp.uint8)
    table = jax.ShapeDtypeStruct((CHANNELS, 256), jnp.float32)
    stream = jax.ShapeDtypeStruct((rows, c.hidden_size), jnp.float32)

    def embed(leaves: Leaves, table: jax.Array, patches: jax.Array) -> jax.Array:
        return convolved(c, leaves, table, patches)

    def project(leaves: Leaves, taps: list[jax.Array], x: jax.Array, start: jax.Array) -> jax.Array:
        own = rms_norm(lax.dynamic_slice_in_dim(x, start, part), leaves["final_norm"], c.layer_norm_eps)
        return merged(c, leaves, own.reshape(-1, c.merged * c.hidden_size))

    start = jax.ShapeDtypeStruct((), jnp.int32)
    return [
        Program(
            name=program_name(EMBED, rows=rows),
            function=embed,
            arguments=(abstract(embed_shapes(c), dtype), table, pixels),
        ),
        Program(
            name=program_name(PROJECT, rows=rows),
            function=project,
            arguments=(abstract(project_shapes(c), dtype), [], stream, start),
        ),
    ]


def merged(c: PatchConfig, leaves: Leaves, joined: jax.Array) -> jax.Array:
    """Features of tokens `[N, text]` of their patches `[N, m m D]`, rounded to the weights' dtype like embeddings."""
    token = linear(leaves, "merge", linear(leaves, "downsample", joined))
    token = jax.nn.gelu(layer_norm(leaves, "merge_norm", token, c.merger_eps), approximate=False)
    down = linear(leaves, "merge_down", gated(leaves, "merge_gate_up", token))
    return down.astype(leaves["merge_down"].dtype).astype(jnp.float32)
