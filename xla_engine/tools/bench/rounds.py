"""Engines take turns at one workload, and their greedy streams are judged.

If streams are wrong, or could hide that they are, the engine's rate is void.
"""

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from xla_engine.tools.bench.figures import complaints, figures
from xla_engine.tools.bench.limits import busy_seconds
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
from xla_engine.utils.cores import cores

_REST = 0.3  # seconds between turns: the threads of the engine before stop spinning
_WARM_UP_TOKENS = 8
_SECOND_ARRIVES = 0.4  # of the time a request takes alone
STOP_SLACK = 32  # tokens that a request may generate after its stop id
OTHERS_MAY_TAKE = 0.05  # of the cores' time in a turn
LONG_ENOUGH = 0.5  # seconds of a turn, to see what others took: the system counts in hundredths
Ids = Sequence[Sequence[int]]

# A token that float32 would not choose is excused while its logit lies this close to the best one, in standard
# deviations of its row of logits. Some 30 roundings to bf16 (2^-9 each) that do not help each other leave 0.05.
NEAR_TIE = {"bfloat16": 0.2, "float32": 0.001}

_LOOKED_AT = 48  # tokens from the beginning of a stream; later ones may repeat
_LEAST_TOKENS = 16  # shorter streams are not called dull
_LEAST_DISTINCT = 0.25  # of the tokens looked at
_HEAD = 8  # tokens by which streams are told apart
_PLAINEST = 4.0  # errors of eight bits by row to those of rotated groups
# Figures that only this engine tells.
_OWN = ("host_ms_per_step", "occupancy", "occupancy_queued", "stale_share")


@dataclass(slots=True)
class Side:
    """One engine at one batch size. loaded: its answer to `load`. failed: why it ended, None while it runs."""

    name: str
    process: Process
    loaded: dict[str, Any]
    load_seconds: float
    failed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one engine's greedy streams.

    judged: tokens the judge looked at.
    off: share of them float32 would not have chosen.
    worst: largest regret, in standard deviations of the logits.
    same: share of tokens equal to the reference engine's, position by position; None if it did not run.
    beyond: the largest regret as a multiple of what is excused at its token; the streams are wrong above 1.
    """

    judged: int
    off: float
    worst: float
    same: float | None
    beyond: float

    def record(self) -> dict[str, float | int | None]:
        same = None if self.same is None else round(self.same, 4)
        return {
            "judged": self.judged,
            "off": round(self.off, 4),
            "worst_regret": round(self.worst, 4),
            "same": same,
            "beyond": round(self.beyond, 3),
        }


@dataclass(slots=True)
class SideRounds:
    """What one side did in one workload.

    figures: of each round. first: its first measured answer. void: why its rates do not count, None if they do.
    verdict: on its streams, None until they are judged.
    """

    figures: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, Any] | None = None
    void: str | None = None
    verdict: Verdict | None = None


def say(text: str) -> None:
    """Tell about the progress."""
    print(text, file=sys.stderr, flush=True)


def take_turns(
    workload: Workload,
    sides: list[Side],
    *,
    batch: int,
    rounds: int,
    positions: int,
) -> dict[str, SideRounds]:
    """Warm up every side that can run the workload, then let each run it once a round, every other round backwards.

    sides: this engine's first.

    positions: the most a request may take.
    """
    timed = [side for side in sides if _can(side, workload)]
    turns = {side.name: SideRounds() for side in timed}
    if workload.name == "uniform":
        turns[BARE] = SideRounds()
    for side in timed:
        with _guarded(side, turns):
            _run(side, workload.head(batch, _WARM_UP_TOKENS))
    for turn in range(rounds):
        say(f"B = {batch}: {workload.name}, round {turn + 1} of {rounds}")
        for side in timed if turn % 2 == 0 else reversed(timed):
            if side.failed is None:
                time.sleep(_REST)
                with _guarded(side, turns):
                    _turn(side, workload, turns)
    if workload.name == "ragged":
        turns[STOPS] = SideRounds()
        _run_with_stops(sides[0], workload, turns, positions)
    return turns


def _can(side: Side, workload: Workload) -> bool:
    needs_arrivals = workload.name == "pair" or any(workload.arrivals)
    return side.failed is None and (not needs_arrivals or side.loaded["arrivals"])


@contextlib.contextmanager
def _guarded(side: Side, turns: dict[str, SideRounds]) -> Iterator[None]:
    """If a peer fails, it ends and its measurements are void; a failure of this engine is raised."""
    try:
        yield
    except PeerFailed as error:
        if side.name == OURS:
            raise
        side.failed = turns[side.name].void = str(error)


def _run(side: Side, workload: Workload, **more: Any) -> dict[str, Any]:
    return side.process.ask(
        "run", prompts=workload.prompts, max_tokens=workload.max_tokens, arrivals=workload.arrivals, **more
    )


def _turn(side: Side, workload: Workload, turns: dict[str, SideRounds]) -> None:
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
        extra["others_share"] = max(others, 0.0) / (cores() * answer["seconds"])
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
        except PeerFailed as error:  # such as requests that are too short for a step that decodes them all
            turns[BARE].void = str(error)


def _run_with_stops(side: Side, workload: Workload, turns: dict[str, SideRounds], positions: int) -> None:
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
    workload: Workload, turns: dict[str, SideRounds], judge: Process, *, requests: int, dtype: str
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


def verdict(
    regrets: Sequence[Sequence[float]], streams: Ids, reference: Ids | None, bounds: Sequence[float]
) -> Verdict:
    """Sum up the judge's regrets of some streams, `bounds` for each token, and compare all with the reference's."""
    flat = list(chain.from_iterable(regrets))
    same = None
    if reference is not None:
        pairs = [
            a == b
            for ours, theirs in zip(streams, reference, strict=True)
            for a, b in zip(ours, theirs, strict=False)
        ]
        same = sum(pairs) / len(pairs)
    return Verdict(
        judged=len(flat),
        off=sum(x > 0 for x in flat) / len(flat),
        worst=max(flat),
        same=same,
        beyond=max(regret / bound for regret, bound in zip(flat, bounds, strict=True)),
    )


def dull_reason(streams: Ids) -> str | None:
    """Why a fault could pass these streams unseen; None if it could not.

    If a stream repeats a few tokens, a position that is off by one chooses the same tokens. If requests with different
    prompts begin alike, a row that reads the slot of another goes unnoticed.
    """
    looked = [stream[:_LOOKED_AT] for stream in streams if len(stream) >= _LEAST_TOKENS]
    remedy = "use a model with more varied streams, such as the random ones that this command writes"
    if looked:
        distinct = [len(set(stream)) for stream in looked]
        if statistics.median(d / len(s) for d, s in zip(distinct, looked, strict=True)) < _LEAST_DISTINCT:
            return (
                f"dull streams: half of them hold at most {statistics.median_low(distinct)} distinct tokens of "
                f"{len(looked[0])}, so that a wrong position would pass; {remedy}"
            )
    heads = {tuple(stream[:_HEAD]) for stream in streams}
    if len(heads) < len(streams) / 2:
        return (
            f"dull streams: {len(streams)} requests begin in {len(heads)} ways, so that a swapped slot would pass; "
            f"{remedy}"
        )
    return None


def near_tie(dtype: str, reference: Sequence[Sequence[float]] | None) -> float:
    """The regret that counts as none: of roundings to `dtype`, or the worst of the reference's own."""
    return max(NEAR_TIE[dtype], *chain.from_iterable(reference or [[0.0]]))


