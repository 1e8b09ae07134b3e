"""Step logs: a scheduler's requests, plans and results with times; one JSON line per event.

`xla-engine run --step-log` and `simulate --step-log` write them while they run, `timeline` and `simulate` read them.
Unlike the records of `xla_engine.equivalence.record`, a step log has only the numbers of tokens, not prompts and
tokens, and it is written continuously in bounded memory.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from xla_engine.errors import RecordError
from xla_engine.scheduler import Continuation, Plan, Swap
from xla_engine.utils.html import Bar, picture

FORMAT, VERSION = "xla-engine step log", 1
COLOURS = {"prefill": "#e8833a", "decode": "#4c78c8"}  # as in a timeline


class Moment(NamedTuple):
    """A point in a run: the numbers of steps started, of steps read, and of requests ended."""

    started: int
    read: int
    ended: int = 0


@dataclass(slots=True, kw_only=True)
class LoggedRequest:
    """One request. Times in seconds since the log began.

    name: the engine's id.
    prompt_tokens: length of its prompt.
    max_tokens, priority, constrained, max_cached_tokens: as in `Request`.
    submitted: when it was submitted. came: the same in steps.
    like: an earlier request, and the length of the common prefix of both prompts; None if none is known. Prefixes
        shared with answers are not known.
    custom_id: the caller's name for it; None if unknown.
    end: the finish reason; None if it did not end.
    ended: time of the end. over: the same in steps.
    taken_back: as `over`, if its caller, its deadline or its text ended it; None if a token did.
    tokens: new tokens at its end; after a preemption that restarted it, only those since.
    """

    name: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    constrained: bool
    max_cached_tokens: int | None
    submitted: float
    came: Moment
    like: tuple[int, int] | None = None
    custom_id: str | None = None
    end: str | None = None
    ended: float | None = None
    over: Moment | None = None
    taken_back: Moment | None = None
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class LoggedStep:
    """One step. Requests are indices into `StepLog.requests`.

    started: when it was dispatched.
    admitted: requests that got a slot.
    chunks: (request, slot, start, length, whether it ends the prompt).
    decode: the slots that decoded.
    parks: (request, slot, KV entries) moved to the host.
    resumes: (request, slot, KV entries) moved back.
    reuses: (request, slot, source, KV entries) of prefixes reused from slots.
    copies: (source, target) of copied blocks.
    width: as in `Plan`.
    verify: (request, slot, width) of rows that may have sampled several tokens.
    verified: for each of these, the number of sampled tokens and of drafts; empty until the step is read.
    held: requests that skipped the step because their masks were not ready. is_late: as in `Plan`.
    read: when its tokens were on the host; None if they were never read.
    read_after: number of steps started by then.
    phases: nanoseconds of the host's time, in the order of `xla_engine.observability.phases.PHASES`; None if not
        measured.
    """

    started: float
    admitted: tuple[int, ...]
    chunks: tuple[tuple[int, int, int, int, bool], ...]
    decode: tuple[int, ...]
    parks: tuple[tuple[int, int, int], ...] = ()
    resumes: tuple[tuple[int, int, int], ...] = ()
    reuses: tuple[tuple[int, int, int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    width: int = 0
    verify: tuple[tuple[int, int, int], ...] = ()
    verified: tuple[tuple[int, int], ...] = ()
    held: tuple[int, ...] = ()
    is_late: bool = False
    read: float | None = None
    read_after: int = 0
    phases: tuple[int, ...] | None = None


@dataclass(slots=True, kw_only=True)
class StepLog:
    """A step log as read from a file.

    scheduler: fields of `SchedulerConfig`. engine: other properties that affect steps; see `describe_engine`.
    """

    scheduler: Mapping[str, Any]
    engine: Mapping[str, Any]
    requests: list[LoggedRequest] = field(default_factory=list)
    steps: list[LoggedStep] = field(default_factory=list)

    @property
    def speculated(self) -> list[LoggedStep] | None:
        """All steps if some of them may have sampled several tokens for a row; else None."""
        return self.steps if any(step.width for step in self.steps) else None

    def _repr_html_(self) -> str:
        """A picture of slots by steps for notebooks; `xla-engine timeline` draws a larger one."""
        slots = int(self.scheduler["max_num_seqs"])
        caption = (
            f"{len(self.requests)} requests, {len(self.steps)} steps of {slots} slots: prefill, then decode"
        )
        return picture(_bars(self), lanes=slots, steps=len(self.steps), caption=caption)


def read_step_log(path: Path | str) -> StepLog:
    """Read a log; an incomplete last line is ignored. Raises RecordError and OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            return _read(file)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RecordError(f"{path}: damaged step log: {why}") from error


