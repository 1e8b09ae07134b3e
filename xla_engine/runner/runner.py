"""Owner of weights, executables and, by `device_state`, cache and row state.

`start(plan)` dispatches and returns at once; `wait(in_flight)` fetches O(B) numbers. Between the two the host
is free, and steps execute in the order they were started.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig, compile_cache_directory
from xla_engine.drafting.width import StepCosts
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory
from xla_engine.graphs.kv_cache.footprint import keeps_every_position
from xla_engine.graphs.kv_cache.slot_io import num_spans
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.packing import pack
from xla_engine.graphs.row_state.rows import Pool
from xla_engine.runner import memory
from xla_engine.runner.backends import isa_of, make_spec
from xla_engine.runner.compile_cache import CompileCounter, use_compile_cache
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.dispatch import Dispatch
from xla_engine.runner.in_flight import (
    DecodeSamples,
    FirstSamples,
    InFlight,
    PromptScores,
    fetch_prompt_scores,
    fetch_samples,
)
from xla_engine.runner.kv_moves import BlockMoves, Parked, SlotMoves
from xla_engine.runner.prefill_inputs import make_lanes
from xla_engine.runner.programs import decode_name, make_programs, prefill_name, verify_name
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.sizing import resolve_sizes
from xla_engine.runner.step_costs import measure
from xla_engine.runner.verify_inputs import Guess, no_drafts
from xla_engine.scheduler import Plan, StepResult


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
        self.config = config = resolve_sizes(config, self._spec, self.context_length, jax.devices()[0])
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
            self._spec,
            config.device_rows,
            self.buckets[-1],
            self.context_length,
            pool,
            drafts=max((width for _, width in config.verify_shapes), default=1) - 1,
        )
        jax.block_until_ready((self._weights, state.held))
        self.load_seconds = time.perf_counter() - began
        self._copies_ahead = jax.default_backend() != "cpu"  # where the host's memory is not the device's
        self._inventory = Inventory()
        self._dispatch = Dispatch(
            self._inventory,
            state,
            self._weights,
            self._rope,
            rows=config.device_rows,
            chunk_size=config.chunk_size,
            context_length=self.context_length,
        )
        self._parked = Parked()
        self._slot_moves = SlotMoves(
            self._inventory,
            self._parked,
            num_spans(self.buckets[-1]),
            stale_is_harmless=self._spec.attention.bounded_by_length,
        )
        self._block_moves = BlockMoves(self._inventory, self._parked, config.block_size)
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

    def start(
        self, plan: Plan, settings: Mapping[str, RowSettings], guesses: Mapping[str, Guess] | None = None
    ) -> InFlight:
        """Dispatch a plan: its moves, its prefill calls in order, then one decode or verify step. Blocks on nothing.

        `settings` is read for requests whose prompt completes in this plan or that come back, and for rows that join
        the decode step. `guesses`, for rows of a verify step, say what may come next.
        """
        self._start_moves(plan, settings)
        for table in plan.tables:
            self._state.host.set_blocks(table.slot.index, table.start, table.blocks)
        lanes, keys = self.lane_choices, self.bucket_choices
        first = self._dispatch.prefill(plan.chunks, settings, lanes, keys)
        self.prefill_calls += len(first)
        decode = None
        if plan.width > 1:
            shapes = self.config.verify_shapes
            decode = self._dispatch.verify(plan.verify, settings, guesses or {}, plan.width, shapes, keys)
        elif rows := plan.decode_rows:
            decode = self._dispatch.decode(rows, settings, keys)
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
        """Forget the parked state of a request that is over."""
        self._parked.discard(request_id)

    def prompt_scores(self, step: InFlight) -> list[PromptScores]:
        """Fetch the log-probabilities of prompt tokens that a started step computed."""
        return fetch_prompt_scores(step, self.config.chunk_size)

    def reset(self) -> None:
        """Make every row inactive and every count zero, as at start-up; the cache keeps what it holds."""
        self._state.reset()
        self._dispatch.reset()
        self._parked.clear()
        self.prefill_calls = 0

    def rebuild(self) -> None:
        """Make cache and row state anew, after a step that failed."""
        calls = self.prefill_calls
        self.blank()
        self.prefill_calls = calls

    @property
    def reports(self) -> list[GraphReport]:
        """One line per executable."""
        return list(self._inventory)

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

        Elsewhere, bits that a probe found equal may differ in one sample of a hundred.
        """
        return self._spec.products is not None and self._spec.attention.name == "native"

    @property
    def keeps_no_state(self) -> bool:
        """Whether a row's length alone undoes what it has written: it has keys and values, and no recurrent state."""
        return self._spec.config.delta is None

    def step_costs(self) -> StepCosts:
        """What decode and verify steps cost, measured now. The runner must be idle, and is blank afterwards."""
        config, keys = self.config, self.bucket_choices[0]
        found = measure(self._dispatch, self._state, config.num_slots, config.verify_shapes, keys)
        self.blank()
        return found

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position of a slot takes on the device."""
        return memory.kv_bytes_per_token(self._spec)

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

    def close(self) -> None:
        """Free device memory and executables."""
        for leaf in (*self._weights, self._rope):
            leaf.delete()
        self._weights.clear()
        self._state.delete()
        self._dispatch.reset()
        self._parked.clear()
        self._inventory.clear()

    def _warm_up(self) -> None:
        """Run every program once with nothing to do: nothing is live, so no state changes."""
        for lanes in self.config.prefill_lanes:
            for bucket in self.buckets:
                *_, hidden = self._dispatch.run(
                    prefill_name(lanes, bucket),
                    jax.device_put(pack(make_lanes([], {}, lanes, self.config.chunk_size))),
                )
            self._dispatch.prompt_logprobs(
                lanes, hidden, np.full(lanes * self.config.chunk_size, -1, np.int32)
            )
        for bucket in self.buckets:
            no_row = jax.device_put(np.zeros(self.config.device_rows, np.bool_))
            jax.block_until_ready(self._dispatch.run(decode_name(bucket), no_row))
            for lanes, width in self.config.verify_shapes:
                idle = jax.device_put(pack(no_drafts(lanes, width)))
                jax.block_until_ready(self._dispatch.run(verify_name(lanes, width, bucket), idle))
        state, swaps = self._state, self.config.parks
        if self.config.num_blocks is None:
            state.held = self._slot_moves.warm_up(state.held, copies=self.config.reuses_slots, swaps=swaps)
        else:
            state.held = self._block_moves.warm_up(state.held, swaps=swaps)

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

    def _start_moves(self, plan: Plan, settings: Mapping[str, RowSettings]) -> None:
        state, paged = self._state, self.config.num_blocks is not None
        moves = self._block_moves if paged else self._slot_moves
        for swap in plan.parks:
            moves.park(state.held, swap)
        state.held = self._block_moves.copy(state.held, plan.copies)
        for swap in plan.resumes:
            state.held = moves.resume(state.held, swap)
            self._dispatch.lengths[swap.slot.index] = swap.length
            self._dispatch.fill_tables(swap.slot.index, settings[swap.request_id])
        for reuse in () if paged else plan.reuses:
            state.held = self._slot_moves.reuse(state.held, reuse)
