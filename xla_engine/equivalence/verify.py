"""Level A of the equivalence promise: a request in a batch has the same tokens and logprob bits as alone.

The run alone uses the same engine, executables and batch width, with all other rows inactive. In the batched run,
arrival steps, slots (by arrival), lags and aborted neighbours are random.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import Record
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.schedule import Action, draw_schedule, run_alone, run_schedule
from xla_engine.observability.observer import Observer
from xla_engine.outputs import CompletionOutput, Logprob
from xla_engine.runner.compile_cache import compiled_by_this_thread, compiles_of_this_thread
from xla_engine.scheduler import NO_TOKEN, Chunk, Plan, Swap
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.utils.comparison import ComparedAnswers, Difference, TokenSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between a request's runs alone, which is expected, and batched."""

    request_id: str
    schedule: int
    difference: Difference[TokenSample]

    def __str__(self) -> str:
        return f"schedule {self.schedule}, {words(self.request_id, self.difference)}"


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What one verification compared and found.

    schedules: how many were drawn.
    compared: the requests and tokens that were compared, and how many differ.
    aborted_neighbours: requests aborted to disturb the others.
    preempted: slots taken away.
    cached_tokens: prompt tokens found in the prefix cache.
    admissions: how often a request got a slot, again after a preemption included. admitted_mid_stream: those while
        other requests held slots. recycled_slots: those to a slot that another request of the schedule had before.
    finish_reasons: counts over the runs alone.
    compiled: programs that the calling thread compiled after warm-up; must be empty.
    failed_steps: steps that failed and were rerun.
    start_up_check: the result of the engine's start-up check.
    divergences: the first difference of each request that differs.
    record: of the first schedule that differs from the runs alone, else of the last; None without `keep_record`.
    """

    schedules: int = 0
    compared: ComparedAnswers = field(default_factory=ComparedAnswers)
    aborted_neighbours: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    admissions: int = 0
    admitted_mid_stream: int = 0
    recycled_slots: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    compiled: list[str] = field(default_factory=list)
    failed_steps: int = 0
    start_up_check: str = "not run"
    divergences: list[Divergence] = field(default_factory=list)
    record: Record | None = None

    @property
    def compiles_after_warmup(self) -> int:
        return len(self.compiled)

    @property
    def ok(self) -> bool:
        return not (self.divergences or self.compiled)

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object, without the record; null stands for log-probabilities that are not finite."""
        apart = ("compared", "finish_reasons", "divergences", "record")
        return {
            "against": "alone",
            "ok": self.ok,
            **counts(self.compared),
            **{each.name: getattr(self, each.name) for each in fields(self) if each.name not in apart},
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "divergences": [
                {
                    "request_id": each.request_id,
                    "schedule": each.schedule,
                    "position": each.difference.position,
                    "alone": _finite(each.difference.expected),
                    "batched": _finite(each.difference.found),
                }
                for each in self.divergences
            ],
        }

    def lines(self) -> list[str]:
        """The report as text."""
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.finish_reasons.items()))
        names = ", ".join(self.compiled)
        lines = [
            "level                      A  (in a batch against alone, through the same executables)",
            f"requests                   {self.compared.requests}  ({reasons})",
            f"schedules                  {self.schedules}",
            f"tokens compared            {self.compared.tokens}",
            f"admissions                 {self.admissions}",
            f"admitted mid-stream        {self.admitted_mid_stream}",
            f"into a recycled slot       {self.recycled_slots}",
            f"neighbours aborted         {self.aborted_neighbours}",
            f"preempted                  {self.preempted}",
            f"tokens found in slots      {self.cached_tokens}",
            f"differing tokens           {self.compared.differing_tokens}",
            f"differing logprob bits     {self.compared.differing_bits}",
            f"compiles after warm-up     {self.compiles_after_warmup}"
            + (f"  ({names})" if self.compiled else ""),
            *([f"steps that failed          {self.failed_steps}"] if self.failed_steps else []),
            f"start-up check             {self.start_up_check}",
        ]
        lines.extend(f"  {divergence}" for divergence in self.divergences[:20])
        lines.append("same bits alone and batched" if self.ok else "NOT the same bits alone and batched")
        return lines


class Admissions:
    """Counts the admissions of one schedule in a report, as the scheduler's plans make them."""

    def __init__(self, engine: XlaBatchEngine, report: VerifyReport) -> None:
        self._engine, self._report = engine, report
        self._waits: set[str] = set()  # admitted requests whose slot is not known yet
        self._last_holder: dict[int, str] = {}  # by slot
        self.observer = Observer(started=self._started)

    def _started(self, plan: Plan) -> None:
        others = self._engine.num_running - len(plan.admitted)
        self._waits.update(plan.admitted)
        self._report.admissions += len(plan.admitted)
        self._report.admitted_mid_stream += (
            len(plan.admitted) if others > 0 else max(len(plan.admitted) - 1, 0)
        )
        parts: tuple[Chunk | Swap, ...] = (*plan.chunks, *plan.moves.resumes)
        for part in parts:
            if part.request_id in self._waits:
                self._waits.discard(part.request_id)
                before = self._last_holder.get(part.slot.index, part.request_id)
                self._report.recycled_slots += before != part.request_id
                self._last_holder[part.slot.index] = part.request_id


