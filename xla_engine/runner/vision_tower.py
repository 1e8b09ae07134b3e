"""A vision tower on the device: pictures in, features out. Pictures of any proportions become patches first.

Rows that decode wait for a slice of a picture's calls in each step, and maybe for a prefill call. So a slice has at
most half of the operations of the largest prefill call, or one call. They are counted, so that plans depend on nothing
that is measured. The calls themselves do not depend on the decoder, so the bits of features do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory, program_name
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.graphs.ops.rope import cosines_and_sines, power
from xla_engine.graphs.vision.config import CHANNELS, DeepEncoderConfig, PatchConfig, TowerConfig
from xla_engine.graphs.vision.deep_encoder import NECK, QUERY_LAYER
from xla_engine.graphs.vision.layers import EMBED, HEADS, LAYER, PROJECT, ROWS, TAP, rows_of_part
from xla_engine.graphs.vision.programs import leaf_shapes, tower_programs
from xla_engine.model_loader.weights import DTYPES

Array = np.ndarray[Any, Any]
_SCORE = 256  # operations of products that take about as long as a score, in softmax and in memory


class TowerCall(NamedTuple):
    """A call of a program. number: of the layer or tap. start: the first row of its part."""

    kind: str
    number: int = 0
    start: int = 0


Slices = tuple[tuple[TowerCall, ...], ...]


def slice_operations(model: ModelConfig, options: EngineConfig) -> float:
    """The most operations of a slice, beside a decoder."""
    weights = sum(
        shape[0] * shape[1]
        for name, shape in parameter_shapes(model).items()
        if name.startswith("layers.") and len(shape) == 2
    )
    return weights * options.chunk_size * options.prefill_lanes[-1]


def operations(c: TowerConfig, kind: str, rows: int, part: int) -> int:
    """Of a call of a program for `rows` patches, or for `part` of them."""
    if isinstance(c, DeepEncoderConfig):
        return _deep_operations(c, kind, rows, part)
    d, inner = c.hidden_size, c.num_attention_heads * c.head_dim
    if kind == EMBED:
        return 2 * rows * d * CHANNELS * c.frames * c.patch_size * c.patch_size
    if kind == HEADS:
        return 6 * rows * d * inner
    if kind == ROWS:
        scores = part * rows * (4 * inner + _SCORE * c.num_attention_heads)
        matrices = 3 if isinstance(c, PatchConfig) and (c.gated or c.pooled is not None) else 2
        return 2 * part * d * (inner + matrices * c.intermediate_size) + scores
    if kind == LAYER:
        return operations(c, HEADS, rows, rows) + operations(c, ROWS, rows, rows)
    if isinstance(c, PatchConfig) and c.pooled is not None:
        return 2 * part // c.merged * d * c.text_size
    joined = d if not isinstance(c, PatchConfig) and c.averages else c.merged * d
    if isinstance(c, PatchConfig) and c.gated:
        return 2 * part // c.merged * c.text_size * (joined + c.text_size + 3 * c.merger_size)
    if isinstance(c, PatchConfig):  # a tap, or the end
        return 2 * part // c.merged * joined * (joined + c.text_size)
    return 2 * rows // c.merged * joined * c.text_size


def _deep_operations(c: DeepEncoderConfig, kind: str, rows: int, part: int) -> int:
    """`operations` of DeepSeek-OCR-2's tower."""
    d, tokens = c.hidden_size, rows // c.merged
    length, inner = 2 * tokens, c.encoder_heads * c.encoder_head_dim

    def layer(queries: int, keys: int) -> int:
        """A layer of the first stage behind its queries, keys and values. Each query sees `keys` patches."""
        return 2 * queries * d * (d + 2 * c.intermediate_size) + queries * keys * (
            4 * d + _SCORE * c.num_attention_heads
        )

    found = {
        EMBED: 2 * rows * d * CHANNELS * c.patch_size * c.patch_size,
        LAYER: 6 * rows * d * d + layer(rows, c.window * c.window),
        HEADS: 6 * rows * d * d,
        ROWS: layer(part, rows),
        NECK: 2 * rows * c.neck_size * (d + 9 * c.neck_size)
        + 18 * c.middle_size * tokens * (4 * c.neck_size + c.encoder_size),
        QUERY_LAYER: 2 * length * c.encoder_size * (2 * inner + 3 * c.encoder_mlp_size)
        + 4 * length * c.encoder_size * c.encoder_key_heads * c.encoder_head_dim
        + length * length * (4 * inner + _SCORE * c.encoder_heads),
        PROJECT: 2 * tokens * c.encoder_size * c.text_size,
    }
    return found[kind]


