"""Step logs: what a scheduler was asked, planned and got back, with times; one JSON line per event.

`xla-engine run --record` writes one while it runs, a simulation writes the same, and `timeline` and `simulate` read
them. Unlike the records of `xla_engine.record` a step log has no prompts and no tokens, only how many, and it is
written as it happens, in bounded memory.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from scheduler import FinishReason, Plan, Request, Swap, TokenEvent
from xla_engine.errors import RecordError

if TYPE_CHECKING:
    from xla_engine.engine import XlaBatchEngine

PIECE, PIECES = 16, 1 << 16  # tokens of a piece of a prompt, and how many of these are remembered
FORMAT, VERSION = "xla-engine step log", 1


class Moment(NamedTuple):
    """How many steps had been started, and how many read."""

    started: int
    read: int


@dataclass(slots=True, kw_only=True)
class LoggedRequest:
    """One request. Times in seconds since the log began.

    came: when it was submitted. like: an earlier request, and how many tokens both prompts begin with; None if none is
        known. What a prompt has in common with the answer to an earlier one is not known.
    end: why it ended, None if it did not. over: when. taken_back: the same where the caller, or its time, ended it;
        None where a token did. tokens: new tokens it had then.
    """

    name: str
    prompt_tokens: int
    max_tokens: int
    priority: int
    lockstep: bool
    submitted: float
    came: Moment
    like: tuple[int, int] | None = None
    end: str | None = None
    ended: float | None = None
    over: Moment | None = None
    taken_back: Moment | None = None
    tokens: int = 0


@dataclass(slots=True, kw_only=True)
class LoggedStep:
    """One step. Requests are indices into `StepLog.requests`.

    started: when it was dispatched. read: when its tokens were there, None if nobody read it.
    read_after: how many steps had been started by then.
    admitted: requests that got a slot. chunks: (request, slot, start, length, whether it ends the prompt).
    decode: the slots that decoded. parks, resumes: (request, slot, KV entries) that went to the host or came back.
    reuses: (request, slot, source, KV entries) of prompts that were taken from what slots held.
    """

    started: float
    admitted: tuple[int, ...]
    chunks: tuple[tuple[int, int, int, int, bool], ...]
    decode: tuple[int, ...]
    parks: tuple[tuple[int, int, int], ...] = ()
    resumes: tuple[tuple[int, int, int], ...] = ()
    reuses: tuple[tuple[int, int, int, int], ...] = ()
    read: float | None = None
    read_after: int = 0


@dataclass(slots=True, kw_only=True)
class StepLog:
    """A whole log. scheduler: fields of `SchedulerConfig`. engine: what else shapes a step, see `describe_engine`."""

    scheduler: Mapping[str, Any]
    engine: Mapping[str, Any]
    requests: list[LoggedRequest] = field(default_factory=list)
    steps: list[LoggedStep] = field(default_factory=list)


class _Prefixes:
    """Finds the earlier prompt that begins as a new one does, by hashes of its pieces and then token by token."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[int, tuple[int, Sequence[int]]] = OrderedDict()

    def add(self, number: int, prompt: Sequence[int]) -> tuple[int, int] | None:
        """Enter a prompt; returns the number of the latest that has most of it, and how many tokens that is."""
        found: tuple[int, Sequence[int]] | None = None
        same, chain, unbroken = 0, 0, True
        for start in range(0, len(prompt) - PIECE + 1, PIECE):
            chain = hash((chain, *prompt[start : start + PIECE]))
            held = self._pieces.get(chain)
            unbroken = unbroken and held is not None
            if unbroken:
                found, same = held, start + PIECE
            self._pieces[chain] = number, prompt
            self._pieces.move_to_end(chain)
        while len(self._pieces) > PIECES:
            self._pieces.popitem(last=False)
        if found is None:
            return None
        other, tokens = found
        while same < min(len(prompt), len(tokens)) and prompt[same] == tokens[same]:
            same += 1
        return other, same


