"""The tower of DeepSeek-OCR-2: a tile in, features out (technical report, Wei et al. 2026; transformers'
`deepseek_ocr2`).

The first stage is SAM's encoder (Kirillov et al. 2023), a ViT whose layers see windows, but for a few that see the
whole tile, with relative positions (MViTv2, Li et al. 2022, decomposed by rows and columns). Convolutions make one
position of 16 patches. The second stage is a Qwen2 over these positions and as many learned queries: positions see
each other in both directions, and each query sees them and the queries before. The queries' outputs are the features.

Patches are ordered by rows. A tile is encoded alone, so its features depend on its pixels and on nothing else.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.inventory import Program, program_name
from xla_engine.graphs.linear.products import rows_first
from xla_engine.graphs.ops.norms import apply_rope, rms_norm
from xla_engine.graphs.ops.rope import cosines_and_sines, power
from xla_engine.graphs.vision.config import CHANNELS, DeepEncoderConfig
from xla_engine.graphs.vision.layers import (
    EMBED,
    HEADS,
    LAYER,
    PROJECT,
    ROWS,
    Leaves,
    Shapes,
    abstract,
    batched,
    gated,
    layer_norm,
    linear,
    linear_shapes,
    norm_shapes,
)

# Kinds of programs: between the stages, and of the second.
NECK, QUERY_LAYER = "vision_neck", "vision_query_layer"
_NECK_EPS = 1e-6  # of the norms between the stages
_CUBIC = -0.5  # parameter of the bicubic filter (Keys 1981)


def embed_shapes(c: DeepEncoderConfig) -> Shapes:
    """Of patches, and of their positions in the largest tile."""
    d = c.hidden_size
    return {
        **linear_shapes("patch", d, CHANNELS * c.patch_size * c.patch_size),
        "positions": (c.view_side * c.view_side, d),
    }


def layer_shapes(c: DeepEncoderConfig, index: int) -> Shapes:
    """Of a layer of the first stage. Relative positions are those of -(s - 1) to s - 1 for windows of side s."""
    d, f = c.hidden_size, c.intermediate_size
    reach = 2 * (c.view_side if index in c.whole_layers else c.window) - 1
    return {
        **norm_shapes("norm1", d),
        **linear_shapes("qkv", 3 * d, d),
        **dict.fromkeys(("relative_rows", "relative_columns"), (reach, c.head_dim)),
        **linear_shapes("output", d, d),
        **norm_shapes("norm2", d),
        **linear_shapes("up", f, d),
        **linear_shapes("down", d, f),
    }


def neck_shapes(c: DeepEncoderConfig) -> Shapes:
    """Of the convolutions, whose rows are ordered as joined patches, and of the queries of tiles of both sizes."""
    n, middle, encoder = c.neck_size, c.middle_size, c.encoder_size
    return {
        "narrow": (n, c.hidden_size),
        **norm_shapes("narrow_norm", n),
        "mix": (n, 9 * n),
        **norm_shapes("mix_norm", n),
        "halve": (middle, 9 * n),
        "quarter": (encoder, 9 * middle),
        "queries_crop": (c.crop_tokens, encoder),
        "queries_view": (c.view_tokens, encoder),
    }


def encoder_shapes(c: DeepEncoderConfig) -> Shapes:
    """Of a layer of the second stage."""
    d, f = c.encoder_size, c.encoder_mlp_size
    inner, stored = (heads * c.encoder_head_dim for heads in (c.encoder_heads, c.encoder_key_heads))
    return {
        "norm1": (d,),
        **linear_shapes("queries", inner, d),
        **linear_shapes("keys_values", 2 * stored, d),
        "output": (d, inner),
        "norm2": (d,),
        "gate_up": (2 * f, d),
        "down": (d, f),
    }


def project_shapes(c: DeepEncoderConfig) -> Shapes:
    """Of the end. separator: the features behind the tile that shows the whole picture."""
    return {
        "final_norm": (c.encoder_size,),
        **linear_shapes("projection", c.text_size, c.encoder_size),
        "separator": (c.text_size,),
    }


def leaf_shapes(c: DeepEncoderConfig) -> Shapes:
    """The shapes of all leaves by name."""
    groups = {f"layers.{index}": layer_shapes(c, index) for index in range(c.num_hidden_layers)}
    groups |= {"neck": neck_shapes(c)}
    groups |= {f"encoder.{index}": encoder_shapes(c) for index in range(c.encoder_layers)}
    in_groups = {f"{group}.{name}": shape for group, own in groups.items() for name, shape in own.items()}
    return embed_shapes(c) | in_groups | project_shapes(c)


def tower_programs(c: DeepEncoderConfig, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs for tiles of `rows` patches, of which layers that see the whole tile take `part` a call."""
    side = math.isqrt(rows)
    length = 2 * rows // c.merged
    tile = jax.ShapeDtypeStruct((side * c.patch_size, side * c.patch_size, CHANNELS), jnp.uint8)
    table = jax.ShapeDtypeStruct((CHANNELS, 256), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, c.hidden_size), jnp.float32)
    start = jax.ShapeDtypeStruct((), jnp.int32)
    seen = [jax.ShapeDtypeStruct((c.num_attention_heads, rows, c.head_dim), dtype)] * 3
    second = jax.ShapeDtypeStruct((length, c.encoder_size), jnp.float32)
    layers = range(c.num_hidden_layers)
    windows, wholes = (
        [index for index in layers if (index in c.whole_layers) == is_whole] for is_whole in (False, True)
    )

    def embed(leaves: Leaves, table: jax.Array, tile: jax.Array) -> jax.Array:
        return embedded(c, leaves, table, tile)

    def window(leaves: Leaves, x: jax.Array) -> jax.Array:
        return behind(c, leaves, x, windowed(c, leaves, x))

    def heads(leaves: Leaves, x: jax.Array) -> list[jax.Array]:
        return list(split(c, leaves, normed(c, leaves, x)[None])[:, 0])

    def of_part(leaves: Leaves, x: jax.Array, seen: list[jax.Array], start: jax.Array) -> jax.Array:
        queries, keys, values = seen
        own = lax.dynamic_slice_in_dim(queries, start, part, 1)
        first = start // side
        out = attended(c, leaves, own[None], keys[None], values[None], side, first)[0]
        done = behind(c, leaves, lax.dynamic_slice_in_dim(x, start, part), out)
        return lax.dynamic_update_slice_in_dim(x, done, start, 0)

    def neck(leaves: Leaves, x: jax.Array) -> jax.Array:
        queries = leaves["queries_view" if rows == c.view_patches else "queries_crop"]
        return jnp.concatenate([narrowed(leaves, x, side), queries.astype(jnp.float32)])

    def query_layer(leaves: Leaves, x: jax.Array) -> jax.Array:
        return encoded(c, leaves, x)

    def project(leaves: Leaves, taps: list[jax.Array], x: jax.Array, start: jax.Array) -> jax.Array:
        # There are no taps, and the part is the whole.
        return projected(c, leaves, x, ends=rows == c.view_patches)

    def program(
        kind: str, function: Callable[..., Any], shapes: Shapes, *arguments: object, donates: bool = False
    ) -> Program:
        return Program(
            name=program_name(kind, rows=rows),
            function=function,
            arguments=(abstract(shapes, dtype), *arguments),
            donate=(1,) if donates else (),
        )

    found = [program(EMBED, embed, embed_shapes(c), table, tile)]
    if windows:
        found.append(program(LAYER, window, layer_shapes(c, windows[0]), x, donates=True))
    if wholes:
        shapes = layer_shapes(c, wholes[0])
        found.append(program(HEADS, heads, shapes, x))
        found.append(program(ROWS, of_part, shapes, x, seen, start, donates=True))
    return [
        *found,
        program(NECK, neck, neck_shapes(c), x),
        program(QUERY_LAYER, query_layer, encoder_shapes(c), second, donates=True),
        program(PROJECT, project, project_shapes(c), [], second, start),
    ]


