"""Fitting a cost model to a recorded run."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import mul
from typing import Any, NamedTuple

from xla_engine.errors import RecordError
from xla_engine.observability.step_log import LoggedStep, StepLog
from xla_engine.tools.simulator.cost import CostModel, DeviceWork, HostWork, least_squares, machine_of

NOISES = 1021  # a prime, so that a schedule that repeats does not meet the same ones each time
FEWEST = 20  # samples that a fit needs
BLOCKED = 0.3  # a read tells how long the device took if the host waited for at least this share of it
# Costs in the order of the columns of the two fits; the device's begin with a call of each number of lanes.
_DEVICE = ("prompt_token", "prefill_key", "decode", "row", "key", "move", "check", "overlap")
_HOST = ("turn", "token", "end", "start_call", "wake", "submit")


def works_of(log: StepLog) -> list[DeviceWork]:
    """The work of each step of a log on the device."""
    machine = machine_of(log)
    holder: dict[int, int] = {}  # slot -> request
    base: dict[int, int] = {}  # request -> keys it holds in a step, less the step's number
    found = []
    for number, step in enumerate(log.steps):
        ends = []
        for request, slot, start, length, last in step.chunks:
            holder[slot], end = request, start + length
            ends.append(end)
            if last:
                base[request] = end + 1 - number
        for request, slot, length in step.resumes:
            holder[slot], base[request] = request, length + 1 - number
        held = [base[holder[slot]] + number for slot in step.decode]
        held += [base[request] + number for request, *_ in step.verify]
        for (request, *_), (tokens, _) in zip(step.verify, step.verified, strict=False):
            base[request] += max(tokens - 1, 0)
        found.append(
            DeviceWork(
                calls=machine.calls(len(ends)),
                prefill_keys=machine.prefill_keys(ends),
                rows=len(held),
                keys=machine.decode_keys(sum(held), max(held)) if held else 0,
                moved=sum(length for _, _, length in (*step.parks, *step.resumes)),
                prompt_tokens=sum(length for _, _, _, length, _ in step.chunks),
                checked=sum(width - 1 for *_, width in step.verify),
            )
        )
    return found


class _Turn(NamedTuple):
    """A timed turn of the host. submitted: requests that it accepted as well."""

    work: HostWork
    submitted: int
    seconds: float

    @property
    def row(self) -> list[int]:
        return [1, *self.work, self.submitted]


class _Step(NamedTuple):
    """A step whose time on the device is known. meanwhile: the turn that the host took in that time, as a row."""

    work: DeviceWork
    seconds: float
    meanwhile: Sequence[int]


def fit(log: StepLog) -> CostModel:
    """The cost model of a recorded run. Raises RecordError for a run that is too short."""
    lanes = machine_of(log).lanes
    turns, steps = _timed(log)
    if len(steps) < FEWEST or len(turns) < FEWEST:
        raise RecordError(
            f"the run is too short for a cost model: {len(steps)} steps and {len(turns)} turns were timed; "
            f"{FEWEST} are needed: record more requests"
        )
    bursts = _bursts(log)
    of_host, host_residual = least_squares(
        [*(turn.row for turn in turns), *([[0, 0, 0, 0, 0, 1]] * len(bursts))],
        [*(turn.seconds for turn in turns), *bursts],
    )
    rows = [
        [
            *(work.calls.count(size) for size in lanes),
            work.prompt_tokens,
            work.prefill_keys,
            bool(work.rows),
            work.rows,
            work.keys,
            work.moved,
            work.checked,
            min(sum(map(mul, of_host, meanwhile)), seconds),
        ]
        for work, seconds, meanwhile in steps
    ]
    seconds = [step.seconds for step in steps]
    found, residual = least_squares(rows, seconds)
    costs: dict[str, Any] = dict(zip((*_DEVICE, *_HOST), (*found[len(lanes) :], *of_host), strict=True))
    return CostModel(
        **costs,
        call=_fill(lanes, dict(zip(lanes, found, strict=False))),
        noise=_noise([took - sum(map(mul, row, found)) for row, took in zip(rows, seconds, strict=True)]),
        residual=residual,
        host_residual=host_residual,
        steps=len(steps),
    )


def _timed(log: StepLog) -> tuple[list[_Turn], list[_Step]]:
    """Turns of the host, from having read a step to having started the next; and steps that the host waited for."""
    works = works_of(log)
    turns: list[_Turn] = []
    steps: list[_Step] = []
    reads = defaultdict(list)  # by the number of steps started before
    for number, step in enumerate(log.steps):
        if step.read is not None:
            reads[step.read_after].append(number)
    submitted = Counter(each.came.started for each in log.requests)
    ended = Counter(each.ended for each in log.requests if each.taken_back is None)
    left = Counter(each.taken_back.started for each in log.requests if each.taken_back is not None)
    first = {each.came.started: each.submitted for each in reversed(log.requests)}
    live = 0
    last_read = 0.0
    for number, step in enumerate(log.steps):
        read = reads[number]
        live += submitted[number] - left[number]
        work = HostWork(
            tokens=sum(works[at].rows + _more(log.steps[at]) for at in read),
            ended=sum(ended[log.steps[at].read] for at in read),
            calls=len(works[number].calls),
        )
        turn = _Turn(work, submitted[number], step.started - last_read)
        if read and live > submitted[number]:
            turns.append(turn)
        elif submitted[number] == live and number:
            work = HostWork(calls=work.calls, woken=1)
            turns.append(_Turn(work, submitted[number] - 1, step.started - first[number]))
        for at in reads[number + 1]:
            done = log.steps[at].read
            assert done is not None
            seconds = done - max(last_read, log.steps[at].started)
            if done - step.started > BLOCKED * seconds:
                steps.append(_Step(works[at], seconds, turn.row if at < number else ()))
            live -= ended[done]
            last_read = done
    return turns, steps


def _more(step: LoggedStep) -> int:
    """Tokens that the rows of a step sampled beyond one each."""
    return sum(max(tokens - 1, 0) for tokens, _ in step.verified)


def _bursts(log: StepLog) -> list[float]:
    """Seconds the host took for each request that came right after another."""
    groups = groupby(log.requests, key=lambda each: each.came)
    times = [[each.submitted for each in group] for _, group in groups]
    return [after - before for group in times for before, after in pairwise(group)]


def _noise(errors: Sequence[float]) -> tuple[float, ...]:
    """Errors at evenly spaced quantiles, shuffled."""
    found = sorted(errors)
    kept = [found[(2 * at + 1) * len(found) // (2 * NOISES)] for at in range(NOISES)]
    random.Random(0).shuffle(kept)
    mean = sum(kept) / len(kept)
    return tuple(each - mean for each in kept)


def _fill(lanes: tuple[int, ...], call: dict[int, float]) -> dict[int, float]:
    """Costs of all calls: one that the run never made costs, lane for lane, as much as the nearest one."""
    known = [size for size in lanes if call[size] > 0]
    if not known:
        return call
    nearest = {size: min(known, key=lambda other: abs(other - size)) for size in lanes}
    return {size: call[nearest[size]] * size / nearest[size] for size in lanes}
