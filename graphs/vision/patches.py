"""Qwen3-VL's vision tower as programs over one picture: patches in, one layer, features of taps and of the end.

Patches are ordered square by square, so that those of one token are neighbours. A call has one picture, and no patch
sees a spare row, so features depend on the picture alone. The residual stream and norms are float32; products run in
the weights' dtype, by XLA (why not in C++: findings/images.md).
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.inventory import Program
from xla_engine.graphs.linear.products import rows_first
from xla_engine.graphs.ops.norms import apply_rope, centred, rms_norm
from xla_engine.graphs.vision.patch_config import PatchConfig
from xla_engine.graphs.vision.tower import CHANNELS, batched

_EPS = 1e-6  # of all norms
_SCORES = 1 << 22  # of a head that are in memory at once

Leaves = Mapping[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def embed_shapes(c: PatchConfig) -> Shapes:
    d = c.hidden_size
    return {
        "patch": (d, CHANNELS * c.frames * c.patch_size * c.patch_size),
        "patch_bias": (d,),
        "positions": (c.position_side * c.position_side, d),
    }


def layer_shapes(c: PatchConfig) -> Shapes:
    d, f = c.hidden_size, c.intermediate_size
    return {
        **_norm("norm1", d),
        **_linear("qkv", 3 * d, d),
        **_linear("output", d, d),
        **_norm("norm2", d),
        **_linear("up", f, d),
        **_linear("down", d, f),
    }


def merge_shapes(c: PatchConfig) -> Shapes:
    """Of the merger at the end, whose norm treats each patch alone."""
    return {**_norm("merge_norm", c.hidden_size), **_merger("merge", c)}


def tap_shapes(c: PatchConfig) -> Shapes:
    """Of a tap's merger, whose norm treats the patches of a token together."""
    return {**_norm("tap_norm", c.merged * c.hidden_size), **_merger("tap", c)}


def patch_shapes(c: PatchConfig) -> Shapes:
    """The shapes of all leaves by name."""
    layers = {
        f"layers.{index}.{name}": shape
        for index in range(c.num_hidden_layers)
        for name, shape in layer_shapes(c).items()
    }
    taps = {
        f"taps.{index}.{name}": shape for index in range(len(c.taps)) for name, shape in tap_shapes(c).items()
    }
    return embed_shapes(c) | layers | taps | merge_shapes(c)


def _norm(name: str, size: int) -> Shapes:
    return {name: (size,), f"{name}_bias": (size,)}


def _linear(name: str, rows: int, columns: int) -> Shapes:
    return {name: (rows, columns), f"{name}_bias": (rows,)}


def _merger(name: str, c: PatchConfig) -> Shapes:
    size = c.merged * c.hidden_size
    return {**_linear(f"{name}_up", size, size), **_linear(f"{name}_down", c.text_size, size)}


def embed_name(rows: int) -> str:
    return f"vision_embed[rows={rows}]"


def layer_name(rows: int) -> str:
    return f"vision_layer[rows={rows}]"


def tap_name(rows: int) -> str:
    return f"vision_tap[rows={rows}]"


def merge_name(rows: int) -> str:
    return f"vision_merge[rows={rows}]"