def is_step_log(path: Path | str) -> bool:
    """Whether a file begins like a step log. Raises OSError."""
    with open(path, "rb") as file:
        return f'"format":"{FORMAT}"'.encode() in file.readline(4096)


def _read(file: TextIO) -> StepLog:
    head = json.loads(file.readline())
    if head["format"] != FORMAT or head["version"] != VERSION:
        raise ValueError(
            f"format {head['format']!r} version {head['version']}; this version reads {FORMAT!r} {VERSION}"
        )
    log = StepLog(scheduler=dict(head["scheduler"]), engine=dict(head["engine"]))
    reads = ends = 0
    decode: dict[int, None] = {}  # slots, in the order of joining
    for number, text in enumerate(file, 2):
        if not text.endswith("\n"):
            break
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
        at = float(line["at"])
        if "submit" in line:
            name, prompt_tokens, max_tokens = line["submit"]
            if not isinstance(name, str):
                raise ValueError(f"line {number}: a request is named {name!r:.60}")
            log.requests.append(
                LoggedRequest(
                    name=name,
                    prompt_tokens=int(prompt_tokens),
                    max_tokens=int(max_tokens),
                    priority=int(line.get("priority", 0)),
                    constrained=bool(line.get("lockstep", False)),
                    max_cached_tokens=_max_cached_tokens(line),
                    submitted=at,
                    came=Moment(len(log.steps), reads, ends),
                    like=_like(line, len(log.requests)),
                    custom_id=_custom_id(line),
                )
            )
        elif "step" in line:
            if line["step"] != len(log.steps):
                raise ValueError(f"line {number}: step {line['step']} in place of {len(log.steps)}")
            for slot in line.get("leave", ()):
                del decode[slot]
            decode.update(dict.fromkeys(line.get("join", ())))
            log.steps.append(_step(line, at, tuple(decode), log))
        else:
            if "read" in line:
                step = log.steps[line["read"]]
                step.read, step.read_after = at, len(log.steps)
                step.verified = _rows(line, "verified", int, int)
                if len(step.verified) != len(step.verify):
                    raise ValueError(f"line {number}: {len(step.verify)} rows, {len(step.verified)} verified")
                reads += 1
            if "phases" in line:
                number_read, *spent = line["phases"]
                log.steps[number_read].phases = tuple(int(part) for part in spent)
            for index, reason, tokens in line.get("end", ()):
                request = log.requests[index]
                request.end, request.ended, request.tokens = str(reason), at, int(tokens)
                request.over = Moment(len(log.steps), reads, ends)
                ends += 1
                if "read" not in line:
                    request.taken_back = request.over
    return log


def _custom_id(line: Mapping[str, Any]) -> str | None:
    name = line.get("custom_id")
    if not isinstance(name, str | None):
        raise ValueError(f"a custom_id is a string, not {name!r:.60}")
    return name


def _max_cached_tokens(line: Mapping[str, Any]) -> int | None:
    most = line.get("max_cached_tokens")
    if not line.get("reads_prefix_cache", True):
        return 0
    return None if most is None else int(most)


