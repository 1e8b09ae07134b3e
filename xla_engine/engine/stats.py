"""Counters of an engine and percentiles of its requests. Records only; nothing here touches a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from xla_engine.scheduler import Plan
from xla_engine.utils.html import table


@dataclass(slots=True)
class WorkCounters:
    """Counts of what a loop has started. Fields as in `EngineStats`; decode_steps: steps with a row that decodes."""

    steps: int = 0
    prompt_tokens: int = 0
    decode_steps: int = 0
    slot_steps_busy: int = 0

    def started(self, plan: Plan) -> None:
        """Count a plan."""
        self.steps += 1
        self.prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
        if rows := len(plan.decode) + len(plan.verify):
            self.decode_steps += 1
            self.slot_steps_busy += rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started.

    steps: turns that dispatched device work.
    prefill_calls: prefill programs run.
    prompt_tokens: prompt tokens that were prefilled.
    generation_tokens: sampled tokens that were credited to requests.
    finished: terminal results by finish reason.
    recoveries: faults after which the live requests were run again.
    cached_tokens: prompt tokens that were not prefilled, as a slot held them.
    preemptions: slots taken away.
    drafted_tokens: guesses that were checked by steps that may sample several tokens.
    accepted_tokens: those of them that were right.
    slot_steps_busy: rows scheduled in decode steps.
    slot_steps_total: rows there were in decode steps.
    compiles_warmup: XLA compilations of the whole process before the engine was ready.
    compiles_after_warmup: XLA compilations of the whole process since; the engine itself makes none.
    load_seconds: wall time of loading the weights.
    compile_seconds: wall time of compiling and warming up.
    last_step_age_s: how long the engine, with requests, has waited for the device to answer; 0 where it has none.
    """

    steps: int = 0
    prefill_calls: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    recoveries: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    slot_steps_busy: int = 0
    slot_steps_total: int = 0
    compiles_warmup: int = 0
    compiles_after_warmup: int = 0
    load_seconds: float = 0.0
    compile_seconds: float = 0.0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    last_step_age_s: float = 0.0

    @property
    def occupancy(self) -> float:
        """Share of decode row-steps that were scheduled."""
        return self.slot_steps_busy / self.slot_steps_total if self.slot_steps_total else 0.0

    def _repr_html_(self) -> str:
        """All counters as a table for notebooks."""
        rows: list[tuple[str, object]] = [(part.name, getattr(self, part.name)) for part in fields(self)]
        return table(("counter", "value"), [*rows, ("occupancy", f"{self.occupancy:.1%}")])


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile, `share` in [0, 1]; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