def patch_programs(c: PatchConfig, dtype: jnp.dtype, rows: int) -> list[Program]:
    """The programs for pictures of at most `rows` patches. Those of a layer and of a tap are called with the leaves of
    each."""

    def abstract(shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32)
            for name, shape in shapes.items()
        }

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    pixels = jax.ShapeDtypeStruct((rows, CHANNELS, c.patch_size, c.patch_size), jnp.uint8)
    near = jax.ShapeDtypeStruct((rows, 4), jnp.int32)
    stream, angles = floats(rows, c.hidden_size), floats(rows, 2, c.head_dim // 2)
    feature, count = floats(rows // c.merged, c.text_size), jax.ShapeDtypeStruct((), jnp.int32)

    def embed(leaves: Leaves, table: jax.Array, *picture: jax.Array) -> jax.Array:
        return embedded(c, leaves, table, *picture)

    def one_layer(leaves: Leaves, x: jax.Array, angles: jax.Array, count: jax.Array) -> jax.Array:
        return layer(c, leaves, x, angles, count)

    def tap(leaves: Leaves, x: jax.Array) -> jax.Array:
        joined = x.reshape(-1, c.merged * c.hidden_size)
        return merged(leaves, "tap", layer_norm(leaves, "tap_norm", joined))

    def merge(leaves: Leaves, taps: list[jax.Array], x: jax.Array) -> jax.Array:
        joined = layer_norm(leaves, "merge_norm", x).reshape(-1, c.merged * c.hidden_size)
        return jnp.concatenate([merged(leaves, "merge", joined), *taps], axis=1)

    taps = Program(name=tap_name(rows), function=tap, arguments=(abstract(tap_shapes(c)), stream))
    return [
        Program(
            name=embed_name(rows),
            function=embed,
            arguments=(abstract(embed_shapes(c)), floats(CHANNELS, 256), pixels, near, floats(rows, 4)),
        ),
        Program(
            name=layer_name(rows),
            function=one_layer,
            arguments=(abstract(layer_shapes(c)), stream, angles, count),
            donate=(1,),
        ),
        *([taps] if c.taps else []),
        Program(
            name=merge_name(rows),
            function=merge,
            arguments=(abstract(merge_shapes(c)), [feature] * len(c.taps), stream),
        ),
    ]


def embedded(
    c: PatchConfig, leaves: Leaves, table: jax.Array, patches: jax.Array, near: jax.Array, share: jax.Array
) -> jax.Array:
    """The residual stream before the first layer: float32 `[R, D]`.

    patches: uint8 `[R, 3, p, p]`. near, share: the four learned positions around each and their shares, `[R, 4]`.
    """
    pixels = table[jnp.arange(CHANNELS)[:, None, None], patches]  # [R, 3, p, p]
    seen = jnp.broadcast_to(pixels[:, :, None], (*pixels.shape[:2], c.frames, *pixels.shape[2:]))
    rows = seen.reshape(len(patches), -1)  # as a convolution's kernel
    positions = leaves["positions"].astype(jnp.float32)[near] * share[:, :, None]  # [R, 4, D]
    return rows_first(leaves["patch"], rows) + leaves["patch_bias"] + positions.sum(axis=1)


def layer(c: PatchConfig, leaves: Leaves, x: jax.Array, angles: jax.Array, count: jax.Array) -> jax.Array:
    """The residual stream `[R, D]` after a layer. angles: see `attention`."""
    seen = attention(c, leaves, layer_norm(leaves, "norm1", x), angles, count)
    x = x + linear(leaves, "output", seen)
    hidden = jax.nn.gelu(linear(leaves, "up", layer_norm(leaves, "norm2", x)), approximate=True)
    return x + linear(leaves, "down", hidden)


def attention(c: PatchConfig, leaves: Leaves, x: jax.Array, angles: jax.Array, count: jax.Array) -> jax.Array:
    """Every patch sees the first `count` rows: `x [R, D]` to float32 `[R, D]`.

    angles: cosines and sines of each patch's row and column, float32 `[R, 2, Dh/2]`.
    """
    dtype, total = leaves["qkv"].dtype, len(x)
    qkv = linear(leaves, "qkv", x).astype(dtype).reshape(total, 3, c.num_attention_heads, c.head_dim)
    q, k = (apply_rope(qkv[:, at].astype(jnp.float32), angles).astype(dtype) for at in (0, 1))
    q, k, v = (each.transpose(1, 0, 2) for each in (q, k, qkv[:, 2]))  # [H, R, Dh]
    used = jnp.arange(total, dtype=jnp.int32) < count

    def attend(queries: jax.Array) -> jax.Array:  # [H, Q, Dh]
        scores = jnp.where(used, batched(queries, k, 2) * (1 / math.sqrt(c.head_dim)), -jnp.inf)
        return batched(jax.nn.softmax(scores, axis=-1).astype(dtype), v, 1)

    together = min(total, _SCORES // total)
    parts = q.reshape(c.num_attention_heads, -1, together, c.head_dim).transpose(1, 0, 2, 3)
    seen = lax.map(attend, parts) if len(parts) > 1 else attend(q)[None]  # [R / Q, H, Q, Dh]
    return seen.transpose(0, 2, 1, 3).reshape(total, c.hidden_size)


def merged(leaves: Leaves, name: str, x: jax.Array) -> jax.Array:
    """Features of tokens `[N, text]` of their patches `[N, m m D]`, rounded to the weights' dtype like embeddings."""
    hidden = jax.nn.gelu(linear(leaves, f"{name}_up", x), approximate=False)
    return linear(leaves, f"{name}_down", hidden).astype(leaves[f"{name}_down"].dtype).astype(jnp.float32)


def linear(leaves: Leaves, name: str, x: jax.Array) -> jax.Array:
    return rows_first(leaves[name], x) + leaves[f"{name}_bias"]


def layer_norm(leaves: Leaves, name: str, x: jax.Array) -> jax.Array:
    """LayerNorm (Ba et al. 2016) of `x [N, D]`, float32."""
    return rms_norm(centred(x), leaves[name], _EPS) + leaves[f"{name}_bias"]
