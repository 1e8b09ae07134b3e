"""The ends of Gemma 4's tower: patches of a picture in, features out.

Patches are ordered square by square. The mean of a square becomes one token, without a norm of its own.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
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
    linear,
)
from xla_engine.graphs.vision.qwen_vl import embedded


def embed_shapes(c: PatchConfig) -> Shapes:
    """Of patches, and of positions: those of all columns, then those of all rows."""
    return {
        "patch": (c.hidden_size, CHANNELS * c.patch_size * c.patch_size),
        "positions": (2 * c.position_side, c.hidden_size),
    }


def project_shapes(c: PatchConfig) -> Shapes:
    assert c.pooled is not None
    names = ("shift", "scale") if c.pooled.standardized else ()
    return {**dict.fromkeys(names, (c.hidden_size,)), "projection": (c.text_size, c.hidden_size)}


def leaf_shapes(c: PatchConfig) -> Shapes:
    """The shapes of all leaves by name."""
    return embed_shapes(c) | all_layer_shapes(c) | project_shapes(c)


def end_programs(c: PatchConfig, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs before and behind the layers, as `qwen_vl.end_programs`; a patch has two learned positions."""
    pixels = jax.ShapeDtypeStruct((rows, CHANNELS, c.patch_size, c.patch_size), jnp.uint8)
    table = jax.ShapeDtypeStruct((CHANNELS, 256), jnp.float32)
    near, share = (jax.ShapeDtypeStruct((rows, 2), kind) for kind in (jnp.int32, jnp.float32))
    stream = jax.ShapeDtypeStruct((rows, c.hidden_size), jnp.float32)
    start = jax.ShapeDtypeStruct((), jnp.int32)

    def embed(leaves: Leaves, table: jax.Array, *picture: jax.Array) -> jax.Array:
        return embedded(c, leaves, table, *picture)

    def project(leaves: Leaves, taps: list[jax.Array], x: jax.Array, start: jax.Array) -> jax.Array:
        return pooled(c, leaves, lax.dynamic_slice_in_dim(x, start, part))

    return [
        Program(
            name=program_name(EMBED, rows=rows),
            function=embed,
            arguments=(abstract(embed_shapes(c), dtype), table, pixels, near, share),
        ),
        Program(
            name=program_name(PROJECT, rows=rows),
            function=project,
            arguments=(abstract(project_shapes(c), dtype), [], stream, start),
        ),
    ]


def pooled(c: PatchConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """Features of tokens `[N, text]` of their patches `[N m m, D]`, rounded to the weights' dtype like embeddings."""
    d, weight = c.hidden_size, leaves["projection"]
    token = x.reshape(-1, c.merged, d).mean(axis=1) * np.float32(math.sqrt(d))
    if "shift" in leaves:
        token = (token - leaves["shift"]) * leaves["scale"]
    token = rms_norm(token, jnp.ones(d, jnp.float32), c.layer_norm_eps)
    return linear(leaves, "projection", token).astype(weight.dtype).astype(jnp.float32)
