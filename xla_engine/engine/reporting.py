"""What an engine says of itself: where it stands, what it would do next, what it has done, and its log."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.engine.continuing import Continuing
from xla_engine.engine.identity import EngineIdentity
from xla_engine.engine.locked import locked
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.observability.log import LOG_STEPS, ProgressLog, engine_log
from xla_engine.observability.metrics import EngineFacts, engine_metrics
from xla_engine.observability.phases import PhaseTimer
from xla_engine.observability.prometheus import Family, text_of
from xla_engine.observability.stats import EngineStats
from xla_engine.runner.runner import Runner
from xla_engine.scheduler import Peek, Snapshot
from xla_engine.scheduler.peek import peek


class Reporting(Continuing):
    """A loop that can be asked. Nothing here touches the device.

    phase_timer: measures the phases of turns; None without `EngineConfig.phase_timers`.
    """

    runner: Runner
    config: EngineConfig
    checkpoint: Checkpoint
    phase_timer: PhaseTimer | None = None
    _progress: ProgressLog

    @property
    def num_running(self) -> int:
        """Sequences past the queue: in a slot, or with all their tokens planned and the last of them in flight."""
        return self.scheduler.num_running

    @property
    def max_num_seqs(self) -> int:
        """Slots."""
        return self.config.num_slots

    @property
    def max_model_len(self) -> int:
        """Tokens of a sequence at most, prompt and generated."""
        return self.runner.context_length

    @locked
    def snapshot(self) -> Snapshot:
        """Slots, queue, times, and the reason of each sequence's last scheduling decision."""
        now = self.clock()
        found = self.scheduler.snapshot(lambda name: self._table[name].times(now))
        untried = tuple(one.view for one in self._untried.values())
        return replace(found, waiting=(*found.waiting, *untried)) if untried else found

    @locked
    def peek(self) -> Peek:
        """What the next turn would plan, and why the sequences that are not in that plan wait; changes nothing.

        It is what comes, unless a request comes or ends before. A restart after a failed step is not foreseen.
        """
        now, speculator = self.clock(), self._speculator
        held = self.masks.make() if self.masks else ()
        wanted = None if speculator is None else speculator.foreseen(self.scheduler.decoding)
        return peek(self.scheduler, wanted, held=held, now=now)

    @locked
    def stats(self) -> EngineStats:
        """Counters and distributions since start-up, and how many sequences are where now."""
        counters, work, scheduler = self.scheduler.counters(), self._work, self.scheduler
        speculator, slots = self._speculator, self.config.num_slots
        return EngineStats(
            steps=work.steps,
            prefill_calls=self.runner.prefill_calls,
            prompt_tokens=work.prompt_tokens,
            generation_tokens=self._table.token_buffer.num_tokens,
            finished={str(reason): count for reason, count in self._table.finished.items()},
            recoveries=self._faults.count,
            cached_tokens=counters.cached_tokens,
            preemptions=counters.preemptions,
            slot_steps_busy=work.slot_steps_busy,
            slot_steps_total=work.decode_steps * slots,
            drafted_tokens=0 if speculator is None else speculator.drafted,
            accepted_tokens=0 if speculator is None else speculator.accepted,
            shadow_requests=0 if self._shadow is None else self._shadow.requests,
            shadow_mismatches=0 if self._shadow is None else self._shadow.mismatches,
            compiles_warmup=self.runner.compiles.before,
            compiles_after_warmup=self.runner.compiles.after,
            load_seconds=self.runner.load_seconds,
            compile_seconds=self.runner.compile_seconds,
            last_step_age_s=self.clock() - self._heard if self.has_work else 0.0,
            submitted=self._table.submitted,
            waiting=self.num_waiting,
            running=scheduler.num_running,
            slots_used=slots - scheduler.num_free,
            slots=slots,
            kv_usage=self._kv_usage(),
            phases=None if self.phase_timer is None else self.phase_timer.times,
            distributions=self._table.token_buffer.histograms.now(),
        )

    def _kv_usage(self) -> float:
        """Share of the blocks that sequences hold, or of the positions of all slots."""
        if (blocks := self.scheduler.blocks_used) is not None:
            return blocks / (self.config.num_blocks or 1)
        return self.scheduler.positions_used / (self.config.num_slots * self.max_model_len)

    def metrics(self, model_name: str | None = None) -> list[Family]:
        """Everything that monitoring is told: counters, gauges and histograms, as docs/operators.md explains them.

        model_name: the label of each; None takes the name of the checkpoint.
        """
        config = self.config
        facts = EngineFacts(
            model_name=self.checkpoint.path.name if model_name is None else model_name,
            block_size=config.block_size,
            num_blocks=config.num_blocks or config.num_slots * -(-self.max_model_len // config.block_size),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        return engine_metrics(self.stats(), facts)

    def metrics_text(self) -> str:
        """The metrics in Prometheus' text format."""
        return text_of(self.metrics())

    def identity(self) -> EngineIdentity:
        """Everything the bits of a result may depend on beside the request."""
        return EngineIdentity(
            model=self.checkpoint.fingerprint,
            dtype=self.checkpoint.dtype,
            config=json.loads(json.dumps(self.config.bit_options())),
            platform=self.runner.platform,
        )

    def limits(self) -> dict[str, Any]:
        """The limits in force, those among them that the options left to the engine."""
        config, runner, scheduler = self.config, self.runner, self.scheduler.config
        blocks = f"{config.num_blocks} of {config.block_size} tokens" if config.num_blocks else None
        return {
            "model": self.checkpoint.path.name,
            "dtype": self.checkpoint.dtype,
            "max_num_seqs": config.num_slots,
            "max_model_len": self.max_model_len,
            "kv_blocks": blocks,
            "max_num_batched_tokens": config.token_budget,
            "chunk_size": config.chunk_size,
            "prefill_lanes": runner.lane_choices,
            "key_buckets": runner.bucket_choices,
            "max_waiting": config.max_waiting,
            "scheduling_policy": config.scheduling_policy,
            "preemption": scheduler.preemption,
            "prefix_caching": scheduler.enable_prefix_caching,
            "speculation": None if config.speculation is None else config.speculation.method,
            "lag": self.lag,
            "step_timeout_s": config.step_timeout_s,
            **{name: runner.platform[name] for name in ("device", "attention", "linear")},
        }

    def _begin_reports(self) -> None:
        """Log the limits, and count and time from now on."""
        self.runner.count_padding(self._table.token_buffer.histograms.prefill_padding)
        self._progress = ProgressLog(self.clock())
        if self.config.phase_timers:
            self.phase_timer = PhaseTimer()
            self.phase_timer.watch(self)
        if engine_log.isEnabledFor(logging.INFO):
            told = ", ".join(f"{name} {value}" for name, value in self.limits().items() if value is not None)
            seconds = f"{self.runner.load_seconds:.1f} s load, {self.runner.compile_seconds:.1f} s compile"
            engine_log.info("ready: %s; %s", told, seconds)

    def _start_next(self) -> bool:
        started = super()._start_next()
        if started and not self._work.steps % LOG_STEPS and engine_log.isEnabledFor(logging.INFO):
            engine_log.info("%s", self._progress.line(self.stats(), self.clock()))
        return started
