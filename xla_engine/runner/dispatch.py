"""Dispatch: from a plan to the calls of compiled programs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.inventory import Inventory, program_name
from xla_engine.graphs.row_state.rows import pack
from xla_engine.observability.histogram import Histogram
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.after_prefill import AfterPrefill, scored_targets
from xla_engine.runner.call_sizes import Sizes, decode_work, prefill_calls, smallest
from xla_engine.runner.decode_inputs import DecodeInputs, decode_inputs
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.features import FeatureBuffer
from xla_engine.runner.in_flight import DecodeSamples, FirstSamples
from xla_engine.runner.inputs import NO_DRAFT, Draft, idle_lanes, make_drafts, make_lanes, no_drafts
from xla_engine.runner.kv_moves import StateMoves
from xla_engine.runner.programs import PREFILL, VERIFY, decode_name
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import Chunk, Row, SavedState, VerifyRow


class Dispatch:
    """Starts programs on the donated state without blocking.

    lengths: upper bounds of the rows' lengths, i64 `[B]`, advanced when calls start, so that the key bucket can be
        chosen without fetching anything.
    padding: histogram of the share of each prefill call's positions that is padding; None: not recorded.
    """

    def __init__(
        self,
        inventory: Inventory,
        state: DeviceState,
        weights: list[jax.Array],
        rope: jax.Array,
        put: Callable[..., Any],
        config: EngineConfig,
        context_length: int,
        state_moves: StateMoves,
        *,
        device_proposer: DeviceProposer | None = None,
        pooling: str | None = None,
        features: FeatureBuffer | None = None,
        takes_host_arrays: bool = False,
    ) -> None:
        """put: copies host arrays to the devices. context_length: the most positions of a request.
        takes_host_arrays: programs may be given host arrays as they are, which takes a sixth of the time of a copy and
            a call.
        state_moves: saves states of recurrent layers.
        device_proposer: drafts in verify programs. pooling: one of
            `graphs.config.POOLING_TYPES`; None: prompts are not pooled. features: None without a vision tower.
        """
        self._features = features
        self._rope_offsets = features is not None and features.turns
        self._takes_host_arrays = takes_host_arrays
        self.put = put
        self._after = AfterPrefill(
            *(inventory, weights, rope, put, config.chunk_size),
            device_proposer=device_proposer,
            pooling=pooling,
        )
        # Whether the last layer's output is read at all prompt positions; the self-check also sets it.
        self.reads_all = self._after.reads_all
        self._config, self._chunk_size = config, config.chunk_size
        self._dry, self._lora = config.enable_dry, config.enable_lora
        self.lengths = np.zeros(config.device_rows, np.int64)
        self.padding: Histogram | None = None
        self._inventory = inventory
        self._state = state
        self._weights = weights
        self._rope = rope
        self._context_length = context_length
        self._state_moves = state_moves
        self._device_proposer = device_proposer
        self._rows: DecodeInputs | None = None

    def reset(self) -> None:
        """Forget all lengths and rows."""
        self.lengths[:] = 0
        self._rows = None

    def warm_up(self, buckets: Sequence[int], few_sizes: Sequence[int]) -> None:
        """Run every step program once without work. buckets: key lengths."""
        config = self._config
        for lanes in config.prefill_lanes:
            for bucket in buckets:
                idle = self.put(pack(idle_lanes(config, lanes, self._features)))
                _, _, hidden, *seen = self.run_prefill(program_name(PREFILL, lanes=lanes, keys=bucket), idle)
            self._after.warm_up(lanes, hidden, [hidden, *seen][-1], idle)
        for bucket in buckets:
            for few in (None, *few_sizes):
                idle = self.put(decode_work(np.arange(0), config.device_rows, few))
                jax.block_until_ready(self.run(decode_name(bucket, few), idle))
            for lanes, width in config.verify_shapes:
                idle = self.put(pack(no_drafts(lanes, width)))
                name = program_name(VERIFY, lanes=lanes, width=width, keys=bucket)
                jax.block_until_ready(self.run_verify(name, idle))

    def run_prefill(self, name: str, work: Any) -> tuple[Any, ...]:
        return self.run(name, work) if self._features is None else self.run(name, work, self._features.rows)

    def run_verify(self, name: str, work: Any) -> tuple[jax.Array, ...]:
        if self._device_proposer is None:
            return self.run(name, work)
        *results, state = self.run(name, work, *self._device_proposer.takes)
        self._device_proposer.keep(state)
        return tuple(results)

    def run(self, name: str, work: Any, *more: Any) -> tuple[Any, ...]:
        """Run a program on the donated state; returns its packed samples `[2, N]` and its further results.

        work: the only argument that may be a host array. more: further arguments.
        """
        state = self._state
        state.refresh()
        with jax.transfer_guard_host_to_device("allow") if isinstance(work, np.ndarray) else nullcontext():
            state.cache, state.rows, *results = self._inventory(
                name, self._weights, self._rope, state.cache, state.rows, work, state.tables, *more
            )
        return tuple(results)

    def _given(self, array: np.ndarray) -> np.ndarray | jax.Array:
        """What a program is given that is called once with this array."""
        if self._takes_host_arrays:
            return array
        placed: jax.Array = self.put(array)
        return placed

    def fill_tables(self, slot: int, row: RowSettings) -> None:
        """Set the logit bias and mask of a slot, which are too wide for the row state."""
        if row.params.logit_bias:
            self._state.host.set_bias(slot, row.params.logit_bias)
        if row.mask is not None:
            self._state.host.set_mask(slot, row.mask.words)

    def prefill(
        self,
        chunks: Sequence[Chunk],
        settings: Mapping[str, RowSettings],
        sizes: Sizes,
        saves: Sequence[SavedState] = (),
    ) -> tuple[FirstSamples, ...]:
        """Start the prefill calls for a plan's chunks, each with at most the lanes of the largest program.

        saves: states of recurrent layers to save between the calls.
        """
        found = []
        joined = () if self._features is None else self._features.joined(chunks)
        for call, due in prefill_calls(chunks, sizes.lanes[-1], saves, joined):
            found.append(self._prefill(call, settings, sizes))
            for each in due:
                self._state_moves.save(each.slot.index, each.place)
        return tuple(found)

    def _prefill(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], sizes: Sizes
    ) -> FirstSamples:
        lanes = smallest(sizes.lanes, len(chunks))
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        name = program_name(PREFILL, lanes=lanes, keys=sizes.keys_for(max(ends)))
        last = {lane: settings[chunk.request_id] for lane, chunk in enumerate(chunks) if chunk.is_last}
        for lane, row in last.items():
            self.fill_tables(chunks[lane].slot.index, row)
        # Pooled lanes sample nothing and activate no row.
        armed = {lane: row for lane, row in last.items() if not isinstance(row.params, PoolingParams)}
        adapters = [settings[chunk.request_id].adapter for chunk in chunks] if self._lora else None
        whole = None if self.reads_all else [bool(scored_targets(chunk, settings)) for chunk in chunks]
        pictures = {} if self._features is None else self._features.fields(chunks, lanes, self._chunk_size)
        filled = make_lanes(
            chunks,
            armed,
            lanes,
            self._chunk_size,
            dry=self._dry,
            adapters=adapters,
            whole=whole,
            **pictures,
            placed=[settings[chunk.request_id] for chunk in chunks] if self._rope_offsets else None,
        )
        work: Any = self.put(pack(filled)) if self._after.reads_prompts else self._given(pack(filled))
        samples, top, hidden, *seen = self.run_prefill(name, work)
        self._after.read(lanes, [hidden, *seen][-1], work)
        for chunk, end in zip(chunks, ends, strict=True):
            self.lengths[chunk.slot.index] = end
        if self.padding is not None:
            tokens = sum(len(chunk.tokens) for chunk in chunks)
            self.padding.add(1 - tokens / (lanes * self._chunk_size))
        wanted = tuple(row.top_logprobs for row in last.values())
        return FirstSamples(
            samples=samples,
            lanes=tuple(last),
            wanted=wanted,
            top=top if any(wanted) else None,
            prompt=self._after.scores(chunks, settings, lanes, hidden),
            hidden=hidden,
            pooled=self._after.pooled(chunks, settings, lanes, hidden),
        )

    def decode(
        self, rows: tuple[Row | VerifyRow, ...], settings: Mapping[str, RowSettings], sizes: Sizes
    ) -> DecodeSamples:
        """Start one decode step of a plan's rows. If `rows` is the same tuple object as before, inputs are reused."""
        if self._rows is None or self._rows.rows is not rows:
            self._rows = decode_inputs(rows, settings, len(self.lengths), sizes.few, self._given)
        elif isinstance(self._rows.work, np.ndarray):  # the rows stay: nothing goes up any more
            self._rows = replace(self._rows, work=self.put(self._rows.work))
        joined = self._rows
        for slot, row in joined.constrained:
            assert row.mask is not None
            self._state.host.set_mask(slot, row.mask.words)
        keys = sizes.keys[-1]
        if len(sizes.keys) > 1:
            self.lengths[joined.index] += 1
            longest = max(self.lengths[joined.index].tolist())
            keys = sizes.keys_for(min(longest, self._context_length))
        samples, top = self.run(decode_name(keys, joined.few), joined.work)
        return DecodeSamples(samples=samples, wanted=joined.wanted, top=top if any(joined.wanted) else None)

    def verify(
        self,
        rows: Sequence[VerifyRow],
        settings: Mapping[str, RowSettings],
        drafts: Mapping[str, Draft],
        width: int,
        sizes: Sizes,
    ) -> DecodeSamples:
        """Start one verify step, by the program for the fewest lanes that has room for `width`."""
        shapes = self._config.verify_shapes
        lanes, wide = min(shape for shape in shapes if shape[0] >= len(rows) and shape[1] >= width)
        for row in rows:
            mask = settings[row.request_id].mask
            if mask is not None and mask.constrained:
                self._state.host.set_mask(row.slot.index, mask.words)
                if masks := drafts.get(row.request_id, NO_DRAFT).masks:
                    self._state.host.set_draft_masks(row.slot.index, masks[: width - 1])
            self.lengths[row.slot.index] += row.width
        longest = max(int(self.lengths[row.slot.index]) for row in rows)
        keys = sizes.keys_for(min(longest, self._context_length))
        packed = self._given(pack(make_drafts(rows, drafts, lanes, wide)))
        samples, top = self.run_verify(program_name(VERIFY, lanes=lanes, width=wide, keys=keys), packed)
        wanted = tuple(settings[row.request_id].top_logprobs for row in rows)
        return DecodeSamples(samples=samples, wanted=wanted, top=top if any(wanted) else None, width=wide)