class StepLogWriter:
    """Writes a log line by line. Times are seconds on any clock; the log counts from `began` on it."""

    def __init__(
        self, file: TextIO, *, scheduler: Mapping[str, Any], engine: Mapping[str, Any], began: float
    ) -> None:
        self._file = file
        self._began = began
        self._numbers: dict[str, int] = {}  # of live requests
        self._tokens: dict[str, int] = {}  # same keys: tokens credited
        self._prefixes = _Prefixes()
        self._count = 0
        self._first: int | None = None  # the log's step 0, in the scheduler's count
        self._decode: tuple[Any, ...] = ()
        self._slots: tuple[int, ...] = ()
        head = {"format": FORMAT, "version": VERSION, "scheduler": dict(scheduler), "engine": dict(engine)}
        self._write(head)

    def submitted(self, request: Request, now: float) -> None:
        """A request was queued."""
        self._numbers[request.request_id], self._tokens[request.request_id] = self._count, 0
        self._count += 1
        line: dict[str, Any] = {
            "submit": [request.request_id, len(request.prompt_token_ids), request.max_tokens]
        }
        if (like := self._prefixes.add(self._count - 1, request.prompt_token_ids)) is not None:
            line["like"] = like
        if request.priority:
            line["priority"] = request.priority
        if request.lockstep:
            line["lockstep"] = True
        self._write({**line, "at": self._at(now)})

    def started(self, plan: Plan, now: float) -> None:
        """A step was dispatched."""
        if plan.decode is not self._decode:
            self._decode, before = plan.decode, self._slots
            self._slots = tuple(row.slot.index for row in plan.decode)
            leave, join = delta(before, self._slots)
        else:
            leave, join = [], []
        self._first = plan.step if self._first is None else self._first
        line = {
            "step": plan.step - self._first,
            "at": self._at(now),
            "admit": [self._numbers[name] for name in plan.admitted],
            "chunks": [
                [
                    self._numbers[chunk.request_id],
                    chunk.slot.index,
                    chunk.start,
                    len(chunk.tokens),
                    int(chunk.is_last),
                ]
                for chunk in plan.chunks
            ],
            "park": [self._swap(swap) for swap in plan.parks],
            "resume": [self._swap(swap) for swap in plan.resumes],
            "reuse": [
                [self._numbers[reuse.request_id], reuse.slot.index, reuse.source, reuse.length]
                for reuse in plan.reuses
            ],
            "leave": leave,
            "join": join,
        }
        self._write({name: value for name, value in line.items() if value != []})

    def _swap(self, swap: Swap) -> list[int]:
        return [self._numbers[swap.request_id], swap.slot.index, swap.length]

    def read(self, plan: Plan, events: list[TokenEvent], now: float) -> None:
        """The tokens of a step were credited."""
        tokens, ends = self._tokens, []
        for name, _, reason in events:
            tokens[name] += 1
            if reason is not None:
                ends.append([self._numbers.pop(name), str(reason), tokens.pop(name)])
        line: dict[str, Any] = {"read": plan.step - (self._first or 0), "at": self._at(now)}
        self._write({**line, "end": ends} if ends else line)

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """A request was ended by its caller or by its time; not news if a token ended it."""
        if request_id in self._numbers:
            number, tokens = self._numbers.pop(request_id), self._tokens.pop(request_id)
            self._write({"end": [[number, str(reason), tokens]], "at": self._at(now)})

    def _at(self, now: float) -> float:
        return round(now - self._began, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


@contextlib.contextmanager
def logging_steps(engine: XlaBatchEngine, path: Path | str) -> Iterator[None]:
    """Write everything an idle engine does inside the block to `path`. Raises OSError.

    The log begins with slots that are not known to hold anything, so that it says all that its plans follow from.
    """
    engine.reset_prefix_cache()
    with open(path, "w", encoding="utf-8") as file:
        writer = StepLogWriter(
            file,
            scheduler=asdict(engine.scheduler.config),
            engine=describe_engine(engine),
            began=time.monotonic(),
        )

        def on_step(plan: Plan, events: list[TokenEvent] | None) -> None:
            if events is None:
                writer.started(plan, time.monotonic())
            else:
                writer.read(plan, events, time.monotonic())

        engine.on_step = on_step
        engine.on_submit = lambda request: writer.submitted(request, time.monotonic())
        engine.on_end = lambda request_id, reason: writer.ended(request_id, reason, time.monotonic())
        try:
            yield
        finally:
            engine.on_step = engine.on_submit = engine.on_end = None


def describe_engine(engine: XlaBatchEngine) -> dict[str, Any]:
    """What shapes the cost of a step beside the plan: sizes of the programs, and for people model and device."""
    directory = engine.checkpoint.path
    return {
        "model": Path(directory).name,
        "dtype": engine.checkpoint.dtype,
        "max_model_len": engine.max_model_len,
        "lag": engine.lag,
        "slot_bytes": engine.runner.cache_bytes // engine.config.device_rows,
        "kv_bytes_per_token": engine.runner.kv_bytes_per_token,
        "prefill_lanes": list(engine.runner.lane_choices),
        "key_buckets": list(engine.runner.bucket_choices),
        **engine.runner.platform,
    }


def read_step_log(path: Path | str) -> StepLog:
    """Read a log; a last line that was cut off is left out. Raises RecordError and OSError."""
    with open(path, encoding="utf-8") as file:
        try:
            return _read(file)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RecordError(f"{path}: damaged step log: {why}") from error


def is_step_log(path: Path | str) -> bool:
    """Whether a file begins as a step log does. Raises OSError."""
    with open(path, "rb") as file:
        return f'"format":"{FORMAT}"'.encode() in file.readline(4096)


def _read(file: TextIO) -> StepLog:
    head = json.loads(file.readline())
    if head["format"] != FORMAT or head["version"] != VERSION:
        raise ValueError(
            f"format {head['format']!r} version {head['version']}; this version reads {FORMAT!r} {VERSION}"
        )
    log = StepLog(scheduler=dict(head["scheduler"]), engine=dict(head["engine"]))
    reads = 0
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
                    lockstep=bool(line.get("lockstep", False)),
                    submitted=at,
                    came=Moment(len(log.steps), reads),
                    like=_like(line, len(log.requests)),
                )
            )
        elif "step" in line:
            if line["step"] != len(log.steps):
                raise ValueError(f"line {number}: step {line['step']} where {len(log.steps)} was due")
            for slot in line.get("leave", ()):
                del decode[slot]
            decode.update(dict.fromkeys(line.get("join", ())))
            log.steps.append(_step(line, at, tuple(decode), log))
        else:
            if "read" in line:
                step = log.steps[line["read"]]
                step.read, step.read_after = at, len(log.steps)
                reads += 1
            for index, reason, tokens in line.get("end", ()):
                request = log.requests[index]
                request.end, request.ended, request.tokens = str(reason), at, int(tokens)
                request.over = Moment(len(log.steps), reads)
                if "read" not in line:
                    request.taken_back = request.over
    return log