def eight_bit_bounds(errors: Sequence[float], vocabulary: int) -> list[float]:
    """What an engine in eight bits may regret at each token: one that rounds as its model does keeps to it with 99 %.

    The model is one whose matrices, and the rows that they multiply, are rounded to 255 steps of each row's largest
    value: the plainest eight bits there are (LLM.int8() without its outliers); finer schemes, such as the blocks of
    32 of Q8_0, err less. The judge's own network rounds rotated groups of 64, and errs a quarter as much
    (findings/int8.md). What is not in eight bits is in the dtype of the run, keys and values for one, and errs as the
    reference engine does in it. `errors`: how far logits of both lie from float32's at each token of the streams,
    root of the mean square in deviations of the logits.

    An engine takes a token for the best one if its errors of the two differ by the regret at least. Errors of other
    roundings of the same size are normal and independent, so that their difference has sqrt(2) times the deviation
    and exceeds z of these with a probability below exp(-z^2 / 2) (Chernoff). Over all tokens of the streams times
    the vocabulary that is one in a hundred for z = sqrt(2 ln(100 tokens vocabulary)). Nothing is measured on the
    engine that is judged.
    """
    z = math.sqrt(2 * math.log(100 * len(errors) * vocabulary))
    return [z * math.sqrt(2) * _PLAINEST * error for error in errors]


def void_reason(found: Verdict) -> str | None:
    """Why the rate of these streams does not count: a regret beyond what is excused."""
    if found.beyond <= 1:
        return None
    return (
        f"wrong streams: a token lies {found.beyond:.2g} times as far below float32's choice as is excused, "
        f"the worst {found.worst:.2g} deviations"
    )
