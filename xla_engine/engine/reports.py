"""Reports about an engine: its state, its next plan, its counters, metrics, identity and limits."""

import json
from dataclasses import replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.adapters import Adapters
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.recovery import Faults
from xla_engine.engine.state import EngineState
from xla_engine.engine.weight_updates import WeightUpdates
from xla_engine.observability.metrics import MetricFamily, engine_metrics
from xla_engine.observability.stats import EngineStats
from xla_engine.runner.prefix_files.storage import BlockCounts
from xla_engine.scheduler import Peek, Snapshot
from xla_engine.scheduler.peek import peek


class Reports:
    """Makes the reports. Nothing here touches the device."""

    def __init__(
        self,
        state: EngineState,
        config: EngineConfig,
        faults: Faults,
        adapters: Adapters,
        weights: WeightUpdates,
    ) -> None:
        self._state = state
        self._config = config
        self._faults = faults
        self._adapters = adapters
        self._weights = weights

    def snapshot(self) -> Snapshot:
        """As `XlaBatchEngine.snapshot`."""
        state = self._state
        now = state.clock()
        found = state.scheduler.snapshot(lambda name: state.table[name].times(now))
        pending = tuple(one.view for one in state.table.pending.values())
        return replace(found, waiting=(*found.waiting, *pending)) if pending else found

    def peek(self) -> Peek:
        """As `XlaBatchEngine.peek`."""
        state = self._state
        now, speculator = state.clock(), state.speculator
        blocked = state.masks.make() if state.masks else ()
        wanted = None if speculator is None else speculator.foreseen(state.scheduler)
        return peek(state.scheduler, wanted, blocked=blocked, now=now)

    def stats(self) -> EngineStats:
        """As `XlaBatchEngine.stats`."""
        state = self._state
        counters, work, scheduler = state.scheduler.counters(), state.work, state.scheduler
        runner = state.runner
        speculator, slots = state.speculator, self._config.num_slots
        stored = BlockCounts() if state.prefixes is None else state.prefixes.storage.counts
        return EngineStats(
            steps=work.steps,
            prefill_calls=runner.prefill_calls,
            prompt_tokens=work.prompt_tokens,
            generation_tokens=state.table.generated,
            finished={str(reason): count for reason, count in state.table.finished.items()},
            recoveries=self._faults.count,
            cached_tokens=counters.cached_tokens,
            loaded_blocks=stored.read,
            stored_blocks=stored.written,
            failed_blocks=stored.failed,
            preemptions=counters.preemptions,
            mask_seconds=state.masks.seconds,
            slot_steps_busy=work.slot_steps_busy,
            slot_steps_total=work.decode_steps * slots,
            drafted_tokens=0 if speculator is None else speculator.drafted,
            accepted_tokens=0 if speculator is None else speculator.accepted,
            shadow_requests=0 if state.shadow is None else state.shadow.requests,
            shadow_mismatches=0 if state.shadow is None else state.shadow.mismatches,
            compiles_warmup=runner.compiles.before,
            compiles_after_warmup=runner.compiles.after,
            load_seconds=runner.load_seconds,
            compile_seconds=runner.compile_seconds,
            last_step_age_s=state.clock() - state.last_answer if state.has_work else 0.0,
            submitted=state.table.submitted,
            waiting=state.num_waiting,
            running=scheduler.num_running,
            slots_used=slots - scheduler.num_free,
            slots=slots,
            kv_usage=self._kv_usage(),
            phases=None if state.timer is None else state.timer.times,
            distributions=state.table.histograms.now(),
        )

    def _kv_usage(self) -> float:
        """The share of KV blocks that sequences hold; without blocks, of the positions of all slots."""
        scheduler, length = self._state.scheduler, self._state.runner.context_length
        if (blocks := scheduler.blocks_used) is not None:
            return blocks / (self._config.num_blocks or 1)
        return scheduler.positions_used / (self._config.num_slots * length)

    def metrics(self, model_name: str | None = None) -> list[MetricFamily]:
        """As `XlaBatchEngine.metrics`."""
        return engine_metrics(
            self.stats(),
            self._config,
            self._weights.checkpoint.path.name if model_name is None else model_name,
            max_model_len=self._state.runner.context_length,
        )

    def identity(self) -> EngineIdentity:
        """As `XlaBatchEngine.identity`."""
        options = json.loads(json.dumps(self._config.bit_options()))
        if pinned := self._adapters.pinned:  # results may name them as their model
            options["adapters"] = pinned
        return EngineIdentity(
            model=self._weights.checkpoint.fingerprint,
            dtype=self._weights.checkpoint.dtype,
            config=options,
            **self._state.runner.made_with,
        )

    def limits(self) -> dict[str, Any]:
        """As `XlaBatchEngine.limits`."""
        config, runner, scheduler = self._config, self._state.runner, self._state.scheduler.config
        blocks = f"{config.num_blocks} of {config.block_size} tokens" if config.num_blocks else None
        return {
            "model": self._weights.checkpoint.path.name,
            "dtype": self._weights.checkpoint.dtype,
            "max_num_seqs": config.num_slots,
            "max_model_len": runner.context_length,
            "kv_blocks": blocks,
            "max_num_batched_tokens": config.token_budget,
            "chunk_size": config.chunk_size,
            "prefill_lanes": runner.sizes.lanes,
            "key_buckets": runner.sizes.keys,
            "max_waiting": config.max_waiting,
            "scheduling_policy": config.scheduling_policy,
            "preemption": scheduler.preemption,
            "prefix_caching": scheduler.enable_prefix_caching,
            "speculation": None if config.speculation is None else config.speculation.method,
            "lag": self._state.pipeline.lag,
            "step_timeout_s": config.step_timeout_s,
            **{name: runner.platform[name] for name in ("device", "attention", "linear")},
        }
