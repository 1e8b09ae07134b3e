"""The only module that touches devices: owns weights, executables and, by `device_state`, cache and row state.

`start(plan)` dispatches and returns at once; `wait(in_flight)` fetches O(B) numbers. Between the two the host
is free, and steps execute in the order they were started.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig, compile_cache_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory
from xla_engine.graphs.kv_cache.footprint import keeps_every_position
from xla_engine.graphs.kv_cache.slot_io import num_blocks
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.packing import pack
from xla_engine.graphs.row_state.rows import Pool
from xla_engine.runner import memory
from xla_engine.runner.backends import isa_of, make_spec
from xla_engine.runner.compile_cache import CompileCounter, use_compile_cache
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.in_flight import (
    DecodeSamples,
    FirstSamples,
    InFlight,
    PromptScores,
    fetch_prompt_scores,
    fetch_samples,
)
from xla_engine.runner.kv_moves import PageMoves, Parked, SlotMoves
from xla_engine.runner.prefill_inputs import make_lanes, prompt_targets
from xla_engine.runner.programs import decode_name, make_programs, prefill_name, prompt_name
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.sizing import sized
from xla_engine.scheduler import Chunk, Plan, Row, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What stays the same while the same rows decode."""

    rows: tuple[Row, ...]
    index: np.ndarray
    scheduled: jax.Array
    wanted: tuple[int, ...]
    lockstep: tuple[tuple[int, RowSettings], ...]


