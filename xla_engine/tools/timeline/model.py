"""Timelines: which request held which slot in which steps, and its work there."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from xla_engine.observability.step_log import (
    LoggedRequest,
    LoggedStep,
    Moment,
    StepLog,
    is_step_log,
    read_step_log,
)

if TYPE_CHECKING:
    from xla_engine.equivalence.record import Record

WITH_DRAFTS = ("verify", "prefill")  # a step may end a prompt and check drafts of its row
KINDS = ("prefill", "decode", "held", "cached", "parked", "verify")  # idle is where there is no segment


class Segment(NamedTuple):
    """A range of steps, first and last included, in which a slot did one kind of work for one request.

    lane: the slot; from `Timeline.slots` on, places of parked requests.
    first, last: steps.
    kind: one of `KINDS`. "held": the request did not run, because the token budget was used up or its last token was
        not read yet. "cached": the step in which a prompt began with the cached tokens of a slot. "verify": it
        decoded and might sample several tokens in each step.
    request: index into `Timeline.requests`.
    """

    lane: int
    first: int
    last: int
    kind: str
    request: int


class VerifiedDrafts(NamedTuple):
    """Drafts of a row verified in one step: how many were accepted, and how many rejected."""

    lane: int
    step: int
    accepted: int
    rejected: int


class Label(NamedTuple):
    """A request as shown. tokens: new ones, None if unknown. end: the reason, None if it did not end."""

    name: str
    prompt_tokens: int
    tokens: int | None
    end: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run as segments by lane and step.

    title: model, type and device.
    slots: lanes that are slots.
    steps: how many.
    requests: in the order of their submission.
    segments: sorted.
    times: (begin, end) of each step in seconds; None where they were not recorded.
    waiting: requests without a slot in each step.
    phases: of each step, nanoseconds of the host's time in the order of `PHASES`; None where it was not measured, and
        empty where none was.
    drafts: sorted.
    """

    title: str
    slots: int
    steps: int
    requests: tuple[Label, ...]
    segments: tuple[Segment, ...]
    times: tuple[tuple[float, float], ...] | None
    waiting: tuple[int, ...]
    phases: tuple[tuple[int, ...] | None, ...] = ()
    drafts: tuple[VerifiedDrafts, ...] = ()

    @property
    def lanes(self) -> int:
        """Slots, and places of parked requests."""
        return max([self.slots, *(segment.lane + 1 for segment in self.segments)])

    @property
    def busy(self) -> tuple[int, ...]:
        """Slots that did something in each step."""
        change = [0] * (self.steps + 1)
        for segment in self.segments:
            if segment.lane < self.slots and segment.kind != "held":
                change[segment.first] += 1
                change[segment.last + 1] -= 1
        return tuple(accumulate(change[:-1]))


class _Lanes:
    """Builds segments step by step; a step like the one before costs nothing."""

    def __init__(self, slots: int) -> None:
        self.segments: list[Segment] = []
        self._slots = slots
        self._parked: dict[int, tuple[int, int]] = {}  # request -> (lane, first step)
        self._open: dict[int, tuple[int, str, int]] = {}  # slot -> (request, kind, first step)
        self._holder: dict[int, int] = {}  # slot -> request
        self._since: dict[int, int] = {}  # request -> step from which nothing was drawn for it
        self._rows: tuple[Sequence[int], Sequence[tuple[int, int, int]]] = (), ()
        self._prefilled = False

    def add(self, number: int, step: LoggedStep) -> None:
        self._since.update(dict.fromkeys(step.admitted, number))
        for request, *_ in step.parks:
            taken = {lane for lane, _ in self._parked.values()}
            lane = next(lane for lane in count(self._slots) if lane not in taken)
            self._parked[request] = lane, number
        for request, slot, _ in step.resumes:
            self.fetch(request, number)
            self._holder[slot] = request
        if not (step.chunks or self._prefilled) and (step.decode, step.verify) == self._rows:
            return
        self._rows, self._prefilled = (step.decode, step.verify), bool(step.chunks)
        self._holder.update((slot, request) for request, slot, *_ in step.chunks)
        now = {slot: (self._holder[slot], "decode") for slot in step.decode}
        now |= {slot: (request, "verify") for request, slot, *_ in step.verify}
        now |= {slot: (request, "prefill") for request, slot, *_ in step.chunks}
        now |= {slot: (request, "cached") for request, slot, *_ in step.reuses}
        for slot, (request, kind, _) in list(self._open.items()):
            if now.get(slot) != (request, kind):
                self._close(slot, number - 1)
        for slot, (request, kind) in now.items():
            if slot not in self._open:
                if self._since.get(request, number) < number:
                    self.segments.append(Segment(slot, self._since[request], number - 1, "held", request))
                self._open[slot] = (request, kind, number)

    def fetch(self, request: int, number: int) -> None:
        """A request is parked no longer from a step on."""
        if request in self._parked:
            lane, first = self._parked.pop(request)
            self.segments.append(Segment(lane, first, number - 1, "parked", request))

    def end(self, steps: int) -> None:
        for request in list(self._parked):
            self.fetch(request, steps)
        for slot in list(self._open):
            self._close(slot, steps - 1)

    def _close(self, slot: int, last: int) -> None:
        request, kind, first = self._open.pop(slot)
        self.segments.append(Segment(slot, first, last, kind, request))
        self._since[request] = last + 1


def _build(steps: Sequence[LoggedStep], slots: int, over: Mapping[int, int]) -> tuple[Segment, ...]:
    """over: by request, the step before which it ended; perhaps parked, with its last token on the way."""
    lanes = _Lanes(slots)
    leaving: dict[int, list[int]] = {}
    for request, number in over.items():
        leaving.setdefault(number, []).append(request)
    for number, step in enumerate(steps):
        for request in leaving.get(number, ()):
            lanes.fetch(request, number)
        lanes.add(number, step)
    lanes.end(len(steps))
    return tuple(sorted(lanes.segments))


