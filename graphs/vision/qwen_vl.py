"""The ends of the towers of Qwen3-VL, Qwen3.5 and PaddleOCR-VL: patches of a picture in, features of taps and end out.

Patches are ordered square by square, so that those of one token are neighbours. A call has one picture, and no patch
sees a spare row, so features depend on the picture alone.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.inventory import Program, program_name
from xla_engine.graphs.vision.config import CHANNELS, PatchConfig
from xla_engine.graphs.vision.layers import (
    EMBED,
    PROJECT,
    TAP,
    Leaves,
    Shapes,
    abstract,
    all_layer_shapes,
    layer_norm,
    linear,
    linear_shapes,
    norm_shapes,
)


def embed_shapes(c: PatchConfig) -> Shapes:
    d = c.hidden_size
    patch = linear_shapes("patch", d, CHANNELS * c.frames * c.patch_size * c.patch_size)
    return {**patch, "positions": (c.position_side * c.position_side, d)}


def project_shapes(c: PatchConfig) -> Shapes:
    """Of the merger at the end, whose norm treats each patch alone."""
    final = norm_shapes("final_norm", c.hidden_size) if c.flat else {}
    return {**final, **norm_shapes("merge_norm", c.hidden_size), **_merger("merge", c)}


def tap_shapes(c: PatchConfig) -> Shapes:
    """Of a tap's merger, whose norm treats the patches of a token together."""
    return {**norm_shapes("tap_norm", c.merged * c.hidden_size), **_merger("tap", c)}


def leaf_shapes(c: PatchConfig) -> Shapes:
    """The shapes of all leaves by name."""
    taps = {
        f"taps.{index}.{name}": shape for index in range(len(c.taps)) for name, shape in tap_shapes(c).items()
    }
    return embed_shapes(c) | all_layer_shapes(c) | taps | project_shapes(c)


def _merger(name: str, c: PatchConfig) -> Shapes:
    size = c.merged * c.hidden_size
    return {**linear_shapes(f"{name}_up", size, size), **linear_shapes(f"{name}_down", c.text_size, size)}


def end_programs(c: PatchConfig, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs before and behind the layers, for pictures of at most `rows` patches. Those behind take `part` rows
    from `start` on. That of a tap is called with the leaves of each."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    pixels = jax.ShapeDtypeStruct((rows, CHANNELS, c.patch_size, c.patch_size), jnp.uint8)
    near = jax.ShapeDtypeStruct((rows, 4), jnp.int32)
    stream, start = floats(rows, c.hidden_size), jax.ShapeDtypeStruct((), jnp.int32)
    feature = floats(part // c.merged, c.text_size)

    def embed(leaves: Leaves, table: jax.Array, *picture: jax.Array) -> jax.Array:
        return embedded(c, leaves, table, *picture)

    def tap(leaves: Leaves, x: jax.Array, start: jax.Array) -> jax.Array:
        joined = lax.dynamic_slice_in_dim(x, start, part).reshape(-1, c.merged * c.hidden_size)
        return merged(leaves, "tap", layer_norm(leaves, "tap_norm", joined, c.layer_norm_eps))

    def project(leaves: Leaves, taps: list[jax.Array], x: jax.Array, start: jax.Array) -> jax.Array:
        own = lax.dynamic_slice_in_dim(x, start, part)
        own = layer_norm(leaves, "final_norm", own, c.layer_norm_eps) if c.flat else own
        own = layer_norm(leaves, "merge_norm", own, c.merger_eps)
        joined = own.reshape(-1, c.merged * c.hidden_size)
        return jnp.concatenate([merged(leaves, "merge", joined), *taps], axis=1)

    taps = Program(
        name=program_name(TAP, rows=rows),
        function=tap,
        arguments=(abstract(tap_shapes(c), dtype), stream, start),
    )
    leaves = abstract(embed_shapes(c), dtype)
    return [
        Program(
            name=program_name(EMBED, rows=rows),
            function=embed,
            arguments=(leaves, floats(CHANNELS, 256), pixels, near, floats(rows, 4)),
        ),
        *([taps] if c.taps else []),
        Program(
            name=program_name(PROJECT, rows=rows),
            function=project,
            arguments=(abstract(project_shapes(c), dtype), [feature] * len(c.taps), stream, start),
        ),
    ]


def embedded(
    c: PatchConfig, leaves: Leaves, table: jax.Array, patches: jax.Array, near: jax.Array, share: jax.Array
) -> jax.Array:
    """The residual stream before the first layer: float32 `[R, D]`.

    patches: uint8 `[R, 3, p, p]`. near, share: the n learned positions of each and their shares, `[R, n]`.
    """
    positions = leaves["positions"].astype(jnp.float32)[near] * share[:, :, None]  # [R, n, D]
    return convolved(c, leaves, table, patches) + positions.sum(axis=1)


def convolved(c: PatchConfig, leaves: Leaves, table: jax.Array, patches: jax.Array) -> jax.Array:
    """The embeddings of patches, uint8 `[R, 3, p, p]`, without positions: float32 `[R, D]`."""
    pixels = table[jnp.arange(CHANNELS)[:, None, None], patches]  # [R, 3, p, p]
    seen = jnp.broadcast_to(pixels[:, :, None], (*pixels.shape[:2], c.frames, *pixels.shape[2:]))
    return linear(leaves, "patch", seen.reshape(len(patches), -1))  # as a convolution's kernel


def merged(leaves: Leaves, name: str, x: jax.Array) -> jax.Array:
    """Features of tokens `[N, text]` of their patches `[N, m m D]`, rounded to the weights' dtype like embeddings."""
    hidden = jax.nn.gelu(linear(leaves, f"{name}_up", x), approximate=False)
    return linear(leaves, f"{name}_down", hidden).astype(leaves[f"{name}_down"].dtype).astype(jnp.float32)