def _like(line: Mapping[str, Any], number: int) -> tuple[int, int] | None:
    if "like" not in line:
        return None
    other, tokens = line["like"]
    if not 0 <= other < number or tokens < 1:
        raise ValueError(f"request {number} is like {other} in {tokens} tokens")
    return int(other), int(tokens)


def _step(line: Mapping[str, Any], at: float, decode: tuple[int, ...], log: StepLog) -> LoggedStep:
    admitted, held = (tuple(map(int, line.get(name, ()))) for name in ("admit", "held"))
    chunks = _rows(line, "chunks", int, int, int, int, bool)
    parks, resumes, verify = (_rows(line, name, int, int, int) for name in ("park", "resume", "verify"))
    reuses, copies = _rows(line, "reuse", int, int, int, int), _rows(line, "copy", int, int)
    for request in (*admitted, *held, *(part[0] for part in (*chunks, *parks, *resumes, *reuses, *verify))):
        log.requests[request]  # raises IndexError for one that was never submitted
    return LoggedStep(
        started=at,
        admitted=admitted,
        chunks=chunks,
        decode=decode,
        parks=parks,
        resumes=resumes,
        reuses=reuses,
        copies=copies,
        width=int(line.get("width", 0)),
        verify=verify,
        held=held,
        is_late=bool(line.get("late", False)),
    )


def _rows(line: Mapping[str, Any], name: str, *kinds: Callable[[Any], int]) -> tuple[tuple[Any, ...], ...]:
    """A list of rows with values of these kinds, by default none."""
    return tuple(
        tuple(kind(value) for kind, value in zip(kinds, row, strict=True)) for row in line.get(name, ())
    )


def _bars(log: StepLog) -> list[Bar]:
    """The activity of each slot; consecutive steps of one kind are one bar."""
    holders: dict[int, int] = {}
    latest: dict[int, Bar] = {}
    done: list[Bar] = []
    for number, step in enumerate(log.steps):
        chunks = {slot: request for request, slot, *_ in step.chunks}
        holders |= {slot: request for request, slot, _ in step.resumes} | chunks
        decode = (*step.decode, *(slot for _, slot, _ in step.verify))
        for slot, kind in (dict.fromkeys(decode, "decode") | dict.fromkeys(chunks, "prefill")).items():
            request = log.requests[holders[slot]]
            about = (
                f"{request.name}: {kind}, {request.prompt_tokens} prompt tokens, {request.end or 'not ended'}"
            )
            bar = latest.get(slot)
            if bar is not None and (bar.last, bar.about) == (number - 1, about):
                latest[slot] = bar._replace(last=number)
            else:
                done += [] if bar is None else [bar]
                latest[slot] = Bar(slot, number, number, COLOURS[kind], request.name, about)
    return [*done, *latest.values()]


def parts_of(plan: Plan, who: Callable[[str], Any]) -> dict[str, list[tuple[Any, ...]]]:
    """What a plan does, by the names of `LoggedStep`'s fields. who: what stands for a request."""

    def swaps(parts: Iterable[Swap | Continuation]) -> list[tuple[Any, ...]]:
        return [(who(part.request_id), part.slot.index, part.length) for part in parts]

    return {
        "chunks": [
            (who(chunk.request_id), chunk.slot.index, chunk.start, len(chunk.tokens), chunk.is_last)
            for chunk in plan.chunks
        ],
        "parks": swaps(plan.moves.parks),
        "resumes": swaps((*plan.moves.resumes, *plan.moves.continues)),
        "reuses": [
            (who(reuse.request_id), reuse.slot.index, reuse.source, reuse.length)
            for reuse in plan.moves.reuses
        ],
        "verify": [(who(row.request_id), row.slot.index, row.width) for row in plan.verify],
    }


def delta(before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
    """(leave, join): remove the slots `leave` from `before` and append `join` to get `after`."""
    kept = 0
    leave = []
    for slot in before:
        if kept < len(after) and after[kept] == slot:
            kept += 1
        else:
            leave.append(slot)
    return leave, list(after[kept:])
