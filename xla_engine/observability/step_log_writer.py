"""Write step logs of an engine or a simulation; `xla_engine.observability.step_log` describes their content."""

import bisect
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from xla_engine.observability.observer import Observer
from xla_engine.observability.step_log import FORMAT, VERSION, delta, parts_of
from xla_engine.scheduler import Events, FinishReason, Plan, Request
from xla_engine.utils.new_file import naming

SHORTEST = 16  # a shorter common prefix is logged only if it is a whole block, or if the prompts are equal
REMEMBERED = 1 << 20  # tokens of the latest prompts

_Entry = tuple[tuple[str | int, ...], int]  # salt and tokens of a prompt, and its number


class _Prefixes:
    """Finds the earlier prompt with the longest common prefix with a new one.

    The two are neighbours in lexicographic order.

    The common prefix of any two prompts follows from these pairs, as the shorter of those that each shares with a
    third. shortest: a shorter common prefix is reported only for equal prompts.
    """

    def __init__(self, shortest: int = SHORTEST) -> None:
        self._shortest = shortest
        self._sorted: list[_Entry] = []
        self._by_age: deque[_Entry] = deque()
        self._tokens = 0

    def add(self, number: int, prompt: Sequence[int], salt: str = "") -> tuple[int, int] | None:
        """Add a prompt; returns the number of the earlier one with the longest common prefix, and its length.

        Prompts with different salts share nothing.
        """
        entry: _Entry = (salt, *prompt), number
        at = bisect.bisect(self._sorted, entry)
        neighbours = self._sorted[max(at - 1, 0) : at + 1]
        same, equal, other = max(
            ((_common(entry[0], each), each == entry[0], earlier) for each, earlier in neighbours),
            default=(0, False, 0),
        )
        same -= 1  # the salt
        self._sorted.insert(at, entry)
        self._by_age.append(entry)
        self._tokens += len(prompt)
        while self._tokens > REMEMBERED:
            oldest = self._by_age.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
            self._tokens -= len(oldest[0]) - 1
        return (other, same) if equal or same >= self._shortest else None