def verify(
    engine: XlaBatchEngine,
    *,
    requests: int = 200,
    schedules: int = 4,
    seed: int = 0,
    lags: Sequence[int] = (0, 1),
    progress: Callable[[str], None] | None = None,
    keep_record: bool = False,
) -> VerifyReport:
    """Draw `requests` requests, run each alone and in one of `schedules` random schedules, and compare bits.

    lags: of the schedules, in turn. progress: called after each run of a request, with "alone" or "batched".
    keep_record: run schedules from a blank cache, so that they are reproducible, and keep a record in the report.
    """
    report = VerifyReport(schedules=schedules)
    if engine.self_check is not None:
        report.start_up_check = engine.self_check.promise
    cases = draw_cases(engine, requests, seed, every_field=True)
    compiled, failed = compiles_of_this_thread(), engine.stats().recoveries

    def count(action: Action, took_effect: bool) -> None:
        report.aborted_neighbours += action.kind == "abort" and took_effect
        report.preempted += action.kind in WAYS_TO_PREEMPT and took_effect

    alone = {}
    for case in cases:
        alone[case.request_id] = run_alone(engine, case)
        if progress is not None:
            progress("alone")
    report.finish_reasons = Counter(str(result.finish_reason) for result in alone.values())
    known = engine.stats().cached_tokens
    for schedule in range(schedules):
        dealt = cases[schedule::schedules]
        drawn = draw_schedule(
            dealt, f"{seed}/{schedule}", lag=lags[schedule % len(lags)], preempts=engine.ways_to_preempt
        )
        if keep_record and (report.record is None or report.record.first_difference is None):
            with engine.observers.having(Admissions(engine, report).observer):
                batched, report.record = record_schedule(
                    engine, drawn, alone=alone, blank=True, on_action=count
                )
        else:
            with engine.observers.having(Admissions(engine, report).observer):
                batched = run_schedule(engine, drawn, on_action=count)
        for case in dealt:
            name = case.request_id
            difference = compare(name, alone[name], batched[name], report.compared)
            if difference is not None:
                report.divergences.append(
                    Divergence(request_id=name, schedule=schedule, difference=difference)
                )
            if progress is not None:
                progress("batched")
    report.cached_tokens = engine.stats().cached_tokens - known
    report.compiled = compiled_by_this_thread()[compiled:]
    report.failed_steps = engine.stats().recoveries - failed
    return report


def compare(
    request_id: str, expected: CompletionOutput, found: CompletionOutput, compared: ComparedAnswers
) -> Difference[TokenSample] | None:
    """Count one pair: token ids, bits of their logprobs and of the most likely tokens', and the finish reason."""
    ends = expected.finish_reason == found.finish_reason
    return compared.add(request_id, samples_of(expected), samples_of(found), ends=ends)


def samples_of(output: CompletionOutput) -> list[TokenSample]:
    """The generated tokens with their log-probabilities. A value that one output lacks counts as a difference."""
    columns = zip_longest(output.token_ids, output.logprobs or (), map(tops, output.top_logprobs or ()))
    return [
        TokenSample(NO_TOKEN if token is None else token, logprob, top) for token, logprob, top in columns
    ]


def tops(place: Mapping[int, Logprob] | None) -> dict[int, float] | None:
    """The log-probabilities of the most likely tokens at a place, by id; None where there are none."""
    return None if place is None else {token: each.logprob for token, each in place.items()}


def words(request_id: str, difference: Difference[TokenSample]) -> str:
    """Where a batched run of a request left the run alone."""
    alone, batched = difference.expected or "ended", difference.found or "ended"
    return f"request {request_id}, generated token {difference.position}: alone {alone}, batched {batched}"


def counts(compared: ComparedAnswers) -> dict[str, int | None]:
    """How much was compared and differs, as JSON has it."""
    names = ("requests", "tokens", "differing_tokens", "differing_bits")
    return {name: getattr(compared, name) for name in names}


def _finite(sample: TokenSample | None) -> tuple[int, float | None] | None:
    """A sample as JSON can hold it."""
    if sample is None:
        return None
    is_finite = sample.logprob is not None and math.isfinite(sample.logprob)
    return sample.token_id, sample.logprob if is_finite else None
