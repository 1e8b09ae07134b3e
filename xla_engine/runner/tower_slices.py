"""The calls that encode a picture, and which of them run between two steps of others.

Rows that decode wait for a slice of a picture's calls in each step, and maybe for a prefill call. So a slice has at
most half of the operations of the largest prefill call, or one call. They are counted, so that plans depend on nothing
that is measured. The calls themselves do not depend on the decoder, so the bits of features do not either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from xla_engine.config import EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.decoder import parameter_shapes
from xla_engine.graphs.vision.config import CHANNELS
from xla_engine.graphs.vision.layers import HEADS, LAYER, ROWS, Config, rows_of_part
from xla_engine.graphs.vision.patch_config import BUCKETS, PatchConfig
from xla_engine.graphs.vision.patches import TAP
from xla_engine.graphs.vision.tower import EMBED, PROJECT

_SCORE = 256  # operations of products that take about as long as a score, in softmax and in memory


class Call(NamedTuple):
    """A call of a program. number: of the layer or tap. start: the first row of its part."""

    kind: str
    number: int = 0
    start: int = 0


Slices = tuple[tuple[Call, ...], ...]


def slice_operations(model: ModelConfig, options: EngineConfig) -> float:
    """The most operations of a slice, beside a decoder."""
    weights = sum(
        shape[0] * shape[1]
        for name, shape in parameter_shapes(model).items()
        if name.startswith("layers.") and len(shape) == 2
    )
    return weights * options.chunk_size * options.prefill_lanes[-1]


def operations(c: Config, kind: str, rows: int, part: int) -> int:
    """Of a call of a program for `rows` patches, or for `part` of them."""
    d = c.hidden_size
    if kind == EMBED:
        return 2 * rows * d * CHANNELS * c.frames * c.patch_size * c.patch_size
    if kind == HEADS:
        return 6 * rows * d * d
    if kind == ROWS:
        scores = part * rows * (4 * d + _SCORE * c.num_attention_heads)
        return 2 * part * d * (d + 2 * c.intermediate_size) + scores
    if kind == LAYER:
        return operations(c, HEADS, rows, rows) + operations(c, ROWS, rows, rows)
    joined = d if c.averages else c.merged * d
    if isinstance(c, PatchConfig):  # a tap, or the end
        return 2 * part // c.merged * joined * (joined + c.text_size)
    return 2 * rows // c.merged * joined * c.text_size


class TowerSlices:
    """How the pictures of a tower are cut into slices.

    parts: for each size of its programs, in patches, the rows that a call of a layer takes.
    """

    def __init__(self, config: Config, most_tokens: int | None = None, limit: float | None = None) -> None:
        """most_tokens: of a picture; None: as many as any tower reads. limit: operations of a slice; None: each call
        is one."""
        self._config, self._limit = config, limit
        sizes: tuple[int, ...] = BUCKETS if isinstance(config, PatchConfig) else (config.patches,)
        most = sizes[-1] if most_tokens is None else most_tokens * config.merged
        pairs = zip((0, *sizes), sizes, strict=False)
        self.parts = {rows: rows_of_part(rows) for before, rows in pairs if before < most}
        self._by_patches: dict[int, tuple[int, Slices]] = {}
        before = 0
        for rows, part in self.parts.items():
            first = before // part * part + part if isinstance(config, PatchConfig) else rows
            for patches in range(first, rows + 1, part):
                self._by_patches[patches] = (rows, self._packed(rows, patches))
            before = rows

    @property
    def by_tokens(self) -> tuple[tuple[int, int], ...]:
        """Pairs of tokens and slices, ascending: a picture of at most that many tokens has that many slices."""
        merged = self._config.merged
        return tuple((most // merged, len(slices)) for most, (_, slices) in self._by_patches.items())

    def of(self, tokens: int) -> tuple[int, Slices]:
        """The size of the programs for a picture of that number of tokens, and its slices."""
        patches = tokens * self._config.merged
        return next(found for most, found in self._by_patches.items() if patches <= most)

    def _calls(self, rows: int, patches: int) -> Iterator[Call]:
        """In order. Parts that have spare rows only are left out."""
        c, part = self._config, self.parts[rows]
        starts, taps = range(0, patches, part), c.taps if isinstance(c, PatchConfig) else ()
        yield Call(EMBED)
        for layer in range(c.num_hidden_layers):
            if part == rows:
                yield Call(LAYER, layer)
            else:
                yield Call(HEADS, layer)
                yield from (Call(ROWS, layer, start) for start in starts)
            if layer in taps:
                yield from (Call(TAP, taps.index(layer), start) for start in starts)
        yield from (Call(PROJECT, 0, start) for start in (starts if isinstance(c, PatchConfig) else (0,)))

    def _packed(self, rows: int, patches: int) -> Slices:
        slices: list[list[Call]] = []
        used = 0.0
        for call in self._calls(rows, patches):
            needed = operations(self._config, call.kind, rows, self.parts[rows])
            if self._limit is None or not slices or used + needed > self._limit:
                slices.append([])
                used = 0.0
            slices[-1].append(call)
            used += needed
        return tuple(map(tuple, slices))