def read_timeline(path: Path | str) -> Timeline:
    """The timeline of a step log, or of a record of `verify`. Raises RecordError and OSError."""
    if is_step_log(path):
        return of_step_log(read_step_log(path))
    from xla_engine.equivalence.record import read_record

    return of_record(read_record(path))


def of_step_log(log: StepLog) -> Timeline:
    """The timeline of a run or a simulation, with its times."""
    over = {index: each.over.started for index, each in enumerate(log.requests) if each.over is not None}
    times: list[tuple[float, float]] = []
    free = 0.0
    for step in log.steps:
        begin = max(free, step.started)
        free = max(begin, step.started if step.read is None else step.read)
        times.append((begin, free))
    engine, slots = log.engine, int(log.scheduler["max_num_seqs"])
    return Timeline(
        title=" · ".join(str(engine[name]) for name in ("model", "dtype", "device") if name in engine),
        slots=slots,
        steps=len(log.steps),
        requests=tuple(
            Label(_name(each), each.prompt_tokens, each.tokens if each.end else None, each.end)
            for each in log.requests
        ),
        segments=_build(log.steps, slots, over),
        times=tuple(times),
        waiting=_waiting(log, over),
        phases=tuple(step.phases for step in log.steps) if any(step.phases for step in log.steps) else (),
        drafts=_drafts(log.steps),
    )


def _drafts(steps: Sequence[LoggedStep]) -> tuple[VerifiedDrafts, ...]:
    found = []
    for number, step in enumerate(steps):
        for (_, slot, _), (tokens, drafted) in zip(step.verify, step.verified, strict=False):
            accepted = min(max(tokens - 1, 0), drafted)
            if drafted:
                found.append(VerifiedDrafts(slot, number, accepted, drafted - accepted))
    return tuple(sorted(found))


def _name(request: LoggedRequest) -> str:
    """The caller's name for a request, and which of its n sequences it is; else the engine's."""
    if request.custom_id is None:
        return request.name
    _, bracket, sequence = request.name.partition("[")
    return request.custom_id + bracket + sequence


def of_record(record: Record) -> Timeline:
    """The timeline of a verified schedule, which has steps but no times."""
    title = f"{record.model_path or 'embedded'} · {record.identity.dtype}"
    return replace(of_step_log(_log_of(record)), title=title, times=None)


def _log_of(record: Record) -> StepLog:
    """A record as a step log without times."""
    log = StepLog(scheduler=record.identity.config, engine={})
    number = {case.request_id: index for index, case in enumerate(record.schedule.requests)}
    started = [step.turn for step in record.steps]
    parks = _parks(record, started)
    for at, step in enumerate(record.steps):
        log.steps.append(
            LoggedStep(
                started=0.0,
                admitted=tuple(number[name] for name, *_ in step.admitted),
                chunks=tuple(
                    (number[name], slot, start, length, False) for name, slot, start, length in step.chunks
                ),
                decode=step.decode,
                parks=tuple((number[name], slot, 0) for name, slot in parks.get(at, ())),
                resumes=tuple((number[name], slot, 0) for name, slot, _ in step.admitted),
                verify=tuple((number[name], slot, width) for name, slot, width in step.verify),
                verified=step.verified,
            )
        )
    turns: dict[str, dict[str, int]] = {}  # by kind of action: the step before which a request had its first
    for action in record.schedule.actions:
        at = bisect_left(started, action.turn)
        turns.setdefault(action.kind, {}).setdefault(action.request_id, at)
    for case in record.schedule.requests:
        name, found = case.request_id, record.batched.get(case.request_id)
        aborted = turns.get("abort", {}).get(name)
        log.requests.append(
            LoggedRequest(
                name=name,
                prompt_tokens=len(case.prompt_token_ids),
                max_tokens=case.params.token_limit,
                priority=0,
                constrained=False,
                max_cached_tokens=None,
                submitted=0.0,
                came=Moment(turns["submit"][name], 0),
                end=None if found is None else found.end,
                over=None if aborted is None else Moment(aborted, 0),
                tokens=0 if found is None else len(found.token_ids),
            )
        )
    return log


def _parks(record: Record, started: Sequence[int]) -> dict[int, list[tuple[str, int]]]:
    """(request, slot) by the step before which a request was parked.

    A record has the requested actions, not their effects; a request that gets a slot again was preempted.
    """
    admissions: dict[str, list[tuple[int, int]]] = {}  # (step, slot)
    for at, step in enumerate(record.steps):
        for name, slot, _ in step.admitted:
            admissions.setdefault(name, []).append((at, slot))
    found: dict[int, list[tuple[str, int]]] = {}
    done = set()
    for action in record.schedule.actions:
        at = bisect_left(started, action.turn)
        for (first, slot), (again, _) in pairwise(admissions.get(action.request_id, ())):
            if action.kind == "park" and first < at <= again and (action.request_id, again) not in done:
                done.add((action.request_id, again))
                found.setdefault(at, []).append((action.request_id, slot))
    return found


def _waiting(log: StepLog, ended: Mapping[int, int]) -> tuple[int, ...]:
    """Requests in the queue in each step, from the step before which each came, or was ended."""
    change = [0] * (len(log.steps) + 1)
    admitted = {request: at for at, step in reversed([*enumerate(log.steps)]) for request in step.admitted}
    for index, request in enumerate(log.requests):
        left = admitted.get(index, ended.get(index, len(log.steps)))
        change[min(request.came.started, len(log.steps))] += 1
        change[min(left, len(log.steps))] -= 1
    return tuple(accumulate(change[:-1]))
