"""Level A of the equivalence promise: a request in a batch has the same tokens and logprob bits as alone.

The run alone uses the same engine, executables and batch width, with all other rows inactive. In the batched run,
arrival steps, slots (by arrival), lags and aborted neighbours are random.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import logprob_bits
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import Record
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.schedule import Action, draw_schedule, run_alone, run_schedule
from xla_engine.outputs import CompletionOutput, Logprob
from xla_engine.runner.compile_cache import compiled_by_this_thread, compiles_of_this_thread
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between a request's runs alone and batched; a sample is (token id, logprob)."""

    request_id: str
    schedule: int
    position: int
    alone: tuple[int, float] | None
    batched: tuple[int, float] | None

    def __str__(self) -> str:
        return (
            f"schedule {self.schedule}, request {self.request_id}, generated token {self.position}: "
            f"alone {_describe(self.alone)}, batched {_describe(self.batched)}"
        )


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What one verification compared and found.

    requests, schedules: how many were drawn.
    tokens: compared ones.
    aborted_neighbours: requests aborted to disturb the others.
    preempted: slots taken away.
    cached_tokens: prompt tokens found in the prefix cache.
    admitted_mid_stream: requests that were admitted while others ran.
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
    admitted_mid_stream: int = 0
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

    def lines(self) -> list[str]:
        """The report as text."""
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.finish_reasons.items()))
        names = ", ".join(self.compiled)
        lines = [
            "level                      A  (in a batch against alone, through the same executables)",
            f"requests                   {self.requests}  ({reasons})",
            f"schedules                  {self.schedules}",
            f"tokens compared            {self.tokens}",
            f"admitted mid-stream        {self.admitted_mid_stream}",
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
        report.admitted_mid_stream += action.kind == "submit" and engine.num_running > 0
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
            batched, report.record = record_schedule(engine, drawn, alone=alone, blank=True, on_action=count)
        else:
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


def _at(output: CompletionOutput, position: int) -> tuple[int, float] | None:
    if position >= min(len(output.token_ids), len(output.logprobs or ())):
        return None
    assert output.logprobs is not None
    return output.token_ids[position], output.logprobs[position]


def _describe(sample: tuple[int, float] | None) -> str:
    return "ended" if sample is None else f"token {sample[0]} logprob {sample[1]:.9g}"
