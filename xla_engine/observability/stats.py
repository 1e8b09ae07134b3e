"""Counters, distributions and phases of an engine. Records only; nothing here touches a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from xla_engine.observability.distributions import Distributions, Histograms
from xla_engine.observability.histogram import Distribution
from xla_engine.observability.phases import PhaseTimes
from xla_engine.scheduler import Plan
from xla_engine.utils.html import table


@dataclass(slots=True)
class WorkCounters:
    """Counts of started work. Fields as in `EngineStats`; decode_steps: steps with a decoding row."""

    steps: int = 0
    prompt_tokens: int = 0
    decode_steps: int = 0
    slot_steps_busy: int = 0

    def started(self, plan: Plan, histograms: Histograms, blocks_used: int | None) -> None:
        """Count a plan. blocks_used: KV blocks that requests hold; None if slots have their own memory."""
        self.steps += 1
        if plan.chunks:
            self.prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
            for reuse in plan.moves.reuses:
                histograms.prefix_hit_tokens.add(reuse.length)
        if rows := len(plan.decode) + len(plan.verify):
            self.decode_steps += 1
            self.slot_steps_busy += rows
            histograms.decode_rows.add(rows)
            if blocks_used is not None:
                histograms.blocks_used.add(blocks_used)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and its current state.

    A request is what a caller submits: `n` sequences, each in its own slot. Each field says which it counts.

    steps: turns that dispatched device work.
    prefill_calls: calls of prefill programs.
    prompt_tokens: prefilled prompt tokens.
    generation_tokens: sampled tokens credited to sequences.
    finished: sequences that ended, by finish reason.
    recoveries: failed steps after which live sequences were rerun, or one of them was ended.
    cached_tokens: prompt tokens found in the prefix cache instead of being prefilled.
    loaded_blocks: KV blocks and saved states read from files, with `EngineConfig.prefix_cache_dir`.
    stored_blocks: KV blocks and saved states written to files.
    failed_blocks: KV blocks whose file was damaged or could not be read or written.
    preemptions: preempted sequences.
    drafted_tokens: verified draft tokens.
    accepted_tokens: accepted draft tokens.
    shadow_requests: requests that were rerun alone and by plain decode, as a check.
    shadow_mismatches: shadow requests whose bits differed.
    mask_seconds: wall time that turns spent on the token masks of constraints.
    slot_steps_busy: scheduled rows, summed over decode steps.
    slot_steps_total: all rows, summed over decode steps.
    compiles_warmup: XLA compilations of the whole process before the engine was ready.
    compiles_after_warmup: XLA compilations of the whole process since; the engine itself makes none.
    load_seconds: wall time of loading the weights.
    compile_seconds: wall time of compiling and warming up.
    last_step_age_s: how long the engine has waited for the device to answer; 0 without requests.
    submitted: accepted requests.
    waiting: sequences now in the queue, including preempted ones.
    running: sequences now past the queue: in a slot, or with all tokens planned and the last ones in flight.
    slots_used: sequences that now hold a slot; at most `slots`.
    slots: number of slots.
    kv_usage: fraction of the KV cache now held, 0 to 1: of the blocks, or of the positions of all slots.
    phases: the host's time by phase, with `EngineConfig.phase_timers`; else None.
    distributions: distributions of times and sizes.
    """

    steps: int = 0
    prefill_calls: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    recoveries: int = 0
    cached_tokens: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    failed_blocks: int = 0
    preemptions: int = 0
    mask_seconds: float = 0.0
    slot_steps_busy: int = 0
    slot_steps_total: int = 0
    compiles_warmup: int = 0
    compiles_after_warmup: int = 0
    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    shadow_requests: int = 0
    shadow_mismatches: int = 0
    last_step_age_s: float = 0.0
    submitted: int = 0
    waiting: int = 0
    running: int = 0
    slots_used: int = 0
    slots: int = 0
    kv_usage: float = 0.0
    phases: PhaseTimes | None = None
    distributions: Distributions = field(default_factory=Distributions)

    @property
    def occupancy(self) -> float:
        """Fraction of row-steps of decode steps that were scheduled."""
        return self.slot_steps_busy / self.slot_steps_total if self.slot_steps_total else 0.0

    def _repr_html_(self) -> str:
        """All counters as a table for notebooks, then the distributions that have values."""
        names = [part.name for part in fields(self) if part.name not in ("distributions", "phases")]
        rows: list[tuple[str, object]] = [(name, getattr(self, name)) for name in names]
        rows.append(("occupancy", f"{self.occupancy:.1%}"))
        if self.phases is not None:
            rows += [
                (f"{part.name}, ns", getattr(self.phases, part.name)) for part in fields(self.phases)[1:]
            ]
        for part in fields(self.distributions):
            spread: Distribution = getattr(self.distributions, part.name)
            if spread.count:
                rows.append((part.name, f"{spread.count} values, mean {spread.mean:.4g}"))
        return table(("counter", "value"), rows)