class Runner:
    """Device side of an engine for one model and one configuration."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: str,
        config: EngineConfig,
        *,
        progress: Callable[[str], None] | None = None,
        load_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        if config.compile_cache:
            use_compile_cache(compile_cache_directory())
        self.compiles = CompileCounter()
        self.context_length = config.context_length(model.max_position_embeddings)
        self.prefill_calls = 0
        model = model.within(self.context_length)
        self._spec = make_spec(config, model, jnp.dtype(dtype))
        buckets = config.buckets(self.context_length)
        self.buckets = buckets[-1:] if self._spec.attention.bounded_by_length else buckets
        # Sizes in use, ascending. The self-check leaves only the largest where the choice would change bits.
        self.lane_choices = config.prefill_lanes
        self.bucket_choices = self.buckets
        self.config = config = sized(config, self._spec, self.context_length, jax.devices()[0])
        pool = None
        if config.num_blocks is not None:
            pool = Pool(config.num_blocks, config.block_size, self.buckets[-1] // config.block_size)
            if model.delta is not None:
                raise ConfigError(
                    "num_blocks is for keys and values; this model has recurrent layers: leave it out"
                )
        began = time.perf_counter()
        self._weights = self._place(weights, load_progress)
        self._rope = jax.device_put(rope_tables(model, self.context_length))
        self._state = state = DeviceState(
            self._spec, config.device_rows, self.buckets[-1], self.context_length, pool
        )
        jax.block_until_ready((self._weights, state.held))
        self.load_seconds = time.perf_counter() - began
        # Upper bounds of the rows' lengths, advanced at plan time, to choose the key bucket without a fetch.
        self._lengths = np.zeros(config.device_rows, np.int64)
        self._scheduled: _Rows | None = None
        self._copies_ahead = jax.default_backend() != "cpu"  # where the host's memory is not the device's
        self._inventory = Inventory()
        self._parked = Parked()
        self._moves = SlotMoves(
            self._inventory,
            self._parked,
            num_blocks(self.buckets[-1]),
            stale_is_harmless=self._spec.attention.bounded_by_length,
        )
        self._page_moves = PageMoves(self._inventory, self._parked, config.block_size)
        began = time.perf_counter()
        programs = make_programs(
            self._spec,
            config,
            self.buckets,
            weights=self._weights,
            rope=self._rope,
            cache=state.cache,
            rows=jax.eval_shape(state.make_rows),
            tables=state.tables,
        )
        self._inventory.compile(programs, progress=progress)
        self._warm_up()
        self.compile_seconds = time.perf_counter() - began
        self.compiles.mark_warm()

    # -- the two verbs of the loop ----------------------------------------------------------------------------

    def start(self, plan: Plan, settings: Mapping[str, RowSettings]) -> InFlight:
        """Dispatch a plan: what it moves, its prefill calls in order, then one decode step. Blocks on nothing.

        `settings` is read for requests whose prompt completes in this plan or that come back, and for rows that join
        the decode step.
        """
        self._start_moves(plan, settings)
        for table in plan.tables:
            self._state.host.set_blocks(table.slot.index, table.start, table.blocks)
        first = tuple(self._start_prefill(chunks, settings) for chunks in self._calls(plan.chunks))
        decode = self._start_decode(plan.decode, settings) if plan.decode else None
        parts: tuple[FirstSamples | DecodeSamples, ...] = (*first, *([] if decode is None else [decode]))
        for part in parts if self._copies_ahead else ():
            part.samples.copy_to_host_async()
            if part.top is not None:
                part.top.copy_to_host_async()
        return InFlight(plan=plan, first=first, decode=decode)

    def wait(self, step: InFlight) -> StepResult:
        """Fetch the samples of a started step, and what it parked."""
        for swap in step.plan.parks:
            self._parked.settle(swap.request_id)
        return fetch_samples(step)

    def discard(self, request_id: str) -> None:
        """The request is over: nothing of it need be kept."""
        self._parked.discard(request_id)

    def prompt_scores(self, step: InFlight) -> list[PromptScores]:
        """Fetch the log-probabilities of prompt tokens that a started step computed."""
        return fetch_prompt_scores(step, self.config.chunk_size)

    def reset(self) -> None:
        """Make every row inactive and every count zero, as at start-up; the cache keeps what it holds."""
        self._state.reset()
        self._lengths[:] = 0
        self._scheduled = None
        self._parked.clear()
        self.prefill_calls = 0

    def rebuild(self) -> None:
        """Make cache and row state anew, whatever became of the old ones in a step that failed."""
        calls = self.prefill_calls
        self.blank()
        self.prefill_calls = calls

    # -- for tests and reports --------------------------------------------------------------------------------

    @property
    def reports(self) -> list[GraphReport]:
        """One line per executable."""
        return list(self._inventory)

    def program_text(self, name: str) -> str:
        """Optimised HLO of a program. For tests."""
        return self._inventory.text(name)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights on the device."""
        return sum(leaf.nbytes for leaf in self._weights)

    @property
    def keeps_every_position(self) -> bool:
        """Whether what a slot holds can be reused from its beginning to anywhere."""
        return self.config.num_blocks is not None or keeps_every_position(self._spec, self.context_length)

    @property
    def has_one_row_code(self) -> bool:
        """Whether a row goes through the same code in prefill and decode, at any place in a call: the C++ operations.

        What a probe finds equal elsewhere may differ in one sample of a hundred.
        """
        return self._spec.products is not None and self._spec.attention.name == "native"

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position of a slot takes on the device."""
        return memory.kv_bytes_per_token(self._spec)

    @property
    def num_parked(self) -> int:
        """Requests whose state is on the host."""
        return len(self._parked)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on the device."""
        return self._state.cache_bytes

    @property
    def platform(self) -> dict[str, str]:
        """Versions and device words that the bits of a run may depend on."""
        words = {
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "backend": jax.default_backend(),
            "device": jax.devices()[0].device_kind,
            "attention": self._spec.attention.name,
            "linear": "xla" if self._spec.products is None else "native",
        }
        # Files from before instruction sets had names were written with tiles, or with none of ours.
        return words if self.isa in (None, "amx") else {**words, "isa": self.isa}

    @property
    def isa(self) -> str | None:
        """The instruction set of the C++ operations in use; None: there are none."""
        return isa_of(self._spec)

    def blank(self) -> None:
        """`reset`, and a cache of zeros as well: what runs next repeats to the bit. Nothing may be in flight."""
        self.reset()
        self._state.blank_cache()

    def read_cache(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Copy the cache to the host, per layer K and V `[B, KV, S, Dh]`, or what a linear one keeps. For tests."""
        return self._state.read_cache()

    def edit_cache(self, edit: Callable[[int, str, np.ndarray], np.ndarray]) -> None:
        """Replace keys and values by `edit(layer index, "keys" | "values", array [B, KV, S, Dh])`, and the inputs and
        memory of linear layers likewise. For tests."""
        self._state.edit_cache(edit)

    def close(self) -> None:
        """Free device memory and executables."""
        for leaf in (*self._weights, self._rope):
            leaf.delete()
        self._weights = []
        self._state.delete()
        self._scheduled = None
        self._parked.clear()
        self._inventory.clear()

    # -- running programs -------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Run every program once with nothing to do: nothing is live, so no state changes."""
        for lanes in self.config.prefill_lanes:
            for bucket in self.buckets:
                *_, hidden = self._run(
                    prefill_name(lanes, bucket),
                    jax.device_put(pack(make_lanes([], {}, lanes, self.config.chunk_size))),
                )
            nothing = np.full(lanes * self.config.chunk_size, -1, np.int32)
            self._inventory(prompt_name(lanes), self._weights, hidden, jax.device_put(nothing))
        for bucket in self.buckets:
            nobody = jax.device_put(np.zeros(self.config.device_rows, np.bool_))
            jax.block_until_ready(self._run(decode_name(bucket), nobody))
        state, swaps = self._state, self.config.parks
        if self.config.num_blocks is None:
            state.held = self._moves.warm_up(state.held, copies=self.config.reuses_slots, swaps=swaps)
        else:
            state.held = self._page_moves.warm_up(state.held, swaps=swaps)

    def _run(self, name: str, work: Any) -> tuple[jax.Array, ...]:
        """Run a program on the donated state; returns its packed samples `[2, N]` and what follows them."""
        state = self._state
        state.refresh()
        state.cache, state.rows, *results = self._inventory(
            name, self._weights, self._rope, state.cache, state.rows, work, state.tables
        )
        return tuple(results)

    def _place(
        self, weights: Mapping[str, np.ndarray], progress: Callable[[int, int], None] | None
    ) -> list[jax.Array]:
        """Bring the leaves to the device one by one, so that the host holds one at a time."""
        placed: dict[str, jax.Array] = {}
        self._spec.check_names(weights)
        total, done = memory.weights_bytes(self._spec), 0
        for name in self._spec.sources:
            for part, array in self._spec.stored(name, weights[name]).items():
                placed[part] = jax.block_until_ready(jax.device_put(array))
                done += placed[part].nbytes
            if progress is not None:
                progress(done, total)
        return [placed[name] for name in self._spec.names]

    # -- moves ------------------------------------------------------------------------------------------------

    def _start_moves(self, plan: Plan, settings: Mapping[str, RowSettings]) -> None:
        state, paged = self._state, self.config.num_blocks is not None
        moves = self._page_moves if paged else self._moves
        for swap in plan.parks:
            moves.park(state.held, swap)
        state.held = self._page_moves.copy(state.held, plan.copies)
        for swap in plan.resumes:
            state.held = moves.resume(state.held, swap)
            self._lengths[swap.slot.index] = swap.length
            self._fill_tables(swap.slot.index, settings[swap.request_id])
        for reuse in () if paged else plan.reuses:
            state.held = self._moves.reuse(state.held, reuse)

    def _fill_tables(self, slot: int, row: RowSettings) -> None:
        """What a request brings that is too wide for the row state."""
        if row.params.logit_bias:
            self._state.host.set_bias(slot, row.params.logit_bias)
        if row.mask is not None:
            self._state.host.set_mask(slot, row.mask.words)

    # -- prefill ----------------------------------------------------------------------------------------------

    def _calls(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """Split a plan's chunks over prefill calls, the largest graph first."""
        largest = self.lane_choices[-1]
        return [chunks[at : at + largest] for at in range(0, len(chunks), largest)]

    def _start_prefill(self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings]) -> FirstSamples:
        lanes = _smallest(self.lane_choices, len(chunks))
        ends = [chunk.start + len(chunk.tokens) for chunk in chunks]
        name = prefill_name(lanes, _smallest(self.bucket_choices, max(ends)))
        last = {lane: settings[chunk.request_id] for lane, chunk in enumerate(chunks) if chunk.is_last}
        for lane, row in last.items():
            self._fill_tables(chunks[lane].slot.index, row)
        samples, top, hidden = self._run(
            name, jax.device_put(pack(make_lanes(chunks, last, lanes, self.config.chunk_size)))
        )
        self.prefill_calls += 1
        for chunk, end in zip(chunks, ends, strict=True):
            self._lengths[chunk.slot.index] = end
        wanted = tuple(row.top_logprobs for row in last.values())
        return FirstSamples(
            samples=samples,
            lanes=tuple(last),
            wanted=wanted,
            top=top if any(wanted) else None,
            prompt=self._start_prompt_logprobs(chunks, settings, lanes, hidden),
        )

    def _start_prompt_logprobs(
        self, chunks: Sequence[Chunk], settings: Mapping[str, RowSettings], lanes: int, hidden: jax.Array
    ) -> tuple[jax.Array, tuple[tuple[int, Chunk, RowSettings], ...]] | None:
        asked = []
        for lane, chunk in enumerate(chunks):
            row = settings[chunk.request_id]
            if row.params.prompt_logprobs is not None and prompt_targets(chunk, row):
                asked.append((lane, chunk, row))
        if not asked:
            return None
        target = np.full((lanes, self.config.chunk_size), -1, np.int32)
        for lane, chunk, row in asked:
            ahead = prompt_targets(chunk, row)
            target[lane, : len(ahead)] = ahead
        return (
            self._inventory(prompt_name(lanes), self._weights, hidden, jax.device_put(target.reshape(-1))),
            tuple(asked),
        )

    # -- decode -----------------------------------------------------------------------------------------------

    def _start_decode(self, rows: tuple[Row, ...], settings: Mapping[str, RowSettings]) -> DecodeSamples:
        if self._scheduled is None or self._scheduled.rows is not rows:
            self._scheduled = self._schedule(rows, settings)
        joined = self._scheduled
        for slot, row in joined.lockstep:
            assert row.mask is not None
            self._state.host.set_mask(slot, row.mask.words)
        keys = self.bucket_choices[-1]
        if len(self.buckets) > 1:
            self._lengths[joined.index] += 1
            longest = max(self._lengths[joined.index].tolist())
            keys = _smallest(self.bucket_choices, min(longest, self.context_length))
        samples, top = self._run(decode_name(keys), joined.scheduled)
        return DecodeSamples(samples=samples, wanted=joined.wanted, top=top if any(joined.wanted) else None)

    def _schedule(self, rows: tuple[Row, ...], settings: Mapping[str, RowSettings]) -> _Rows:
        index = np.array([row.slot.index for row in rows], np.int64)
        scheduled = np.zeros(self.config.device_rows, np.bool_)
        scheduled[index] = True
        theirs = [settings[row.request_id] for row in rows]
        return _Rows(
            rows=rows,
            index=index,
            scheduled=jax.device_put(scheduled),
            wanted=tuple(row.top_logprobs for row in theirs),
            lockstep=tuple(
                (int(at), row)
                for at, row in zip(index, theirs, strict=True)
                if row.mask is not None and row.mask.lockstep
            ),
        )


def _smallest(sizes: Sequence[int], needed: int) -> int:
    """The first of ascending `sizes` that holds `needed`."""
    return next(size for size in sizes if size >= needed)