class TowerSlices:
    """How the pictures of a tower are cut into slices.

    parts: for each size of its programs, in patches, the rows that a call of a layer takes.
    """

    def __init__(
        self, config: TowerConfig, most_tokens: int | None = None, limit: float | None = None
    ) -> None:
        """most_tokens: of a picture; None: as many as any tower reads. limit: operations of a slice; None: each call
        is one."""
        self._config, self._limit = config, limit
        sizes = _sizes(config)
        most = sizes[-1] if most_tokens is None else most_tokens * config.merged
        pairs = zip((0, *sizes), sizes, strict=False)
        self.parts = {
            rows: rows_of_part(rows, _unit(config, rows)) for before, rows in pairs if before < most
        }
        self._by_tokens: dict[int, tuple[int, Slices]] = {}
        before = 0
        for rows, part in self.parts.items():
            first = before // part * part + part if isinstance(config, PatchConfig) else rows
            for patches in range(first, rows + 1, part):
                self._by_tokens[_tokens(config, patches)] = (rows, self._packed(rows, patches))
            before = rows

    @property
    def by_tokens(self) -> tuple[tuple[int, int], ...]:
        """Pairs of tokens and slices, ascending: a picture of at most that many tokens has that many slices."""
        return tuple((most, len(slices)) for most, (_, slices) in self._by_tokens.items())

    def of(self, tokens: int) -> tuple[int, Slices]:
        """The size of the programs for a picture of that number of tokens, and its slices."""
        return next(found for most, found in self._by_tokens.items() if tokens <= most)

    def _calls(self, rows: int, patches: int) -> Iterator[TowerCall]:
        """In order. Parts that have spare rows only are left out."""
        c, part = self._config, self.parts[rows]
        starts, taps = range(0, patches, part), c.taps if isinstance(c, PatchConfig) else ()
        yield TowerCall(EMBED)
        for layer in range(c.num_hidden_layers):
            if layer not in c.whole_layers if isinstance(c, DeepEncoderConfig) else part == rows:
                yield TowerCall(LAYER, layer)
            else:
                yield TowerCall(HEADS, layer)
                yield from (TowerCall(ROWS, layer, start) for start in starts)
            if layer in taps:
                yield from (TowerCall(TAP, taps.index(layer), start) for start in starts)
        if isinstance(c, DeepEncoderConfig):
            yield TowerCall(NECK)
            yield from (TowerCall(QUERY_LAYER, layer) for layer in range(c.encoder_layers))
        yield from (
            TowerCall(PROJECT, 0, start) for start in (starts if isinstance(c, PatchConfig) else (0,))
        )

    def _packed(self, rows: int, patches: int) -> Slices:
        slices: list[list[TowerCall]] = []
        used = 0.0
        for call in self._calls(rows, patches):
            needed = operations(self._config, call.kind, rows, self.parts[rows])
            if self._limit is None or not slices or used + needed > self._limit:
                slices.append([])
                used = 0.0
            slices[-1].append(call)
            used += needed
        return tuple(map(tuple, slices))


def _sizes(c: TowerConfig) -> tuple[int, ...]:
    """Rows of the programs, ascending."""
    if isinstance(c, DeepEncoderConfig):
        return tuple(c.tile_tokens)
    return c.buckets if isinstance(c, PatchConfig) else (c.patches,)


def _unit(c: TowerConfig, rows: int) -> int:
    """Rows of a part are a multiple of this: the patches of a place of the feature buffer, or of a row of a tile."""
    if isinstance(c, DeepEncoderConfig):
        return math.isqrt(rows)
    return c.place_tokens * c.merged if isinstance(c, PatchConfig) else 1


def _tokens(c: TowerConfig, patches: int) -> int:
    """Tokens of a picture of so many patches."""
    return c.tile_tokens[patches] if isinstance(c, DeepEncoderConfig) else patches // c.merged


_FIRST = ("patch", "patch_bias", "positions")  # leaves of the program before the layers


class PartlyEncoded(NamedTuple):
    """A picture between two calls.

    rows: of the programs that it runs in. x: the residual stream, float32 `[rows, D]`.
    picture: what layers take beside it. seen: queries, keys and values of a layer that runs in parts.
    taps: features of early layers so far, by the first row of their part. features: of parts at the end, float32
        `[tokens, feature_size]` each.
    """

    rows: int
    x: jax.Array
    picture: tuple[jax.Array, ...]
    seen: list[jax.Array]
    taps: Mapping[int, list[jax.Array]]
    features: tuple[jax.Array, ...] = ()