def embedded(c: DeepEncoderConfig, leaves: Leaves, table: jax.Array, tile: jax.Array) -> jax.Array:
    """The residual stream of `tile [T, T, 3]` before the first layer: float32 `[R, D]`. table: `[3, 256]`.

    In a small tile, positions are those of the largest, shrunk by a bicubic filter that covers all of them.
    """
    pixels = table[jnp.arange(CHANNELS), tile]  # [T, T, 3]
    size, side = c.patch_size, len(tile) // c.patch_size
    patches = pixels.reshape(side, size, side, size, CHANNELS).transpose(0, 2, 4, 1, 3)
    positions = leaves["positions"].astype(jnp.float32)
    if side != c.view_side:
        shrinks = shrinking(c.view_side, side)
        square = positions.reshape(c.view_side, c.view_side, -1)
        square = jnp.einsum("sv,vwd->swd", shrinks, square, precision=lax.Precision.HIGHEST)
        positions = jnp.einsum("tw,swd->std", shrinks, square, precision=lax.Precision.HIGHEST)
    # as a convolution's kernel
    return linear(leaves, "patch", patches.reshape(side * side, -1)) + positions.reshape(side * side, -1)


def shrinking(before: int, after: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Weights `[after, before]` of a bicubic filter as wide as the step between two outputs (Keys 1981)."""
    step = before / after
    middles = (np.arange(after)[:, None] + 0.5) * step - 0.5
    far = np.abs(np.arange(before) - middles) / step
    near = ((_CUBIC + 2) * far - (_CUBIC + 3)) * far * far + 1
    tail = ((_CUBIC * far - 5 * _CUBIC) * far + 8 * _CUBIC) * far - 4 * _CUBIC
    weights = np.where(far < 1, near, np.where(far < 2, tail, 0))
    return np.asarray(weights / weights.sum(1, keepdims=True), np.float32)


def stretching(before: int, after: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Weights `[after, before]` of linear interpolation; ends repeat."""
    there = np.maximum((np.arange(after)[:, None] + 0.5) * (before / after) - 0.5, 0)
    there = np.minimum(there, before - 1)
    return np.asarray(np.maximum(1 - np.abs(np.arange(before) - there), 0), np.float32)


def normed(c: DeepEncoderConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    return layer_norm(leaves, "norm1", x, c.layer_norm_eps)


def split(c: DeepEncoderConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """Queries, keys and values of W windows `[W, R, D]`: `[3, W, H, R, Dh]`."""
    windows, rows, d = x.shape
    made = linear(leaves, "qkv", x.reshape(-1, d)).astype(leaves["qkv"].dtype)
    return made.reshape(windows, rows, 3, c.num_attention_heads, c.head_dim).transpose(2, 0, 3, 1, 4)


def windowed(c: DeepEncoderConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """What the patches `[R, D]` see in windows: float32 `[R, D]`. At the edges zeros fill windows, and are seen."""
    side, w, d = math.isqrt(len(x)), c.window, x.shape[1]
    count = -(-side // w)
    pad = count * w - side
    square = jnp.pad(normed(c, leaves, x).reshape(side, side, d), ((0, pad), (0, pad), (0, 0)))
    windows = square.reshape(count, w, count, w, d).transpose(0, 2, 1, 3, 4).reshape(-1, w * w, d)
    queries, keys, values = split(c, leaves, windows)
    out = attended(c, leaves, queries, keys, values, w, 0)
    square = out.reshape(count, count, w, w, d).transpose(0, 2, 1, 3, 4).reshape(count * w, count * w, d)
    return square[:side, :side].reshape(-1, d)


def attended(
    c: DeepEncoderConfig,
    leaves: Leaves,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    side: int,
    first: jax.Array | int,
) -> jax.Array:
    """What queries `[W, H, Q, Dh]` see of W squares of this side: float32 `[W, Q, D]`. They are whole rows, from row
    `first` on.

    A query's product with the relative position of a key's row, and that with the one of its column, are added to
    their score.
    """
    windows, heads, count, size = queries.shape
    own = queries.reshape(windows * heads, count // side, side, size)
    rows, columns = (relative(leaves[name], side) for name in ("relative_rows", "relative_columns"))
    rows = lax.dynamic_slice_in_dim(rows, first, count // side)
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    product = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    by_row, by_column = product("nrcd,rkd->nrck", own, rows), product("nrcd,ckd->nrck", own, columns)
    added = (by_row[..., :, None] + by_column[..., None, :]).reshape(windows * heads, count, side * side)
    keys, values = (each.reshape(windows * heads, side * side, size) for each in (keys, values))
    scores = batched(queries.reshape(windows * heads, count, size), keys, 2) * (1 / math.sqrt(size)) + added
    seen = batched(jax.nn.softmax(scores, axis=-1).astype(values.dtype), values, 1)
    return seen.reshape(windows, heads, count, size).transpose(0, 2, 1, 3).reshape(windows, count, -1)


def relative(positions: jax.Array, side: int) -> jax.Array:
    """The relative position of each key in a line of this length, for each query: `[side, side, Dh]`."""
    reach = 2 * side - 1
    if len(positions) != reach:
        stretches = stretching(len(positions), reach)
        fitted = jnp.matmul(stretches, positions.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        positions = fitted.astype(positions.dtype)
    at = np.arange(side)
    return positions[at[:, None] - at + side - 1]


def behind(c: DeepEncoderConfig, leaves: Leaves, x: jax.Array, seen: jax.Array) -> jax.Array:
    """The residual stream `[N, D]` after the rest of a layer of the first stage."""
    x = x + linear(leaves, "output", seen.reshape(x.shape))
    hidden = linear(leaves, "up", layer_norm(leaves, "norm2", x, c.layer_norm_eps))
    return x + linear(leaves, "down", jax.nn.gelu(hidden, approximate=False))


def narrowed(leaves: Leaves, x: jax.Array, side: int) -> jax.Array:
    """The positions of the second stage `[R / 16, E]` of patches `[R, D]`."""
    x = layer_norm(leaves, "narrow_norm", rows_first(leaves["narrow"], x), _NECK_EPS)
    x = layer_norm(leaves, "mix_norm", convolved(leaves["mix"], x, side, 1), _NECK_EPS)
    x = convolved(leaves["halve"], x, side, 2)
    return convolved(leaves["quarter"], x, side // 2, 2)


def convolved(kernel: jax.Array, x: jax.Array, side: int, stride: int) -> jax.Array:
    """A convolution of 3 x 3 over a square `[side side, C]`, padded with zeros: `[(side / stride)^2, F]`.

    kernel: `[F, 9 C]`, the nine places by rows.
    """
    padded = jnp.pad(x.reshape(side, side, -1), ((1, 1), (1, 1), (0, 0)))
    places = [
        padded[row : row + side : stride, column : column + side : stride]
        for row in range(3)
        for column in range(3)
    ]
    joined = jnp.concatenate(places, axis=-1)
    return rows_first(kernel, joined.reshape(-1, joined.shape[-1]))


def encoded(c: DeepEncoderConfig, leaves: Leaves, x: jax.Array) -> jax.Array:
    """The residual stream `[L, E]` after a layer of the second stage. Its second half is queries."""
    length, dtype, size = len(x), leaves["queries"].dtype, c.encoder_head_dim
    before = rms_norm(x, leaves["norm1"], c.encoder_eps)
    queries = linear(leaves, "queries", before).reshape(length, c.encoder_heads, size)
    stored = linear(leaves, "keys_values", before).reshape(length, 2, c.encoder_key_heads, size)
    turns = jnp.asarray(rotations(c, length))
    queries, keys = (apply_rope(each, turns).astype(dtype) for each in (queries, stored[:, 0]))
    values = stored[:, 1].astype(dtype)
    share = c.encoder_heads // c.encoder_key_heads
    queries = queries.reshape(length, c.encoder_key_heads, share, size).transpose(1, 2, 0, 3)
    scores = batched(queries.reshape(c.encoder_key_heads, share * length, size), keys.transpose(1, 0, 2), 2)
    scores = scores.reshape(-1, length, length) * (1 / math.sqrt(size))
    at = np.arange(length)
    scores = jnp.where((at < length // 2) | (at <= at[:, None]), scores, -jnp.inf)
    shares = (
        jax.nn.softmax(scores, axis=-1).astype(dtype).reshape(c.encoder_key_heads, share * length, length)
    )
    seen = batched(shares, values.transpose(1, 0, 2), 1)
    seen = seen.reshape(c.encoder_heads, length, size).transpose(1, 0, 2).reshape(length, -1)
    x = x + rows_first(leaves["output"], seen)
    hidden = gated(leaves, "gate_up", rms_norm(x, leaves["norm2"], c.encoder_eps))
    return x + rows_first(leaves["down"], hidden)


def rotations(c: DeepEncoderConfig, length: int) -> np.ndarray[tuple[int, int, int], np.dtype[np.float32]]:
    """Cosines and sines of all positions of the second stage, float32 `[L, 2, Dh / 2]`."""
    exponents = np.arange(0, c.encoder_head_dim, 2, dtype=np.float32) / np.float32(c.encoder_head_dim)
    wavelengths = np.array([power(c.rope_theta, float(each)) for each in exponents], np.float32)
    angles = np.arange(length, dtype=np.float32)[:, None] * (np.float32(1) / wavelengths)
    return cosines_and_sines(angles)


def projected(c: DeepEncoderConfig, leaves: Leaves, x: jax.Array, *, ends: bool) -> jax.Array:
    """The features of a tile, rounded to the weights' dtype as embeddings are, with spare rows up to whole places.

    ends: whether the separator follows them.
    """
    queries = rms_norm(x[len(x) // 2 :], leaves["final_norm"], c.encoder_eps)
    features = linear(leaves, "projection", queries)
    if ends:
        features = jnp.concatenate([features, leaves["separator"][None]])
    spare = -len(features) % c.place_tokens
    features = jnp.pad(features, ((0, spare), (0, 0)))
    return features.astype(leaves["projection"].dtype).astype(jnp.float32)