def _like(line: Mapping[str, Any], number: int) -> tuple[int, int] | None:
    if "like" not in line:
        return None
    other, tokens = line["like"]
    if not 0 <= other < number or tokens < 1:
        raise ValueError(f"request {number} is like {other} in {tokens} tokens")
    return int(other), int(tokens)


def _step(line: Mapping[str, Any], at: float, decode: tuple[int, ...], log: StepLog) -> LoggedStep:
    admitted = tuple(int(request) for request in line.get("admit", ()))
    chunks = tuple(
        (int(request), int(slot), int(start), int(length), bool(last))
        for request, slot, start, length, last in line.get("chunks", ())
    )
    parks, resumes = (
        tuple((int(request), int(slot), int(length)) for request, slot, length in line.get(name, ()))
        for name in ("park", "resume")
    )
    reuses = tuple(
        (int(request), int(slot), int(source), int(length))
        for request, slot, source, length in line.get("reuse", ())
    )
    for request in (*admitted, *(part[0] for part in (*chunks, *parks, *resumes, *reuses))):
        log.requests[request]  # raises IndexError for one that was never submitted
    return LoggedStep(
        started=at,
        admitted=admitted,
        chunks=chunks,
        decode=decode,
        parks=parks,
        resumes=resumes,
        reuses=reuses,
    )


def delta(before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[int]]:
    """(leave, join): drop the slots of `leave` from `before` and append those of `join` to get `after`."""
    kept = 0
    leave = []
    for slot in before:
        if kept < len(after) and after[kept] == slot:
            kept += 1
        else:
            leave.append(slot)
    return leave, list(after[kept:])
