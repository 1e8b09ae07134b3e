"""Engines take turns at one workload, and their streams are judged."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.tools.bench.figures import complaints, figures
from xla_engine.tools.bench.judge import (
    Verdict,
    dull_reason,
    eight_bit_bounds,
    near_tie,
    verdict,
    void_reason,
)
from xla_engine.tools.bench.limits import busy_seconds, core_count
from xla_engine.tools.bench.peers import (
    BARE,
    EIGHT_BITS,
    OTHER_WEIGHTS,
    OURS,
    REFERENCE,
    STOPS,
    PeerFailed,
    Process,
)
from xla_engine.tools.bench.workloads import Workload

_REST = 0.3  # seconds between turns: the threads of the engine before stop spinning
_WARM_UP_TOKENS = 8
_SECOND_ARRIVES = 0.4  # of the time a request takes alone
STOP_SLACK = 32  # tokens a request could run past its stop id
# figures that only this engine tells
OTHERS_MAY_TAKE = 0.05  # of the cores' time in a turn
LONG_ENOUGH = 0.5  # seconds of a turn, to see what others took: the system counts in hundredths
_OWN = ("host_ms_per_step", "occupancy", "occupancy_queued", "stale_share")


@dataclass(slots=True)
class Side:
    """One engine at one batch size. loaded: its answer to `load`. failed: why it ended, None while it runs."""

    name: str
    process: Process
    loaded: dict[str, Any]
    load_seconds: float
    failed: str | None = None


@dataclass(slots=True)
class Turns:
    """What one side did in one workload.

    figures: of each round. first: its first measured answer. void: why its rates do not count, None if they do.
    verdict: on its streams, None until they are judged.
    """

    figures: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, Any] | None = None
    void: str | None = None
    verdict: Verdict | None = None


def take_turns(
    workload: Workload,
    sides: list[Side],
    *,
    batch: int,
    rounds: int,
    positions: int,
    say: Callable[[str], None],
) -> dict[str, Turns]:
    """Warm up every side that can run the workload, then let each run it once a round, every other round backwards.

    sides: this engine's first.

    positions: the most a request may take.
    """
    timed = [side for side in sides if _can(side, workload)]
    turns = {side.name: Turns() for side in timed}
    if workload.name == "uniform":
        turns[BARE] = Turns()
    for side in timed:
        _guard(side, turns, lambda side=side: _run(side, workload.head(batch, _WARM_UP_TOKENS)))  # type: ignore[misc]
    for turn in range(rounds):
        say(f"B = {batch}: {workload.name}, round {turn + 1} of {rounds}")
        for side in timed if turn % 2 == 0 else reversed(timed):
            if side.failed is None:
                time.sleep(_REST)
                _guard(side, turns, lambda side=side: _turn(side, workload, turns))  # type: ignore[misc]
    ours = sides[0]
    if workload.name == "ragged":
        turns[STOPS] = Turns()
        _guard(ours, turns, lambda: _run_with_stops(ours, workload, turns, positions))
    return turns


def _can(side: Side, workload: Workload) -> bool:
    needs_arrivals = workload.name == "pair" or any(workload.arrivals)
    return side.failed is None and (not needs_arrivals or side.loaded["arrivals"])


def _guard(side: Side, turns: dict[str, Turns], work: Callable[[], object]) -> None:
    """Do work for a side. If a peer fails, it ends and its measurements are void; a failure of this engine is
    raised."""
    try:
        work()
    except PeerFailed as error:
        if side.name == OURS:
            raise
        side.failed = turns[side.name].void = str(error)


def _run(side: Side, workload: Workload, **more: Any) -> dict[str, Any]:
    return side.process.ask(
        "run", prompts=workload.prompts, max_tokens=workload.max_tokens, arrivals=workload.arrivals, **more
    )


def _turn(side: Side, workload: Workload, turns: dict[str, Turns]) -> None:
    """Let one side run the workload once."""
    mine = turns[side.name]
    extra: dict[str, float] = {}
    if workload.name == "pair":
        alone = _run(side, workload.head(1, workload.max_tokens[0]))["seconds"]
        arrival = _SECOND_ARRIVES * alone
        workload = replace(workload, arrivals=(0.0, arrival))
    others = -busy_seconds() + side.process.cpu_seconds
    answer = _run(side, workload)
    others += busy_seconds() - side.process.cpu_seconds
    if answer["seconds"] >= LONG_ENOUGH:
        extra["others_share"] = max(others, 0.0) / (core_count() * answer["seconds"])
    if workload.name == "pair":
        extra["pair_ratio"] = answer["seconds"] / (arrival + alone)
        extra["first_slowdown"] = answer["times"][0][-1] / alone
    mine.void = mine.void or complaints(workload, answer) or dull_reason(answer["streams"])
    if mine.void:
        return
    if mine.first is None:
        mine.first = answer
    elif side.name == OURS and answer["streams"] != mine.first["streams"]:
        mine.void = "streams differ from round to round"
    extra |= {name: answer[name] for name in _OWN if answer.get(name) is not None}
    mine.figures.append(figures(workload, answer) | extra)
    if BARE in turns and side.name == OURS:
        time.sleep(_REST)
        try:
            found = side.process.ask("bare", prompts=workload.prompts, max_tokens=workload.max_tokens)
            turns[BARE].figures.append(found)
        except (
            PeerFailed
        ) as error:  # for example because requests are too short for a step that decodes them all
            turns[BARE].void = str(error)


def _run_with_stops(side: Side, workload: Workload, turns: dict[str, Turns], positions: int) -> None:
    """The same requests ended by stop ids, as texts end: the host learns of each end a step late.

    The stop id is the request's own last token, where that comes only once in its stream. Our streams do not
    depend on the schedule, so they must be the same again.
    """
    mine, before = turns[STOPS], turns[side.name].first
    if before is None:
        mine.void = "nothing to compare with"
        return
    stops, caps = [], []
    for prompt, stream in zip(workload.prompts, before["streams"], strict=True):
        room = positions - len(prompt) - len(stream)
        slack = min(STOP_SLACK, room) if stream.count(stream[-1]) == 1 else 0
        stops.append([stream[-1]] if slack else [])
        caps.append(len(stream) + slack)
    answer = _run(side, replace(workload, max_tokens=tuple(caps)), stop_token_ids=stops)
    if answer["streams"] != before["streams"]:
        mine.void = "streams differ when stop ids end them"
    ended = sum(map(bool, stops)) / len(stops)
    extra = {name: answer[name] for name in _OWN if answer.get(name) is not None}
    mine.figures.append(figures(workload, answer) | extra | {"ended_by_stop_id": ended})


def judge_turns(
    workload: Workload, turns: dict[str, Turns], judge: Process, *, requests: int, dtype: str
) -> None:
    """Let the judge see each side's first `requests` streams, and void what is wrong."""
    prompts = workload.prompts[:requests]
    answers = {name: mine.first for name, mine in turns.items() if mine.first is not None}
    regrets: dict[str, list[list[float]]] = {}
    for name, answer in answers.items():
        found = judge.ask("regrets", prompts=prompts, streams=answer["streams"][:requests])
        regrets[name] = found["regrets"]
    expected = answers[REFERENCE]["streams"] if REFERENCE in answers else None
    for name, answer in answers.items():
        least = near_tie(dtype, None if name == REFERENCE else regrets.get(REFERENCE))
        bounds = [least] * sum(map(len, regrets[name]))
        if name in OTHER_WEIGHTS:
            continue
        if name in EIGHT_BITS:
            streams = answer["streams"][:requests]
            found = judge.ask("eight_bit_errors", prompts=prompts, streams=streams, dtype=dtype)
            bounds = [max(least, bound) for bound in eight_bit_bounds(found["errors"], found["vocabulary"])]
        mine = turns[name]
        mine.verdict = verdict(regrets[name], answer["streams"], expected, bounds)
        mine.void = mine.void or void_reason(mine.verdict)
