"""A step log says all that a schedule follows from: simulated, it comes out the same step for step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.support.fake_runner import decoded_of
from tests.support.simulation import COST
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import StepLogWriter
from xla_engine.scheduler import (
    NO_CHOICE,
    FinishReason,
    Plan,
    Request,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepResult,
)
from xla_engine.scheduler.pipeline import StepPipeline
from xla_engine.tools.simulator.compare import compare

VOCABULARY = 199


class Recorded:
    """The engine's loop around a scheduler, with tokens drawn from request and position, and a log of it.

    strings: for requests that a stop string ends, the number of tokens until then.
    """

    def __init__(self, config: SchedulerConfig, path: Path, *, lag: int, draw: random.Random) -> None:
        self.scheduler = Scheduler(config)
        self._pipeline: StepPipeline[tuple[Plan, StepResult]] = StepPipeline(self.scheduler, lag=lag)
        self.lag, self.draw, self.path = lag, draw, path
        self.strings: dict[str, int] = {}
        self.live: Counter[str] = Counter()  # tokens so far
        self.seen: Counter[str] = Counter()
        self._sampled: dict[str, int] = {}
        self._now = 0.0
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        engine = {"lag": lag, "prefill_lanes": [2, 8], "key_buckets": [512]}
        self._log = StepLogWriter(self._file, scheduler=asdict(config), engine=engine, began=0.0)

    def submit(self, request: Request) -> None:
        self.scheduler.submit(request)
        self._log.submitted(request, self._tick())
        self.live[request.request_id] = 0

    def abort(self, name: str) -> None:
        if self.scheduler.abort(name):
            self._end(name, FinishReason.ABORT)

    def turn(self, aborts: float) -> None:
        """aborts: how likely callers are to end requests, also while the host waits for a step."""
        if (
            not self._pipeline.is_full
        ):  # else the log does not tell whether it came before the step that is read
            self._give_up(aborts / 2)
        plan = None if self._pipeline.is_full else self._pipeline.plan()
        if plan is not None:
            for name in plan.moves.replays:
                self.live[name] = 0
            self._pipeline.in_flight.append((plan, self._sample(plan)))
            self._log.started(plan, self._tick())
            self.seen.update(
                {name: len(getattr(plan.moves, name)) for name in ("reuses", "copies", "parks", "replays")}
            )
        if self._pipeline.is_due(started=plan is not None):
            if plan is not None:  # else the log does not tell whether it came before the plan
                self._give_up(aborts / 2)
            self._read()

    def _read(self) -> None:
        plan, result = self._pipeline.in_flight.popleft()
        events = self.scheduler.commit(plan, result)
        self._log.read(plan, events, self._tick())
        for name, _, reason in events:
            if name not in self.live:  # its text ended it by a token before, of the same step
                continue
            self.live[name] += 1
            if reason is not None:
                self._end(name, reason)
            elif self.live[name] == self.strings.get(name):
                self.scheduler.finish(name, FinishReason.STOP)
                self._end(name, FinishReason.STOP)
                self.seen["texts"] += 1

    def drain(self, aborts: float) -> None:
        while self.live or self._pipeline.in_flight:
            self.turn(aborts)
        self.scheduler.check()
        self._file.close()

    def _give_up(self, chance: float) -> None:
        while self.live and self.draw.random() < chance:
            parked = [view.request_id for view in self.scheduler.snapshot().waiting if view.planned]
            name = self.draw.choice(parked or list(self.live))
            self.seen["parked and aborted"] += bool(parked)
            self.abort(name)

    def _sample(self, plan: Plan) -> StepResult:
        first = []
        for chunk in plan.first_rows:
            self._sampled[chunk.request_id] = chunk.generated
            first.append(self._token(chunk.request_id))
        decode = [self._token(row.request_id) for row in plan.decode]
        return StepResult(first=first, decode=decoded_of(plan.decode, decode))

    def _token(self, name: str) -> Sample:
        position = self._sampled[name]
        self._sampled[name] += 1
        token = random.Random(f"{name} {position}").randrange(VOCABULARY)
        return Sample(token if token or position < 3 else NO_CHOICE)

    def _end(self, name: str, reason: FinishReason) -> None:
        del self.live[name]
        self.seen[str(reason)] += 1
        self._log.ended(name, reason, self._tick())

    def _tick(self) -> float:
        self._now += 1e-3
        return self._now


def draw_config(draw: random.Random, alike: bool) -> SchedulerConfig:
    policy = draw.choice(("round_robin", "round_robin", "priority", "longest_prefix"))
    slots, page, exact = draw.choice((3, 8)), draw.choice((8, 16)), draw.random() < 0.6
    config = SchedulerConfig(
        max_num_seqs=slots,
        chunk_size=8,
        max_num_batched_tokens=slots + 64,
        scheduling_policy=policy,
        quantum=draw.choice((1, 2, 5)),
        preemption=policy == "priority",
        enable_prefix_caching=draw.random() < 0.8,
        block_size=page,
        num_blocks=draw.choice((None, 192 // page, 320 // page)),
        prefill_equals_decode=exact,
        cut_invariant=exact,
        swap_tokens=draw.choice((0, 0, 100, 1 << 20)),
    )
    if alike:  # answers are recomputed, beside those to the same prompt
        exact = {"prefill_equals_decode": True, "cut_invariant": True}
        config = replace(config, block_size=8, num_blocks=12, max_num_seqs=8, swap_tokens=0, **exact)
    return config


def draw_requests(draw: random.Random, count: int, alike: bool) -> Iterator[Request]:
    """Some prompts share a beginning and some are equal; with `alike`, most are."""
    stem = [draw.randrange(VOCABULARY) for _ in range(60)]
    for index in range(count):
        length = 0 if alike and draw.random() < 0.7 else draw.choice((0, 0, 1, 3, 20, 60))
        own = [draw.randrange(VOCABULARY) for _ in range(length)]
        yield Request(
            request_id=f"r{index}",
            prompt_token_ids=tuple(stem[: draw.choice((0, 20, 60)) if own else 19 if alike else 5] + own),
            max_tokens=draw.choice((1, 2, 3, 9, 16, 40)) if own else 16,
            stop_token_ids=frozenset(draw.sample(range(1, VOCABULARY), draw.choice((0, 0, 6)))),
            constrained=draw.random() < 0.1,
            cache_salt=draw.choice(("",) * 6 + ("tenant",)),
            max_cached_tokens=draw.choice((None,) * 18 + (0, 5)),
            priority=draw.choice((-1, 0, 0, 0, 2)),
        )


def recorded(seed: int, path: Path) -> Recorded:
    """A run of thirty requests, of which some are aborted and some end at a stop string."""
    draw = random.Random(seed)
    alike, aborts = seed % 4 == 0, draw.choice((0.0, 0.1, 0.3))
    config = draw_config(draw, alike)
    run = Recorded(config, path, lag=draw.choice((0, 1, 1, 2)), draw=draw)
    for request in draw_requests(draw, 30, alike):
        if run.scheduler.never_fits(len(request.prompt_token_ids), request.max_tokens) is not None:
            continue
        run.submit(request)
        if draw.random() < 0.2:
            run.strings[request.request_id] = draw.choice((1, 2, 4, 7))
        for _ in range(draw.choice((0, 0, 1, 3))):
            run.turn(aborts)
    run.drain(aborts)
    return run


@pytest.mark.full
def test_any_recorded_schedule_is_simulated_step_for_step(tmp_path: Path) -> None:
    """Prefix lookups, the order in which requests end, and answers to equal prompts are part of it."""
    seen: Counter[str] = Counter()
    for seed in range(48):
        run = recorded(seed, tmp_path / "steps.jsonl")
        log = read_step_log(run.path)
        found = compare(log, COST)
        assert found.first_difference is None, f"seed {seed}, step {found.first_difference} of {found.steps}"
        ends = Counter(each.end for each in log.requests)
        assert [found.predicted.finished.get(end, 0) - ends[end] for end in ("abort", "error")] == [0, 0]
        assert sum(len(step.copies) for step in log.steps) == run.seen["copies"]
        seen += run.seen
    assert min(seen.values()) > 8, seen
