"""Law 1, checked: tokens and logprob bits of a request equal those of the same request run alone.

The alone-run goes through the same engine, the same executables and the same batch width, with every other row
dead. The batched run draws arrival steps, neighbours that are aborted, slots (by arrival) and lags at random.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from xla_engine.engine import XlaBatchEngine
from xla_engine.outputs import CompletionOutput
from xla_engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One drawn request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """First difference of one request between its alone-run and a batched run."""

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
    """Counts of one verification. `differing_bits` counts logprobs whose float32 bits differ."""

    requests: int = 0
    schedules: int = 0
    tokens: int = 0
    aborted_neighbours: int = 0
    admitted_mid_stream: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    differing_tokens: int = 0
    differing_bits: int = 0
    compiles_after_warmup: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.differing_tokens or self.differing_bits or self.divergences)

    def lines(self) -> list[str]:
        """The report as text."""
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.finish_reasons.items()))
        lines = [
            f"requests                   {self.requests}  ({reasons})",
            f"schedules                  {self.schedules}",
            f"tokens compared            {self.tokens}",
            f"admitted mid-stream        {self.admitted_mid_stream}",
            f"neighbours aborted         {self.aborted_neighbours}",
            f"differing tokens           {self.differing_tokens}",
            f"differing logprob bits     {self.differing_bits}",
            f"compiles after warm-up     {self.compiles_after_warmup}",
        ]
        lines.extend(f"  {divergence}" for divergence in self.divergences[:20])
        lines.append("same bits alone and batched" if self.ok else "NOT the same bits alone and batched")
        return lines


def draw_cases(engine: XlaBatchEngine, count: int, seed: int, *, max_new_tokens: int = 24) -> list[Case]:
    """Random requests: prompt length 1..limit, cap 1..n, mixed sampling settings, some with frequent stop ids.

    Half of the prompts are cut from text the model itself continues well, if it has a tokenizer; the rest are
    random token ids, so that no two requests share a prefix by accident.
    """
    draw = random.Random(seed)
    vocabulary = engine.checkpoint.config.vocab_size
    limit = engine.max_model_len
    corpus = _corpus(engine)
    cases = []
    for index in range(count):
        cap = draw.choice(
            (1, 1, 2, 3, draw.randint(1, max_new_tokens), draw.randint(1, max_new_tokens), max_new_tokens)
        )
        cap = min(cap, limit - 1)
        # Mostly short prompts, a tail up to the longest that fits.
        longest = limit - cap
        length = min(longest, 1 + int(longest * draw.random() ** 3))
        if corpus and draw.random() < 0.5:
            at = draw.randrange(len(corpus))
            prompt = tuple((corpus * (1 + (at + length) // len(corpus)))[at : at + length])
        else:
            prompt = tuple(draw.randrange(vocabulary) for _ in range(length))
        cases.append(
            Case(
                request_id=f"case-{index}",
                prompt_token_ids=prompt,
                params=_draw_params(draw, cap, vocabulary),
            )
        )
    return cases


def _draw_params(draw: random.Random, cap: int, vocabulary: int) -> SamplingParams:
    stop = [draw.randrange(vocabulary) for _ in range(4)] if draw.random() < 0.3 else []
    if draw.random() < 0.4:
        return SamplingParams(temperature=0, max_tokens=cap, logprobs=0, stop_token_ids=stop)
    return SamplingParams(
        temperature=draw.choice((0.3, 0.7, 1.0, 1.5)),
        top_k=draw.choice((0, 0, 1, 5, 40, 200)),
        top_p=draw.choice((1.0, 1.0, 0.95, 0.5, 0.1)),
        min_p=draw.choice((0.0, 0.0, 0.05, 0.3)),
        seed=draw.choice((None, draw.randrange(2**63))),
        max_tokens=cap,
        logprobs=0,
        stop_token_ids=stop,
    )


def verify(
    engine: XlaBatchEngine,
    *,
    requests: int = 200,
    schedules: int = 2,
    seed: int = 0,
    lags: Sequence[int] = (0, 1),
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Run `requests` drawn requests alone, then under each of `schedules` random schedules, and compare bits."""
    report = VerifyReport(requests=requests, schedules=schedules)
    cases = draw_cases(engine, requests, seed)
    before = engine.stats().compiles_after_warmup
    alone = {}
    for case in cases:
        alone[case.request_id] = run_alone(engine, case)
        if progress is not None:
            progress("alone")
    for result in alone.values():
        reason = str(result.finish_reason)
        report.finish_reasons[reason] = report.finish_reasons.get(reason, 0) + 1
    for schedule in range(schedules):
        batched = _run_batched(
            engine, cases, random.Random(f"{seed}/{schedule}"), lags[schedule % len(lags)], report
        )
        for case in cases:
            compare(case.request_id, schedule, alone[case.request_id], batched[case.request_id], report)
            if progress is not None:
                progress("batched")
    report.compiles_after_warmup = engine.stats().compiles_after_warmup - before
    return report


