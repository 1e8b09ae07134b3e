"""Prefill and decode calls: from a plan to the programs that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.row_state.packing import pack
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.in_flight import DecodeSamples, FirstSamples
from xla_engine.runner.prefill_inputs import make_lanes, prompt_targets
from xla_engine.runner.programs import decode_name, prefill_name, prompt_name, verify_name
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.verify_inputs import NO_GUESS, Guess, make_drafts
from xla_engine.scheduler import Chunk, Row, VerifyRow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What stays the same while the same rows decode.

    rows: those of the plan. index: their slots, i64 `[rows]`. scheduled: bool `[B]`, on the device.
    wanted: most likely tokens each row wants. host_gated: slot and settings of rows whose mask changes in every step.
    """

    rows: tuple[Row | VerifyRow, ...]
    index: np.ndarray
    scheduled: jax.Array
    wanted: tuple[int, ...]
    host_gated: tuple[tuple[int, RowSettings], ...]


class Dispatch:
    """Starts programs on the donated state; nothing here blocks.

    lengths: upper bounds of the rows' lengths, i64 `[B]`, advanced as calls start, so that the key bucket is chosen
        without a fetch.

    Lane counts and key lengths to choose from come with each call, ascending.
    """

    def __init__(
        self,
        inventory: Inventory,
        state: DeviceState,
        weights: list[jax.Array],
        rope: jax.Array,
        *,
        rows: int,
        chunk_size: int,
        context_length: int,
    ) -> None:
        """rows: of the decode graph. chunk_size: positions of a lane. context_length: of a request at most."""
        self.lengths = np.zeros(rows, np.int64)
        self._inventory = inventory
        self._state = state
        self._weights = weights
        self._rope = rope
        self._chunk_size = chunk_size
        self._context_length = context_length
        self._rows: _Rows | None = None

    def reset(self) -> None:
        """Forget all lengths and rows."""
        self.lengths[:] = 0
        self._rows = None

    def run(self, name: str, work: Any) -> tuple[jax.Array, ...]:
        """Run a program on the donated state; returns its packed samples `[2, N]` and what follows them."""
        state = self._state
        state.refresh()
        state.cache, state.rows, *results = self._inventory(
            name, self._weights, self._rope, state.cache, state.rows, work, state.tables
        )
        return tuple(results)

    def prompt_logprobs(self, lanes: int, hidden: jax.Array, target: np.ndarray) -> jax.Array:
        """Score `target`, i32 `[lanes * chunk_size]` (-1: none), by the hidden states of a prefill call."""
        return self._inventory(prompt_name(lanes), self._weights, hidden, jax.device_put(target))

    def fill_tables(self, slot: int, row: RowSettings) -> None:
        """Give a slot what its request brings that is too wide for the row state."""
        if row.params.logit_bias:
            self._state.host.set_bias(slot, row.params.logit_bias)
        if row.mask is not None:
            self._state.host.set_mask(slot, row.mask.words)

    def prefill(
        self,
        chunks: Sequence[Chunk],
        settings: Mapping[str, RowSettings],
        lane_choices: Sequence[int],
        key_choices: Sequence[int],
    ) -> tuple[FirstSamples, ...]:
        """Start the prefill calls of a plan's chunks, each with the lanes of the largest graph at most."""
        most = lane_choices[-1]
        calls = [chunks[at : at + most] for at in range(0, len(chunks), most)]
        return tuple(self._prefill(call, settings, lane_choices, key_choices) for call in calls)

    def _prefill(
        self,
        chunks: Sequence[Chunk],
        settings: Mapping[str, RowSettings],
        lane_choices: Sequence[int],
        key_choices: Sequence[int],
    ) -> FirstSamples:
        lanes = _smallest(lane_choices, len(chunks))
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        name = prefill_name(lanes, _smallest(key_choices, max(ends)))
        last = {lane: settings[chunk.request_id] for lane, chunk in enumerate(chunks) if chunk.is_last}
        for lane, row in last.items():
            self.fill_tables(chunks[lane].slot.index, row)
        samples, top, hidden = self.run(
            name, jax.device_put(pack(make_lanes(chunks, last, lanes, self._chunk_size)))
        )
        for chunk, end in zip(chunks, ends, strict=True):
            self.lengths[chunk.slot.index] = end
        wanted = tuple(row.top_logprobs for row in last.values())
        return FirstSamples(
            samples=samples,
            lanes=tuple(last),
            wanted=wanted,
            top=top if any(wanted) else None,
            prompt=self._prompt_logprobs(chunks, settings, lanes, hidden),
        )

    def _prompt_logprobs(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], lanes: int, hidden: jax.Array
    ) -> tuple[jax.Array, tuple[tuple[int, Chunk, RowSettings], ...]] | None:
        asked = []
        for lane, chunk in enumerate(chunks):
            row = settings[chunk.request_id]
            if row.params.prompt_logprobs is not None and prompt_targets(chunk, row):
                asked.append((lane, chunk, row))
        if not asked:
            return None
        target = np.full((lanes, self._chunk_size), -1, np.int32)
        for lane, chunk, row in asked:
            ahead = prompt_targets(chunk, row)
            target[lane, : len(ahead)] = ahead
        return self.prompt_logprobs(lanes, hidden, target.reshape(-1)), tuple(asked)

    def decode(
        self,
        rows: tuple[Row | VerifyRow, ...],
        settings: Mapping[str, RowSettings],
        key_choices: Sequence[int],
    ) -> DecodeSamples:
        """Start one decode step of a plan's rows. The same tuple again is known to be the same rows."""
        if self._rows is None or self._rows.rows is not rows:
            self._rows = self._joined(rows, settings)
        joined = self._rows
        for slot, row in joined.host_gated:
            assert row.mask is not None
            self._state.host.set_mask(slot, row.mask.words)
        keys = key_choices[-1]
        if len(key_choices) > 1:
            self.lengths[joined.index] += 1
            longest = max(self.lengths[joined.index].tolist())
            keys = _smallest(key_choices, min(longest, self._context_length))
        samples, top = self.run(decode_name(keys), joined.scheduled)
        return DecodeSamples(samples=samples, wanted=joined.wanted, top=top if any(joined.wanted) else None)

    def verify(
        self,
        rows: Sequence[VerifyRow],
        settings: Mapping[str, RowSettings],
        guesses: Mapping[str, Guess],
        width: int,
        shapes: Sequence[tuple[int, int]],
        key_choices: Sequence[int],
    ) -> DecodeSamples:
        """Start one verify step. shapes: (lanes, width) of the programs there are."""
        lanes = min(lanes for lanes, wide in shapes if wide == width and lanes >= len(rows))
        for row in rows:
            mask = settings[row.request_id].mask
            if mask is not None and mask.host_gated:
                self._state.host.set_mask(row.slot.index, mask.words)
                if masks := guesses.get(row.request_id, NO_GUESS).masks:
                    self._state.host.set_draft_masks(row.slot.index, masks[: width - 1])
            self.lengths[row.slot.index] += row.width
        longest = max(int(self.lengths[row.slot.index]) for row in rows)
        keys = _smallest(key_choices, min(longest, self._context_length))
        drafts = jax.device_put(pack(make_drafts(rows, guesses, lanes, width)))
        samples, top = self.run(verify_name(lanes, width, keys), drafts)
        wanted = tuple(settings[row.request_id].top_logprobs for row in rows)
        return DecodeSamples(samples=samples, wanted=wanted, top=top if any(wanted) else None)

    def _joined(self, rows: tuple[Row | VerifyRow, ...], settings: Mapping[str, RowSettings]) -> _Rows:
        index = np.array([row.slot.index for row in rows], np.int64)
        scheduled = np.zeros(len(self.lengths), np.bool_)
        scheduled[index] = True
        theirs = [settings[row.request_id] for row in rows]
        return _Rows(
            rows=rows,
            index=index,
            scheduled=jax.device_put(scheduled),
            wanted=tuple(row.top_logprobs for row in theirs),
            host_gated=tuple(
                (int(at), row)
                for at, row in zip(index, theirs, strict=True)
                if row.mask is not None and row.mask.host_gated
            ),
        )


def _smallest(sizes: Sequence[int], needed: int) -> int:
    """The first of ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)
