"""The runner: owns weights, executables, KV cache and row state.

`start(plan)` dispatches a step and returns at once; `wait(in_flight)` fetches its O(B) results. Steps execute in the
order in which they were started.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import IMAGE_CACHE_BYTES, EngineConfig
from xla_engine.environment import compile_cache_directory
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory, Program, program_name
from xla_engine.graphs.kv_cache.cache import keeps_every_position, read_state
from xla_engine.graphs.kv_cache.moves import num_spans, read_blocks
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.portable import ARITHMETIC
from xla_engine.graphs.steps.step import StepState
from xla_engine.model_loader.weights import stored_kinds
from xla_engine.observability.histogram import Histogram
from xla_engine.runner import memory
from xla_engine.runner.after_prefill import fetch_pooled, fetch_prompt_scores
from xla_engine.runner.backends import platform_words
from xla_engine.runner.call_sizes import Sizes
from xla_engine.runner.compile_cache import CompileCounter, use_compile_cache
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.devices import READS_KEYS, READS_STATES, HeldWeights
from xla_engine.runner.dispatch import Dispatch
from xla_engine.runner.drafting.device_proposer import DeviceProposer
from xla_engine.runner.features import FeatureBuffer, with_lanes_for
from xla_engine.runner.hosts import Hosts
from xla_engine.runner.in_flight import (
    DecodeSamples,
    FirstSamples,
    InFlight,
    PooledChunk,
    PromptScores,
    fetch_samples,
)
from xla_engine.runner.inputs import Draft, prompt_targets
from xla_engine.runner.jax_settings import check_platform, in_steps, with_own_settings
from xla_engine.runner.kv_moves import BlockMoves, ParkedState, SlotMoves, StateMoves, Transfers
from xla_engine.runner.planned import PlannedEngine, has_one_row_code, plan_engine
from xla_engine.runner.portable import audit
from xla_engine.runner.program_store import program_store
from xla_engine.runner.programs import CONTINUE, PROMPT_LOGITS, logits_programs, make_programs
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.step_costs import StepCosts, measure
from xla_engine.runner.step_messages import StepSender
from xla_engine.runner.stored_blocks import BlockLayout, BlockStorage
from xla_engine.runner.vision_tower import VisionTower
from xla_engine.scheduler import Moves, Plan, StepResult
from xla_engine.utils.resident import release_free_memory, release_library_pages
from xla_engine.utils.startup import StartupProgress, StartupStep, silent

TakeLogits = Callable[[str, int, np.ndarray], None]
"""Called with a request's id, a position of its prompt, and the logits f32 `[n, V]` from this position on.