def run_alone(engine: XlaBatchEngine, case: Case) -> CompletionOutput:
    """The reference run: the request by itself through the same executables."""
    engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
    (output,) = engine.drain()
    return output.outputs[0]


def _run_batched(
    engine: XlaBatchEngine, cases: Sequence[Case], draw: random.Random, lag: int, report: VerifyReport
) -> dict[str, CompletionOutput]:
    """All cases in random order, arriving at random steps among neighbours that are aborted at random steps."""
    normal_lag, engine.lag = engine.lag, lag
    waiting = draw.sample(list(cases), len(cases))
    neighbours: list[str] = []
    results: dict[str, CompletionOutput] = {}
    pace = draw.choice((0.3, 1.0, 4.0))  # arrivals per step
    wanted = {case.request_id for case in cases}
    while len(results) < len(cases) or engine.has_unfinished:
        for _ in range(min(len(waiting), int(draw.expovariate(1 / pace) + 0.5))):
            case = waiting.pop()
            report.admitted_mid_stream += engine.num_running > 0
            engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
            if draw.random() < 0.1:
                neighbours.append(
                    engine.submit(
                        case.prompt_token_ids[::-1], case.params, request_id=f"neighbour-{len(waiting)}"
                    )
                )
        if neighbours and draw.random() < 0.3:
            report.aborted_neighbours += engine.abort(neighbours.pop(draw.randrange(len(neighbours))))
        for output in engine.step():
            if output.finished and output.request_id in wanted:
                results[output.request_id] = output.outputs[0]
    engine.lag = normal_lag
    return results


def compare(
    request_id: str, schedule: int, alone: CompletionOutput, batched: CompletionOutput, report: VerifyReport
) -> None:
    """Add one pair to the report: token ids, logprob bits, finish reason."""
    left, right = _pairs(alone), _pairs(batched)
    report.tokens += len(left)
    first: int | None = None
    for position in range(max(len(left), len(right))):
        a = left[position] if position < len(left) else None
        b = right[position] if position < len(right) else None
        if a is None or b is None or a[0] != b[0]:
            report.differing_tokens += 1
        elif a[1] != b[1]:
            report.differing_bits += 1
        else:
            continue
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


def _pairs(output: CompletionOutput) -> list[tuple[int, int]]:
    """(token id, logprob bits) per generated token."""
    bits = np.asarray(output.logprobs or (), np.float32).view(np.int32).tolist()
    return list(zip(output.token_ids, bits, strict=True))


def _at(output: CompletionOutput, position: int) -> tuple[int, float] | None:
    if position >= len(output.token_ids) or output.logprobs is None:
        return None
    return output.token_ids[position], output.logprobs[position]


def _describe(sample: tuple[int, float] | None) -> str:
    return "ended" if sample is None else f"token {sample[0]} logprob {sample[1]:.9g}"


def _corpus(engine: XlaBatchEngine) -> tuple[int, ...]:
    """Some text the model knows: this module's own source."""
    if engine.tokenizer is None:
        return ()
    import inspect

    return tuple(engine.tokenizer.encode(inspect.getsource(random)))
