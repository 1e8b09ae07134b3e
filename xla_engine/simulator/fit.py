"""A cost model from a recorded run."""

from __future__ import annotations

from collections import Counter, defaultdict

from xla_engine.errors import RecordError
from xla_engine.simulator.cost import CostModel, HostWork, Work, least_squares, machine_of
from xla_engine.step_log import StepLog

FEWEST = 20  # samples; fewer say nothing
BLOCKED = 0.1  # a read tells how long the device took if the host waited for at least this share of it


def works_of(log: StepLog) -> list[Work]:
    """What each step of a log asked of the device."""
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
        found.append(
            Work(
                calls=machine.calls(len(ends)),
                prefill_keys=machine.prefill_keys(ends),
                rows=len(held),
                keys=machine.decode_keys(sum(held), max(held)) if held else 0,
                moved=sum(length for _, _, length in (*step.parks, *step.resumes)),
            )
        )
    return found


def fit(log: StepLog) -> CostModel:
    """Fit to a recorded run. Raises RecordError for one that is too short or has no times."""
    lanes = machine_of(log).lanes
    works = works_of(log)
    device: list[tuple[Work, float]] = []
    host: list[tuple[HostWork, float]] = []
    reads = defaultdict(list)  # by the number of steps started before
    for number, step in enumerate(log.steps):
        if step.read is not None:
            reads[step.read_after].append(number)
    submitted = Counter(each.came.started for each in log.requests)
    ended = Counter(each.ended for each in log.requests if each.taken_back is None)
    left = Counter(each.taken_back.started for each in log.requests if each.taken_back is not None)
    live = 0
    last_read = 0.0
    for number, step in enumerate(log.steps):
        read = reads[number]
        live += submitted[number] - left[number]
        if read and live > submitted[number]:
            work = HostWork(
                tokens=sum(works[at].rows for at in read),
                ended=sum(ended[log.steps[at].read] for at in read),
                chunks=len(step.chunks),
                submitted=submitted[number],
            )
            host.append((work, step.started - last_read))
        for at in reads[number + 1]:
            done = log.steps[at].read
            assert done is not None
            seconds = done - max(last_read, log.steps[at].started)
            if done - step.started > BLOCKED * seconds:
                device.append((works[at], seconds))
            live -= ended[done]
            last_read = done
    if len(device) < FEWEST or len(host) < FEWEST:
        raise RecordError(
            f"the run is too short for a cost model: {len(device)} steps and {len(host)} turns were timed; "
            f"{FEWEST} are needed: record more requests"
        )
    columns = [
        [
            *(work.calls.count(size) for size in lanes),
            work.prefill_keys,
            bool(work.rows),
            work.rows,
            work.keys,
            work.moved,
        ]
        for work, _ in device
    ]
    found, residual = least_squares(columns, [seconds for _, seconds in device])
    turns = [[1, work.tokens, work.ended, work.chunks, work.submitted] for work, _ in host]
    of_host, host_residual = least_squares(turns, [seconds for _, seconds in host])
    calls = _fill(lanes, dict(zip(lanes, found, strict=False)))
    prefill_key, decode, row, key, move = found[len(lanes) :]
    turn, token, end, chunk, submit = of_host
    return CostModel(
        call=calls,
        prefill_key=prefill_key,
        decode=decode,
        row=row,
        key=key,
        move=move,
        turn=turn,
        token=token,
        end=end,
        chunk=chunk,
        submit=submit,
        residual=residual,
        host_residual=host_residual,
        steps=len(device),
    )


def _fill(lanes: tuple[int, ...], call: dict[int, float]) -> dict[int, float]:
    """A call of a size that the run never made costs in proportion to its lanes what the nearest one does."""
    known = [size for size in lanes if call[size] > 0]
    if not known:
        return call
    nearest = {size: min(known, key=lambda other: abs(other - size)) for size in lanes}
    return {size: call[nearest[size]] * size / nearest[size] for size in lanes}