class VisionTower:
    """The compiled programs of a tower and its weights.

    A call takes one tile or picture. The programs follow from its size alone, so its features are a function of its
    pixels, on one machine and number of threads.
    """

    def __init__(
        self,
        config: TowerConfig,
        dtype: str,
        weights: Mapping[str, Array],
        table: Array,
        fingerprint: str = "given",
        slices: TowerSlices | None = None,
        most_tokens: int | None = None,
    ) -> None:
        """weights: by the names of `leaf_shapes`. table: `ImageProcessor.table`. slices: by default, each call is one.

        most_tokens: of a tile of the processor; None: as many as the tower reads.

        fingerprint: of everything that features depend on besides a picture's file; part of an engine's identity.
        """
        self.config, self.fingerprint = config, fingerprint
        self.slices = TowerSlices(config, most_tokens) if slices is None else slices
        self.most_tokens = most_tokens or self.slices.by_tokens[-1][0]
        self._inventory = Inventory()
        programs = [
            tower_programs(config, jnp.dtype(DTYPES[dtype]), *each) for each in self.slices.parts.items()
        ]
        self._inventory.compile([each for of_size in programs for each in of_size])
        # By kind of program, or by that and the index of a layer or tap.
        self._leaves: dict[str, dict[str, jax.Array]] = {}
        for name in leaf_shapes(config):
            group, _, leaf = name.rpartition(".")
            group = group or (EMBED if name in _FIRST else PROJECT)
            self._leaves.setdefault(group, {})[leaf] = jax.device_put(weights[name])
        self._table = jax.device_put(table)

    def __call__(self, tile: Array) -> Array:
        """The features of a tile: uint8 `[H, W, 3]` to float32 `[tokens, feature_size]`."""
        tokens = self.tokens(tile.shape)
        assert tokens is not None, f"no tile of this tower: {tile.shape}"
        return np.concatenate(self.advance(tile, None, 0, self.stages(tile.shape)).features)[:tokens]

    def glance(self, tile: Array) -> tuple[jax.Array, ...]:
        """What every program makes of a tile, with the first layer of each kind only: features for a check."""
        calls = [call for of_slice in self._cut(tile.shape)[1] for call in of_slice]
        first: dict[str, int] = {}
        for call in calls:
            first.setdefault(call.kind, call.number)
        calls = [call for call in calls if call.kind == TAP or call.number == first[call.kind]]
        return self._run(tile, None, calls).features

    def tokens(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a tile of this shape; None if it does not fit the tower."""
        tokens = self.config.tokens_of(shape)
        return tokens if tokens is not None and tokens <= self.slices.by_tokens[-1][0] else None

    def stages(self, shape: tuple[int, ...]) -> int:
        """Slices of a tile of this shape."""
        return len(self._cut(shape)[1])

    @property
    def outputs(self) -> tuple[int, ...]:
        """Rows of features that a call at the end may return; some may be spare."""
        if isinstance(self.config, PatchConfig):
            return tuple(sorted({part // self.config.merged for part in self.slices.parts.values()}))
        if isinstance(self.config, DeepEncoderConfig):
            c = self.config
            return tuple(
                -(-c.tile_tokens[rows] // c.place_tokens) * c.place_tokens for rows in self.slices.parts
            )
        return (self.config.tokens,)

    @property
    def examples(self) -> list[Array]:
        """A tile for each size of the programs."""
        if isinstance(self.config, PatchConfig):
            c, side = self.config, self.config.merge_size * self.config.patch_size
            return [
                np.zeros((side, rows // c.merged * side, CHANNELS), np.uint8) for rows in self.slices.parts
            ]
        if isinstance(self.config, DeepEncoderConfig):
            sides = [math.isqrt(rows) * self.config.patch_size for rows in self.slices.parts]
            return [np.zeros((side, side, CHANNELS), np.uint8) for side in sides]
        side = self.config.image_size
        return [np.zeros((side, side, CHANNELS), np.uint8)]

    def advance(self, tile: Array, stream: PartlyEncoded | None, begin: int, end: int) -> PartlyEncoded:
        """Start slices `begin` to `end` for a tile. stream: what the slices before have returned, which is donated."""
        slices = self._cut(tile.shape)[1][begin:end]
        return self._run(tile, stream, [call for of_slice in slices for call in of_slice])

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, Slices]:
        tokens = self.tokens(shape)
        assert tokens is not None, f"no tile of this tower: {shape}"
        return self.slices.of(tokens)

    def _run(self, tile: Array, stream: PartlyEncoded | None, calls: Iterable[TowerCall]) -> PartlyEncoded:
        for call in calls:
            stream = self._started(tile) if stream is None else self._behind(call, stream)
        assert stream is not None, "no call was asked for"
        return stream

    def _started(self, tile: Array) -> PartlyEncoded:
        rows, _ = self._cut(tile.shape)
        inputs = [np.ascontiguousarray(tile)]
        picture: tuple[jax.Array, ...] = ()
        if isinstance(self.config, PatchConfig):
            inputs, angles = patch_inputs(self.config, tile, rows)
            count = np.int32((self.tokens(tile.shape) or 0) * self.config.merged)
            picture = (jax.device_put(angles), jax.device_put(count))
        given = map(jax.device_put, inputs)
        x = self._inventory(program_name(EMBED, rows=rows), self._leaves[EMBED], self._table, *given)
        return PartlyEncoded(rows, x, picture, [], {})

    def _behind(self, call: TowerCall, stream: PartlyEncoded) -> PartlyEncoded:
        """The picture behind a call."""
        kind, number, start = call
        name, at = program_name(kind, rows=stream.rows), np.int32(start)

        def run(group: str, *arguments: Any) -> Any:
            return self._inventory(name, self._leaves[group], *arguments)

        if kind == HEADS:
            return stream._replace(seen=run(f"layers.{number}", stream.x, *stream.picture))
        if kind == NECK:
            return stream._replace(x=run("neck", stream.x))
        if kind == QUERY_LAYER:
            return stream._replace(x=run(f"encoder.{number}", stream.x))
        if kind in (LAYER, ROWS):
            seen = (stream.seen, at) if kind == ROWS else ()
            return stream._replace(x=run(f"layers.{number}", stream.x, *seen, *stream.picture))
        before = stream.taps.get(start, [])
        if kind == TAP:
            found = [*before, run(f"taps.{number}", stream.x, at)]
            return stream._replace(taps={**stream.taps, start: found})
        features = run(PROJECT, before, stream.x, at)
        return stream._replace(features=(*stream.features, features))

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        """What each program cost and needs."""
        return tuple(self._inventory)

    def close(self) -> None:
        """Drop the programs."""
        self._inventory.clear()


def patch_inputs(c: PatchConfig, tile: Array, rows: int) -> tuple[list[Array], Array]:
    """Patches, and positions near them with their shares if there are some, as the program before the layers takes
    them, and the angles of each; all with spare rows."""
    patches = patches_of(tile, c.patch_size, c.merge_size)
    height, width = tile.shape[0] // c.patch_size, tile.shape[1] // c.patch_size
    row, column = places(height, width, c.merge_size)
    near: tuple[Array, ...] = ()
    at = np.stack([row, column], axis=1)
    if c.pooled is not None:
        at = at[:, ::-1]  # columns first
        near = ((at + np.array([0, c.position_side])).astype(np.int32), np.ones(at.shape, np.float32))
    elif c.position_side:
        near = interpolated(row, column, height, width, c.position_side, centred=c.flat)
    turned = angles(at, c.rope_theta, c.head_dim)

    def padded(each: Array) -> Array:
        found = np.zeros((rows, *each.shape[1:]), each.dtype)
        found[: len(each)] = each
        return found

    return [padded(each) for each in (patches, *near)], padded(turned)


def patches_of(tile: Array, size: int, merge: int) -> Array:
    """The patches of a picture `[H, W, 3]`, square by square of `merge` x `merge`: `[R, 3, size, size]`."""
    height, width = tile.shape[0] // size // merge, tile.shape[1] // size // merge
    cut = tile.reshape(height, merge, size, width, merge, size, 3)
    return cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size, size)


def places(height: int, width: int, merge: int) -> tuple[Array, Array]:
    """Row and column of each patch of a grid, in the order of `patches_of`: i64 `[R]` each."""
    found = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    row, column = found.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column


def interpolated(
    row: Array, column: Array, height: int, width: int, side: int, *, centred: bool = False
) -> tuple[Array, Array]:
    """The learned positions around each patch, of a square of `side`, and their shares: i32 and float32 `[R, 4]`.

    The first and last patch lie on the first and last position, or, if `centred`, both cover the same square; float32
    rounds as in transformers (`vision_utils.py`).
    """

    def along(at: Array, length: int) -> tuple[Array, Array]:
        if centred:
            middle = (at.astype(np.float32) + np.float32(0.5)) * np.float32(side)
            there = middle / np.float32(length) - np.float32(0.5)
        else:
            there = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
        floor = np.floor(there)
        taps = floor.astype(np.int32)[:, None] + np.arange(2, dtype=np.int32)
        far = np.abs(there[:, None] - floor[:, None] - np.arange(2, dtype=np.float32))
        return np.clip(taps, 0, side - 1), np.maximum(np.float32(1) - far, np.float32(0))

    (rows, heights), (columns, widths) = along(row, height), along(column, width)
    near = (rows[:, :, None] * np.int32(side) + columns[:, None, :]).reshape(-1, 4)
    return near, (heights[:, :, None] * widths[:, None, :]).reshape(-1, 4)


def angles(at: Array, theta: float, head_dim: int) -> Array:
    """Cosines and sines of positions `[R, 2]` on two axes, half of the angles each: float32 `[R, 2, Dh/2]`."""
    half = head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    wavelengths = np.array([power(theta, float(each)) for each in exponents], np.float32)
    turned = at.astype(np.float32)[:, :, None] * (np.float32(1) / wavelengths)  # [R, 2, Dh/4]
    return cosines_and_sines(turned.reshape(len(at), -1))