After a preemption, positions may come again, with the same logits. The engine treats an exception as a device fault.
"""


class Runner:
    """The device side of an engine, for one model and one configuration.

    spec: the static part of the model. weights: its leaves, which may change between two steps.
    form_note: which form of the weights `quantization` "auto" chose, in words; None if there was nothing to choose.
    block_storage: holds blocks outside of the pool, with `EngineConfig.prefix_cache_dir`.
    """

    @with_own_settings
    def __init__(
        self,
        model: ModelConfig,
        weights: Mapping[str, np.ndarray],
        dtype: str,
        config: EngineConfig,
        *,
        device_proposer: Callable[[EngineConfig, ModelConfig, int], DeviceProposer] | None = None,
        pooling: str | None = None,
        tower: VisionTower | None = None,
        leaves: Sequence[jax.Array] | None = None,
        hosts: Hosts | None = None,
        progress: StartupProgress = silent,
    ) -> None:
        """Load the weights and compile all programs.

        device_proposer: called with options, model and context length; makes the proposer that drafts on the device.
        pooling: one of `graphs.config.POOLING_TYPES`; None: prompts are not pooled.
        tower: encodes pictures; None: prompts have none.
        leaves: on the device already, of another runner of the model, which must be closed later.
        hosts: that share the model; None: only this one.
        """
        check_platform()
        self._hosts = hosts
        self._sender: StepSender | None = None
        config = self._with_features(config, tower)
        if config.compile_cache:
            use_compile_cache(compile_cache_directory())
        self.compiles = CompileCounter()
        progress(StartupStep("C++ kernels for this CPU (some 15 s if they are compiled)"))
        device = jax.local_devices()[0]
        planned = plan_engine(config, model, dtype, stored_kinds(weights), device, device_proposer)
        if hosts is not None and (agreed := hosts.agree(planned.config)) != planned.config:
            planned = plan_engine(agreed, model, dtype, stored_kinds(weights), device)
        self._take_plan(planned, pooling)
        self._load(planned, weights, leaves, progress)
        self._compile(progress)

    def _with_features(self, config: EngineConfig, tower: VisionTower | None) -> EngineConfig:
        """Make the feature buffer, if there is a tower. As resolved, the configuration tells whether there is one."""
        self.features: FeatureBuffer | None = None
        if tower is not None:
            config = with_lanes_for(tower.config, tower.most_tokens, config)
            self.features = FeatureBuffer(tower, config.image_cache_bytes or IMAGE_CACHE_BYTES)
        kept = None if self.features is None else self.features.rows.nbytes
        return replace(config, image_cache_bytes=kept)

    def _take_plan(self, planned: PlannedEngine, pooling: str | None) -> None:
        """Keep what was planned, and begin without work."""
        self.form_note, self._device_proposer = planned.form_note, planned.proposer
        self.config, self.spec, self.context_length = planned.config, planned.spec, planned.context_length
        self.buckets, self._devices, self._pooling = planned.buckets, planned.devices, pooling
        # Those in use. The self-check removes all but the largest if the choice would change bits.
        self.sizes = Sizes(self.config.prefill_lanes, self.buckets, planned.few)
        self.prefill_calls = 0
        self.block_storage: BlockStorage | None = None
        self._parked: dict[str, ParkedState] = {}  # by request id
        self._gives_logits = False  # whether the programs are compiled
        self._take_logits: TakeLogits | None = None
        self._copies_ahead = jax.default_backend() != "cpu"  # if host and device have separate memory

    def _load(
        self,
        planned: PlannedEngine,
        weights: Mapping[str, np.ndarray],
        leaves: Sequence[jax.Array] | None,
        progress: StartupProgress,
    ) -> None:
        """Put weights and empty state on the devices. leaves: as of `__init__`."""
        began, config, devices = time.perf_counter(), self.config, self._devices
        kind = "audited" if config.is_portable else ""
        self._store = program_store(kind) if config.compile_cache and devices.is_one else None
        self.inventory = Inventory(audit if config.is_portable else None, self._store)
        self._owns_leaves = leaves is None
        release_library_pages()  # what imports have touched
        on_device = devices.load(self.spec, weights, progress) if leaves is None else list(leaves)
        self.weights = HeldWeights(self.spec, devices, self.inventory, on_device)
        self._rope = devices.put(rope_tables(planned.model, self.context_length))
        self.state = DeviceState(
            self.spec,
            config,
            self.buckets[-1],
            self.context_length,
            planned.pool,
            devices,
            rope_offsets=self.features is not None and self.features.turns,
        )
        if self._device_proposer is not None:
            by_name = dict(zip(self.spec.leaves, self.weights.leaves, strict=True))
            self._device_proposer.load(by_name, config.device_rows, self.buckets[-1])
        jax.block_until_ready((self.weights.leaves, self.state.donated))
        release_free_memory()  # what reading the weights has freed, before programs raise the peak
        release_library_pages()
        self.load_seconds = time.perf_counter() - began

    def _connect(self, transfers: Transfers) -> None:
        """Make what calls the programs that move states and run steps."""
        state, devices = self.state, self._devices
        self._slot_moves = SlotMoves(
            self.inventory,
            num_spans(self.buckets[-1]),
            transfers,
            stale_is_harmless=self.spec.attention.bounded_by_length,
        )
        self._block_moves = BlockMoves(self.inventory, self.config.block_size, transfers)
        self._state_moves = StateMoves(self.inventory, state, transfers)
        self.dispatch = Dispatch(
            self.inventory,
            state,
            self.weights.leaves,
            self._rope,
            devices.put,
            self.config,
            self.context_length,
            self._state_moves,
            device_proposer=self._device_proposer,
            pooling=self._pooling,
            features=self.features,
            takes_host_arrays=devices.read_host_memory,
        )

    def _compile(self, progress: StartupProgress) -> None:
        """Compile all programs, or load them, and run each once."""
        began = time.perf_counter()
        programs, transfers = self._programs()
        self._connect(transfers)
        self.inventory.compile(
            programs, progress=lambda doing, ready: progress(StartupStep(doing, ready, len(programs)))
        )
        if self._store is not None and self._store.has_new:
            self._store.tidy()
        release_free_memory()  # and what compiling or loading programs has freed
        if self._hosts is not None:
            progress(StartupStep("waiting for the other hosts"))
            self._hosts.meet()
        progress(StartupStep("first calls"))
        self._warm_up()
        self.compile_seconds = time.perf_counter() - began
        self.compiles.mark_warm()

    @in_steps
    def start(
        self, plan: Plan, settings: Mapping[str, RowSettings], drafts: Mapping[str, Draft] | None = None
    ) -> InFlight:
        """Dispatch a plan without blocking: its moves, its prefill calls in order, then one decode or verify step.

        settings: must have the requests whose prompt completes in this plan, those that resume, and rows that join the
            decode step. drafts: for the rows of a verify step.
        """
        if self._sender is not None:
            self._tell({"op": "start", **self._sender.message(plan, settings)})
        self._start_moves(plan, settings)
        for table in plan.moves.tables:
            self.state.host.set_blocks(table.slot.index, table.start, table.blocks)
        for encode in plan.encodes:
            assert self.features is not None
            self.features.encode(encode)
        first = self.dispatch.prefill(plan.chunks, settings, self.sizes, plan.moves.saves)
        self.prefill_calls += len(first)
        decode = None
        if plan.width > 1:
            decode = self.dispatch.verify(plan.verify, settings, drafts or {}, plan.width, self.sizes)
        elif rows := plan.decode_rows:
            decode = self.dispatch.decode(rows, settings, self.sizes)
        parts: tuple[FirstSamples | DecodeSamples, ...] = (*first, *([] if decode is None else [decode]))
        for part in parts if self._copies_ahead else ():
            part.samples.copy_to_host_async()
            if part.top is not None:
                part.top.copy_to_host_async()
        return InFlight(plan=plan, first=first, decode=decode)

    @in_steps
    def wait(self, step: InFlight) -> StepResult:
        """Fetch the samples of a started step, and the states that it parked."""
        for swap in step.plan.moves.parks:
            if (parked := self._parked.get(swap.request_id)) is not None:
                parked.settle()
        return fetch_samples(step)

    def count_padding(self, histogram: Histogram) -> None:
        """Record the share of padding in each prefill call's positions in a histogram."""
        self.dispatch.padding = histogram

    @property
    def parked_bytes(self) -> int:
        """Bytes of parked states in host memory."""
        return sum(each.num_bytes for each in self._parked.values())

    def discard(self, request_id: str) -> None:
        """Remove the parked state of a request that has ended."""
        if self._parked.pop(request_id, None) is not None:
            self._tell({"op": "discard", "request_id": request_id})

    def prompt_scores(self, step: InFlight) -> list[PromptScores | PooledChunk]:
        """Fetch a started step's results about prompts: log-probabilities of their tokens, and pooled vectors."""
        scores = fetch_prompt_scores(step, self.config.chunk_size)
        if self._take_logits is not None:
            self._give_logits(step, self._take_logits)
        return [*scores, *fetch_pooled(step)]

    @contextmanager
    def giving_logits(self, take: TakeLogits) -> Iterator[None]:
        """Pass the logits of prompts that request log-probabilities to `take`, for steps that are read inside the
        block.

        Compiles its programs at the first use. Nothing may be in flight before and after.
        """
        if self._hosts is not None:
            raise ConfigError("logits of prompts are given on one host only: leave num_hosts out")
        if not self._gives_logits:
            make = functools.partial(logits_programs, self.spec, self.config, self.config.prefill_lanes)
            programs = make(self.weights.leaves)
            if not self._devices.is_one:
                programs = list(self._devices.programs(make(list(self.spec.leaves)), programs))
            self.inventory.compile(programs)
            self._gives_logits = True
            self.compiles.mark_warm()
        self._take_logits = take
        try:
            yield
        finally:
            self._take_logits = None

    def _give_logits(self, step: InFlight, take: TakeLogits) -> None:
        """Call `take` with the logits at all prompt positions of a step for which log-probabilities were requested."""
        size = self.config.chunk_size
        for call in step.first:
            if call.prompt is None:
                continue
            name = program_name(PROMPT_LOGITS, lanes=len(call.hidden) // size)
            packed = self.inventory(name, self.weights.leaves, call.hidden, call.prompt.target)
            logits = np.asarray(packed).reshape(-1, size, packed.shape[1])
            for lane, chunk, row in call.prompt.asked:
                take(chunk.request_id, chunk.start, logits[lane, : len(prompt_targets(chunk, row))])

    def reset(self) -> None:
        """Reset row state, counters and parked states as at start-up; the cache keeps its content."""
        self._tell({"op": "reset"})
        self._reset()

    def lead(self) -> None:
        """Tell the other hosts of all that starts here from now on. Until then, all of them start the same."""
        if self._hosts is not None and self._hosts.is_first:
            self._sender = StepSender()

    def _tell(self, message: dict[str, Any]) -> None:
        if self._sender is not None and self._hosts is not None:
            self._hosts.send(message)

    def _reset(self) -> None:
        self.state.reset()
        self.dispatch.reset()
        self._parked.clear()
        if self.block_storage is not None:
            self.block_storage.clear()
        self.prefill_calls = 0

    @with_own_settings
    def rebuild(self) -> None:
        """Replace cache and row state after a failed step."""
        calls = self.prefill_calls
        self.blank()
        if self.features is not None:
            self.features.blank()
        self.prefill_calls = calls

    @property
    def reports(self) -> list[GraphReport]:
        """One report per executable."""
        return list(self.inventory)

    @property
    def blocks_of_a_slot(self) -> int:
        """How many blocks the longest request needs."""
        return self.buckets[-1] // self.config.block_size

    @property
    def block_layout(self) -> BlockLayout:
        """What one block of the pool has."""
        blocks = jax.ShapeDtypeStruct((1,), jnp.int32)
        read = functools.partial(read_blocks, self.spec)
        found, _ = jax.eval_shape(read, *self.state.donated, jax.ShapeDtypeStruct((), jnp.int32), blocks)
        return BlockLayout.of(found)

    @property
    def state_layout(self) -> BlockLayout:
        """What one saved state of recurrent layers has."""
        (found,) = jax.eval_shape(read_state, self.state.saved, jax.ShapeDtypeStruct((), jnp.int32))
        return BlockLayout.of(found)

    @property
    def rope_digest(self) -> str:
        """sha256 of the rotary tables, on which keys depend."""
        return hashlib.sha256(np.asarray(self._rope).tobytes()).hexdigest()

    @property
    def keeps_every_position(self) -> bool:
        """Whether any prefix of a slot's content can be reused, without saved states."""
        pooled = self.config.num_blocks is not None and self.spec.config.recurrent is None
        return pooled or keeps_every_position(self.spec, self.context_length)

    @property
    def has_one_row_code(self) -> bool:
        """Whether a row runs through the same code in prefill and decode, see `runner.planned.has_one_row_code`."""
        return has_one_row_code(self.spec)

    def step_costs(self) -> StepCosts:
        """Measure the cost of decode and verify steps. The runner must be idle, and is blank afterwards."""
        config, keys = self.config, self.sizes.keys[0]
        slots, on_device = config.num_slots, self._device_proposer is not None
        shapes = self.sizes.few, config.verify_shapes
        found = measure(self.dispatch, self.state, slots, *shapes, keys, on_device=on_device)
        self.blank()
        return found

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one position of a slot on the device."""
        return memory.kv_bytes_per_token(self.spec)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on the device."""
        return self.state.cache_bytes

    @property
    def platform(self) -> dict[str, str]:
        """Versions, device and backends, on which the bits of a run may depend, and the hash of a vision tower."""
        words = platform_words(self.spec)
        return words if self.features is None else {**words, "images": self.features.tower.fingerprint}

    @property
    def made_with(self) -> dict[str, dict[str, str]]:
        """`platform` and `made_on` of the engine's identity."""
        if self.config.is_portable:
            return {"platform": {"arithmetic": ARITHMETIC}, "made_on": self.platform}
        return {"platform": self.platform}

    @property
    def isa(self) -> str | None:
        """The instruction set of the C++ kernels in use; None without them."""
        return self.spec.isa

    def blank(self) -> None:
        """`reset`, and also fill the cache with zeros, so that runs repeat bit for bit. Nothing may be in flight."""
        self._tell({"op": "blank"})
        self._reset()
        self.state.blank_cache()
        if self._device_proposer is not None:
            self._device_proposer.blank()

    def close(self) -> None:
        """Free device memory and executables."""
        for leaf in (*(self.weights.leaves if self._owns_leaves else ()), self._rope):
            leaf.delete()
        self.weights.leaves.clear()
        self.state.delete()
        if self._device_proposer is not None:
            self._device_proposer.delete()
        self.dispatch.reset()
        self._parked.clear()
        self.inventory.clear()
        if self.features is not None:
            self.features.close()

    def _warm_up(self) -> None:
        """Run every program once without work. No row is live, so no state changes."""
        self.dispatch.warm_up(self.buckets, self.sizes.few)
        state, swaps, loads = self.state, self.config.parks, self.config.prefix_cache_dir is not None
        if self.spec.lora is not None:
            self.weights.write_adapter(1, None)
        if self.config.keep_finished:
            (state.rows,) = self.inventory(CONTINUE, state.rows, *self._devices.put([np.int32(0)] * 2))
        if self.config.num_blocks is None:
            state.donated = self._slot_moves.warm_up(
                state.donated, copies=self.config.reuses_slots, swaps=swaps
            )
        else:
            state.donated = self._block_moves.warm_up(state.donated, swaps=swaps, loads=loads)
        self._state_moves.warm_up(swaps=swaps, loads=loads)

    def _programs(self) -> tuple[list[Program], Transfers]:
        """The programs to compile, and the functions that copy their arguments to the devices."""
        state, devices, put = self.state, self._devices, self._devices.put
        make = functools.partial(
            make_programs,
            self.spec,
            self.config,
            self.buckets,
            self.sizes.few,
            device_proposer=self._device_proposer,
            pooling=self._pooling,
            features=self.features,
        )
        rows = jax.eval_shape(state.make_rows)
        taken = StepState(self.weights.leaves, self._rope, state.cache, rows, state.tables)
        whole = make(state=taken, saved=state.saved)
        if devices.is_one:
            return whole, Transfers(whole=put, pieces=put, states=put)
        mine, saved = state.local()
        local = make(state=taken._replace(weights=self.spec.leaves.on_device(), cache=mine), saved=saved)
        pieces, states = (devices.pieces(local, whole, reads) for reads in (READS_KEYS, READS_STATES))
        return list(devices.programs(local, whole)), Transfers(whole=put, pieces=pieces, states=states)

    def _start_stored(self, moves: Moves, storage: BlockStorage) -> None:
        """Copy blocks and saved states out of the device, and others into it."""
        state = self.state
        if blocks := [each for each in moves.stores if not each.is_state]:
            storage.store(blocks, self._block_moves.read(state.donated, [each.block for each in blocks]))
        for each in moves.stores:
            if each.is_state:
                storage.store([each], [self._state_moves.read_saved(each.block)])
        content = storage.take(moves.loads)
        loads = [each for each in moves.loads if not each.is_state]
        state.donated = self._block_moves.load(state.donated, loads, content)
        for each in moves.loads:
            if each.is_state:
                self._state_moves.load(each.block, content[each.key])

    def _start_moves(self, plan: Plan, settings: Mapping[str, RowSettings]) -> None:
        state, paged = self.state, self.config.num_blocks is not None
        moves = self._block_moves if paged else self._slot_moves
        for swap in plan.moves.parks:
            recurrent = self._state_moves.read(swap.slot.index)
            self._parked[swap.request_id] = moves.park(state.donated, swap, recurrent)
        if self.block_storage is not None and (plan.moves.stores or plan.moves.loads):
            self._start_stored(plan.moves, self.block_storage)
        state.donated = self._block_moves.copy(state.donated, plan.moves.copies)
        for swap in plan.moves.resumes:
            parked = self._parked.pop(swap.request_id)
            state.donated = moves.resume(state.donated, swap, parked)
            self._state_moves.write(swap.slot.index, parked.recurrent)
            self.dispatch.lengths[swap.slot.index] = swap.length
            self.dispatch.fill_tables(swap.slot.index, settings[swap.request_id])
        for part in plan.moves.continues:
            slot, remaining = self._devices.put([np.int32(part.slot.index), np.int32(part.remaining)])
            (state.rows,) = self.inventory(CONTINUE, state.rows, slot, remaining)
            self.dispatch.lengths[part.slot.index] = part.length
            self.dispatch.fill_tables(part.slot.index, settings[part.request_id])
        for reuse in plan.moves.reuses:
            if not paged:
                state.donated = self._slot_moves.reuse(state.donated, reuse)
            if reuse.place >= 0:
                self._state_moves.restore(reuse.slot.index, reuse.place)
