"""Level A of the equivalence promise: a request in a batch has the same tokens and logprob bits as alone.

The run alone uses the same engine, executables and batch width, with all other rows inactive. In the batched run,
arrival steps, slots (by arrival), lags and aborted neighbours are random.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
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
from xla_engine.scheduler import Chunk, Plan, Swap
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT
from xla_engine.utils.token_sample import TokenSample, logprob_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between a request's runs alone and batched; None: the run had ended."""

    request_id: str
    schedule: int
    position: int
    alone: TokenSample | None
    batched: TokenSample | None

    def __str__(self) -> str:
        return (
            f"schedule {self.schedule}, request {self.request_id}, generated token {self.position}: "
            f"alone {self.alone or 'ended'}, batched {self.batched or 'ended'}"
        )


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What one verification compared and found.

    requests, schedules: how many were drawn.
    tokens: compared ones.
    aborted_neighbours: requests aborted to disturb the others.
    preempted: slots taken away.
    cached_tokens: prompt tokens found in the prefix cache.
    admissions: how often a request got a slot, again after a preemption included. admitted_mid_stream: those while
        other requests held slots. recycled_slots: those to a slot that another request of the schedule had before.
    finish_reasons: counts over the runs alone.
    differing_tokens: tokens whose id differs from the run alone.
    differing_bits: equal tokens whose logprobs differ in their float32 bits.
    compiled: programs that the calling thread compiled after warm-up; must be empty.
    failed_steps: steps that failed and were rerun.
    start_up_check: the result of the engine's start-up check.
    divergences: the first difference of each request that differs.
    record: of the first schedule that differs from the runs alone, else of the last; None without `keep_record`.
    """

    requests: int = 0
    schedules: int = 0
    tokens: int = 0
    aborted_neighbours: int = 0
    preempted: int = 0
    cached_tokens: int = 0
    admissions: int = 0
    admitted_mid_stream: int = 0
    recycled_slots: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    differing_tokens: int = 0
    differing_bits: int = 0
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
        counts = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if each.name not in ("finish_reasons", "divergences", "record")
        }
        return {
            "against": "alone",
            "ok": self.ok,
            **counts,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "divergences": [
                {**asdict(each), "alone": _finite(each.alone), "batched": _finite(each.batched)}
                for each in self.divergences
            ],
        }

    def lines(self) -> list[str]:
        """The report as text."""
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.finish_reasons.items()))
        names = ", ".join(self.compiled)
        lines = [
            "level                      A  (in a batch against alone, through the same executables)",
            f"requests                   {self.requests}  ({reasons})",
            f"schedules                  {self.schedules}",
            f"tokens compared            {self.tokens}",
            f"admissions                 {self.admissions}",
            f"admitted mid-stream        {self.admitted_mid_stream}",
            f"into a recycled slot       {self.recycled_slots}",
            f"neighbours aborted         {self.aborted_neighbours}",
            f"preempted                  {self.preempted}",
            f"tokens found in slots      {self.cached_tokens}",
            f"differing tokens           {self.differing_tokens}",
            f"differing logprob bits     {self.differing_bits}",
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
    report = VerifyReport(requests=requests, schedules=schedules)
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
            compare(case.request_id, schedule, alone[case.request_id], batched[case.request_id], report)
            if progress is not None:
                progress("batched")
    report.cached_tokens = engine.stats().cached_tokens - known
    report.compiled = compiled_by_this_thread()[compiled:]
    report.failed_steps = engine.stats().recoveries - failed
    return report


def compare(
    request_id: str, schedule: int, alone: CompletionOutput, batched: CompletionOutput, report: VerifyReport
) -> None:
    """Add one pair to the report: token ids, bits of their logprobs and of the most likely tokens', finish reason."""
    left, right = samples_of(alone), samples_of(batched)
    report.tokens += len(left)
    first: int | None = None
    for position, (a, b) in enumerate(zip_longest(left, right)):
        if a == b:
            continue
        if a is None or b is None or a[0] != b[0]:
            report.differing_tokens += 1
        else:
            report.differing_bits += 1
        first = position if first is None else first
    if first is None and alone.finish_reason != batched.finish_reason:
        first = len(left)
    if first is not None:
        report.divergences.append(
            Divergence(
                request_id=request_id,
                schedule=schedule,
                position=first,
                alone=_at(alone, first),
                batched=_at(batched, first),
            )
        )


def samples_of(output: CompletionOutput) -> list[tuple[Any, Any]]:
    """For each generated token: (token id, logprob bits and, if requested, bits of the most likely tokens by id).

    Missing values are None, which also counts as a difference.
    """
    bits = list(map(logprob_bits, output.logprobs or ()))
    top = bits_of(output.top_logprobs or ({},) * len(bits))
    return list(zip_longest(output.token_ids, zip_longest(bits, top)))


def bits_of(places: Iterable[Mapping[int, Logprob] | None] | None) -> list[dict[int, int] | None]:
    """The logprob bits of the most likely tokens at each place, by id; None where there are none."""
    return [
        None if place is None else {token: logprob_bits(each.logprob) for token, each in place.items()}
        for place in places or ()
    ]


def _at(output: CompletionOutput, position: int) -> TokenSample | None:
    if position >= min(len(output.token_ids), len(output.logprobs or ())):
        return None
    assert output.logprobs is not None
    return TokenSample(output.token_ids[position], output.logprobs[position])


def _finite(sample: TokenSample | None) -> tuple[int, float | None] | None:
    """A sample as JSON can hold it."""
    if sample is None:
        return None
    is_finite = sample.logprob is not None and math.isfinite(sample.logprob)
    return sample.token_id, sample.logprob if is_finite else None
