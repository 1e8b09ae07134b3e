"""Owner of weights, executables and, by `device_state`, cache and row state.

`start(plan)` dispatches and returns at once; `wait(in_flight)` fetches O(B) numbers. Between the two the host
is free, and steps execute in the order they were started.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.environment import compile_cache_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory, Program
from xla_engine.graphs.kv_cache.footprint import keeps_every_position
from xla_engine.graphs.kv_cache.slot_io import num_spans
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Pool
from xla_engine.model_loader.weights import stored_kinds
from xla_engine.observability.histogram import Histogram
from xla_engine.runner import memory
from xla_engine.runner.backends import library_of, make_spec, platform_words
from xla_engine.runner.compile_cache import CompileCounter, use_compile_cache
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.devices import Devices
from xla_engine.runner.dispatch import Dispatch
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.in_flight import (
    DecodeSamples,
    FirstSamples,
    InFlight,
    PromptScores,
    fetch_prompt_scores,
    fetch_samples,
)
from xla_engine.runner.kv_moves import BlockMoves, Parked, SlotMoves, Transfers
from xla_engine.runner.pooling.pooled import PooledChunk, Pooling, fetch_pooled
from xla_engine.runner.programs import CONTINUE, logits_programs, make_programs
from xla_engine.runner.prompt_logits import PromptLogits, TakeLogits
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.sizing import few_rows, resolve_length, resolve_sizes
from xla_engine.runner.step_costs import StepCosts, measure
from xla_engine.runner.verify_inputs import Draft
from xla_engine.runner.weights.held import HeldWeights
from xla_engine.scheduler import Plan, StepResult
from xla_engine.utils.startup import StartupProgress, StartupStep, silent


class Runner:
    """Device side of an engine for one model and one configuration.

    spec: what is static of the model. weights: its leaves, which may change between two steps.
    """

    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: str,
        config: EngineConfig,
        *,
        device_proposer: Callable[[EngineConfig, ModelConfig, int], DeviceProposer] | None = None,
        pooling: str | None = None,
        progress: StartupProgress = silent,
    ) -> None:
        """device_proposer: makes, of options, model and context length, what guesses inside verify steps. pooling: one
        of `graphs.config.POOLING_TYPES`; None: prompts are not pooled."""
        if config.compile_cache:
            use_compile_cache(compile_cache_directory())
        self.compiles = CompileCounter()
        device = jax.devices()[0]
        progress(StartupStep("C++ operations for this CPU (some 15 s where they are compiled)"))
        stored = stored_kinds(weights)
        config = resolve_length(config, model, dtype, device, stored)
        self.context_length = config.context_length(model.max_position_embeddings)
        self.prefill_calls = 0
        model = model.within(self.context_length)
        self.spec = make_spec(config, model, jnp.dtype(dtype), stored)
        self._devices = devices = Devices(self.spec.sharding.devices)
        buckets = config.buckets(self.context_length)
        self.buckets = buckets[-1:] if self.spec.attention.bounded_by_length else buckets
        # Sizes in use, ascending. The self-check leaves only the largest where the choice would change bits.
        self.lane_choices = config.prefill_lanes
        self.bucket_choices = self.buckets
        self._device_proposer: DeviceProposer | None = None
        if device_proposer is not None:  # adapters are the model's own
            self._device_proposer = device_proposer(
                replace(config, enable_lora=False), model, self.context_length
            )
        beside = memory.NOTHING if self._device_proposer is None else self._device_proposer.beside
        self.config = config = resolve_sizes(config, self.spec, self.context_length, device, beside)
        self.few_choices = few_rows(config) if self.has_one_row_code else ()
        pool = None
        if config.num_blocks is not None:
            own = self.blocks_of_a_slot if config.shadow_rate else 0
            pool = Pool(config.num_blocks + own, config.block_size, self.blocks_of_a_slot)
            if model.delta is not None:
                raise ConfigError(
                    "num_blocks is for keys and values; this model has recurrent layers: leave it out"
                )
        began = time.perf_counter()
        self._inventory = Inventory()
        self.weights = HeldWeights(
            self.spec, devices, self._inventory, devices.load(self.spec, weights, progress)
        )
        self._rope = devices.put(rope_tables(model, self.context_length))
        self._state = state = DeviceState(
            self.spec,
            config.device_rows,
            self.buckets[-1],
            self.context_length,
            pool,
            devices,
            drafts=max((width for _, width in config.verify_shapes), default=1) - 1,
            dry=config.enable_dry,
            lora=config.enable_lora,
        )
        if self._device_proposer is not None:
            on_device = dict(zip(self.spec.leaves, self.weights.leaves, strict=True))
            self._device_proposer.load(on_device, config.device_rows, self.buckets[-1])
        jax.block_until_ready((self.weights.leaves, state.held))
        self.load_seconds = time.perf_counter() - began
        self._prompt_logits: PromptLogits | None = None
        self._take_logits: TakeLogits | None = None
        self._copies_ahead = jax.default_backend() != "cpu"  # where the host's memory is not the device's
        self._pooling = None
        if pooling is not None:
            self._pooling = Pooling(pooling, self._inventory, self.weights.leaves, devices.put)
        self._dispatch = Dispatch(
            self._inventory,
            state,
            self.weights.leaves,
            self._rope,
            devices.put,
            config,
            self.context_length,
            device_proposer=self._device_proposer,
            pooling=self._pooling,
        )
        began = time.perf_counter()
        programs, put = self._programs()
        self._parked = Parked()
        self._slot_moves = SlotMoves(
            self._inventory,
            self._parked,
            num_spans(self.buckets[-1]),
            put,
            stale_is_harmless=self.spec.attention.bounded_by_length,
        )
        self._block_moves = BlockMoves(self._inventory, self._parked, config.block_size, put)
        compiled = itertools.count(1)
        progress(StartupStep(f"compiling {len(programs)} programs"))
        self._inventory.compile(
            programs,
            progress=lambda name: progress(StartupStep(f"compiling {name}", next(compiled), len(programs))),
        )
        progress(StartupStep("first calls"))
        self._warm_up()
        self.compile_seconds = time.perf_counter() - began
        self.compiles.mark_warm()

    def start(
        self, plan: Plan, settings: Mapping[str, RowSettings], drafts: Mapping[str, Draft] | None = None
    ) -> InFlight:
        """Dispatch a plan: its moves, its prefill calls in order, then one decode or verify step. Blocks on nothing.

        `settings` is read for requests whose prompt completes in this plan or that come back, and for rows that join
        the decode step. `drafts`, for rows of a verify step, say what may come next.
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
            decode = self._dispatch.verify(plan.verify, settings, drafts or {}, plan.width, shapes, keys)
        elif rows := plan.decode_rows:
            decode = self._dispatch.decode(rows, settings, keys, self.few_choices)
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

    def count_padding(self, histogram: Histogram) -> None:
        """Let a histogram see how much of each prefill call is padding, as a share of its positions."""
        self._dispatch.padding = histogram

    @property
    def parked_bytes(self) -> int:
        """What the host keeps of requests that lost their slots."""
        return self._parked.num_bytes

    def discard(self, request_id: str) -> None:
        """Forget the parked state of a request that is over."""
        self._parked.discard(request_id)

    def prompt_scores(self, step: InFlight) -> list[PromptScores | PooledChunk]:
        """Fetch what a started step computed of prompts: log-probabilities of their tokens, and what was pooled."""
        scores = fetch_prompt_scores(step, self.config.chunk_size)
        if self._take_logits is not None and self._prompt_logits is not None:
            self._prompt_logits.give(step, self.weights.leaves, self._take_logits)
        return [*scores, *(fetch_pooled(step) if self._pooling is not None else ())]

    @contextmanager
    def giving_logits(self, take: TakeLogits) -> Iterator[None]:
        """Give `take` the logits of prompts that ask for log-probabilities, in the steps read inside the block.

        Compiles programs of its own at the first use. Nothing may be in flight before and after.
        """
        if self._prompt_logits is None:
            make = functools.partial(logits_programs, self.spec, self.config, self.config.prefill_lanes)
            programs = make(self.weights.leaves)
            if not self._devices.is_one:
                programs = list(self._devices.programs(make(list(self.spec.leaves)), programs))
            self._inventory.compile(programs)
            self._prompt_logits = PromptLogits(self._inventory, self._devices.put, self.config.chunk_size)
            self.compiles.mark_warm()
        self._take_logits = take
        try:
            yield
        finally:
            self._take_logits = None

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
    def blocks_of_a_slot(self) -> int:
        """Blocks that the longest request takes."""
        return self.buckets[-1] // self.config.block_size

    @property
    def keeps_every_position(self) -> bool:
        """Whether what a slot holds can be reused from its beginning to anywhere."""
        return self.config.num_blocks is not None or keeps_every_position(self.spec, self.context_length)

    @property
    def has_one_row_code(self) -> bool:
        """Whether a row goes through the same code in prefill and decode, at any place in a call: the C++ operations.

        Elsewhere, bits that a probe found equal may differ in one sample of a hundred.
        """
        spec = self.spec
        state = spec.config.delta is None or spec.native_state is not None
        return spec.products is not None and spec.attention.name == "native" and state

    def step_costs(self) -> StepCosts:
        """What decode and verify steps cost, measured now. The runner must be idle, and is blank afterwards."""
        config, keys = self.config, self.bucket_choices[0]
        slots, on_device = config.num_slots, self._device_proposer is not None
        shapes = self.few_choices, config.verify_shapes
        found = measure(self._dispatch, self._state, slots, *shapes, keys, on_device=on_device)
        self.blank()
        return found

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one position of a slot takes on the device."""
        return memory.kv_bytes_per_token(self.spec)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on the device."""
        return self._state.cache_bytes

    @property
    def platform(self) -> dict[str, str]:
        """Versions and device words that the bits of a run may depend on."""
        return platform_words(self.spec)

    @property
    def isa(self) -> str | None:
        """The instruction set of the C++ operations in use; None: there are none."""
        return self.spec.isa

    @property
    def library(self) -> str | None:
        """Where the library of the C++ operations came from; None: there are none."""
        return library_of(self.spec)

    def blank(self) -> None:
        """`reset`, and a cache of zeros as well: what runs next repeats to the bit. Nothing may be in flight."""
        self.reset()
        self._state.blank_cache()
        if self._device_proposer is not None:
            self._device_proposer.blank()

    def close(self) -> None:
        """Free device memory and executables."""
        for leaf in (*self.weights.leaves, self._rope):
            leaf.delete()
        self.weights.leaves.clear()
        self._state.delete()
        if self._device_proposer is not None:
            self._device_proposer.delete()
        self._dispatch.reset()
        self._parked.clear()
        self._inventory.clear()

    def _warm_up(self) -> None:
        """Run every program once with nothing to do: nothing is live, so no state changes."""
        self._dispatch.warm_up(self.buckets, self.few_choices)
        state, swaps = self._state, self.config.parks
        if self.spec.lora is not None:
            self.weights.write_adapter(1, None)
        if self.config.keep_finished:
            state.rows = self._inventory(
                CONTINUE, state.rows, *(self._devices.put(np.int32(0)) for _ in range(2))
            )
        if self.config.num_blocks is None:
            state.held = self._slot_moves.warm_up(state.held, copies=self.config.reuses_slots, swaps=swaps)
        else:
            state.held = self._block_moves.warm_up(state.held, swaps=swaps)

    def _programs(self) -> tuple[list[Program], Transfers]:
        """What is to be compiled, and how its arguments get to the devices."""
        state, devices, put = self._state, self._devices, self._devices.put
        same = {"rope": self._rope, "rows": jax.eval_shape(state.make_rows), "tables": state.tables}
        same["device_proposer"] = self._device_proposer
        same["pooling"] = None if self._pooling is None else self._pooling.kind
        make = functools.partial(make_programs, self.spec, self.config, self.buckets, self.few_choices)
        whole = make(weights=self.weights.leaves, cache=state.cache, **same)
        if devices.is_one:
            return whole, Transfers(whole=put, pieces=put)
        local = make(weights=self.spec.leaves.on_device(), cache=state.local_cache(), **same)
        return list(devices.programs(local, whole)), Transfers(whole=put, pieces=devices.pieces(local, whole))

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
        for part in plan.continues:
            slot, remaining = self._devices.put([np.int32(part.slot.index), np.int32(part.remaining)])
            state.rows = self._inventory(CONTINUE, state.rows, slot, remaining)
            self._dispatch.lengths[part.slot.index] = part.length
            self._dispatch.fill_tables(part.slot.index, settings[part.request_id])
        for reuse in () if paged else plan.reuses:
            state.held = self._slot_moves.reuse(state.held, reuse)