def _common(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Lines(Protocol):
    """Takes lines of text."""

    def write(self, text: str, /) -> object: ...


class _UntilFull:
    """A file that takes lines until one cannot be written. failure: that error."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.failure: OSError | None = None

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def close(self) -> None:
        self.flush()
        with contextlib.suppress(OSError):  # of a line that was lost
            self._file.close()

    def _try(self, act: Callable[[], object]) -> None:
        if self.failure is None:
            try:
                act()
            except OSError as error:
                self.failure = error


class StepLogWriter:
    """Writes a log line by line. Times are seconds on any clock; the log counts from `began` on it."""

    def __init__(
        self, file: Lines, *, scheduler: Mapping[str, Any], engine: Mapping[str, Any], began: float
    ) -> None:
        self._file = file
        self._began = began
        self._numbers: dict[str, int] = {}  # of live requests
        self._tokens: dict[str, int] = {}  # same keys: tokens credited
        self._prefixes = _Prefixes(min(SHORTEST, scheduler.get("block_size", SHORTEST)))
        self._count = 0
        self._first: int | None = None  # the scheduler's number of the log's step 0
        self._decode: tuple[Any, ...] = ()
        self._slots: tuple[int, ...] = ()
        head = {"format": FORMAT, "version": VERSION, "scheduler": dict(scheduler), "engine": dict(engine)}
        self._write(head)

    def submitted(self, request: Request, now: float, custom_id: str | None = None) -> None:
        """Log a queued request. custom_id: the caller's name for it, if any."""
        self._numbers[request.request_id], self._tokens[request.request_id] = self._count, 0
        self._count += 1
        most = request.max_cached_tokens
        line = {
            "submit": [request.request_id, len(request.prompt_token_ids), request.max_tokens],
            "like": self._prefixes.add(self._count - 1, request.content, request.group),
            "custom_id": custom_id,
            "priority": request.priority or None,
            "lockstep": request.constrained or None,
            "reads_prefix_cache": False if most == 0 else None,  # the field's form since the first logs
            "max_cached_tokens": most or None,
            "at": self._at(now),
        }
        self._write({name: value for name, value in line.items() if value is not None})

    def started(self, plan: Plan, now: float) -> None:
        """Log a dispatched step."""
        if plan.decode is not self._decode:
            self._decode, before = plan.decode, self._slots
            self._slots = tuple(row.slot.index for row in plan.decode)
            leave, join = delta(before, self._slots)
        else:
            leave, join = [], []
        self._first = plan.step if self._first is None else self._first
        self._tokens.update(dict.fromkeys(plan.moves.replays, 0))  # their tokens are generated again
        parts = parts_of(plan, self._numbers.__getitem__)
        line = {
            "step": plan.step - self._first,
            "at": self._at(now),
            "admit": [self._numbers[name] for name in plan.admitted],
            "chunks": [(*chunk, int(is_last)) for *chunk, is_last in parts["chunks"]],
            "park": parts["parks"],
            "resume": parts["resumes"],
            "reuse": parts["reuses"],
            "copy": [[copy.source, copy.target] for copy in plan.moves.copies],
            "leave": leave,
            "join": join,
            "verify": parts["verify"],
            "held": sorted(self._numbers[name] for name in plan.blocked),
            "late": plan.is_late or [],
        }
        line = {name: value for name, value in line.items() if value != []}
        self._write({**line, "width": plan.width} if plan.width else line)

    def read(self, plan: Plan, events: Events, now: float) -> None:
        """Log a step whose tokens were credited."""
        tokens, ends = self._tokens, []
        for name, _, reason in events:
            tokens[name] += 1
            if reason is not None:
                ends.append([self._numbers.pop(name), str(reason), tokens.pop(name)])
        line: dict[str, Any] = {"read": plan.step - (self._first or 0), "at": self._at(now)}
        if events.verified:
            line["verified"] = events.verified
        self._write({**line, "end": ends} if ends else line)

    def phases(self, step: int, nanoseconds: Sequence[int], now: float) -> None:
        """Log the host's time for a step that was read; see `LoggedStep`."""
        self._write({"phases": [step - (self._first or 0), *nanoseconds], "at": self._at(now)})

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Log a request that its caller or a deadline ended; does nothing if a token ended it."""
        if request_id in self._numbers:
            number, tokens = self._numbers.pop(request_id), self._tokens.pop(request_id)
            self._write({"end": [[number, str(reason), tokens]], "at": self._at(now)})

    def _at(self, now: float) -> float:
        return round(now - self._began, 6)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")


@contextlib.contextmanager
def logging_steps(
    engine: Any, path: Path | str, *, names: Callable[[str], str | None] = lambda request_id: None
) -> Iterator[None]:
    """Log everything that an idle engine does within the context to `path`. Raises OSError.

    engine: an `XlaBatchEngine`. names: returns the custom_id of an engine request, or None.

    Clears the prefix cache first, so that the log alone determines the plans. If the disk becomes full, the engine
    goes on without the log, and the end of the context raises the OSError.
    """
    engine.reset_prefix_cache()
    with naming(path):
        log = _UntilFull(open(path, "w", encoding="utf-8"))  # noqa: SIM115  closed below
        writer = StepLogWriter(
            log,
            scheduler=asdict(engine.scheduler.config),
            engine=describe_engine(engine),
            began=time.monotonic(),
        )
        log.flush()
        if log.failure is not None:
            log.close()
            raise log.failure

    observer = Observer(
        queued=lambda request: writer.submitted(request, time.monotonic(), names(request.request_id)),
        started=lambda plan: writer.started(plan, time.monotonic()),
        read=lambda plan, events: writer.read(plan, events, time.monotonic()),
        ended=lambda request_id, reason: writer.ended(request_id, reason, time.monotonic()),
    )
    timer = engine.phase_timer
    if timer is not None:
        timer.on_step = lambda step, spent: writer.phases(step, spent, time.monotonic())
    try:
        with engine.observers.having(observer):
            yield
    finally:
        if timer is not None:
            timer.on_step = None
        log.close()
    if log.failure is not None:
        with naming(path):
            raise log.failure


def describe_engine(engine: Any) -> dict[str, Any]:
    """Properties other than the plan on which the cost of a step depends: program sizes, model and device."""
    directory = engine.checkpoint.path
    return {
        "model": Path(directory).name,
        "dtype": engine.checkpoint.dtype,
        "max_model_len": engine.max_model_len,
        "lag": engine.lag,
        "slot_bytes": engine.runner.cache_bytes // engine.config.device_rows,
        "kv_bytes_per_token": engine.runner.kv_bytes_per_token,
        "prefill_lanes": list(engine.runner.sizes.lanes),
        "key_buckets": list(engine.runner.sizes.keys),
        **engine.runner.platform,
    }
