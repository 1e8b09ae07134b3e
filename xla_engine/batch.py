"""Run a file of requests through an engine: every input line gives exactly one output line.

Lines are read as slots need them and results are written as they come, so a file of any length runs in
bounded memory (beside one short hash per line, which finds duplicate ids). A line that cannot run gives an
error line and harms no other.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO, Protocol

from xla_engine.batch_format import (
    LineError,
    LineRequest,
    error_line,
    line_error,
    output_error,
    parse_line,
    result_line,
)
from xla_engine.errors import EngineClosedError, XlaEngineError
from xla_engine.outputs import RequestOutput
from xla_engine.progress import Tally
from xla_engine.sampling_params import SamplingParams

MAX_LINE_BYTES = 8 * 2**20
COUNTED_BYTES = 256 * 2**20  # a larger file is not read beforehand for its number of lines
SHOWN_ERRORS = 5  # line errors kept for the summary; all of them are in the output file
ORDERED_WINDOW = 16  # ordered output: lines read and not yet written, per request in flight


@dataclass(frozen=True, slots=True)
class Line:
    """One input line: its number from 1, its size in bytes, its bytes, or None when it was too long."""

    number: int
    size: int
    raw: bytes | None


def read_lines(source: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Line]:
    """Yield the non-blank lines of a file. LF and CRLF end a line; a UTF-8 byte order mark may start it.

    A longer line is skipped while it is read: hardly more than `max_line_bytes` of it are ever held.
    """
    number = 0
    while chunk := source.readline(max_line_bytes + 2):
        number += 1
        raw = chunk.removesuffix(b"\n").removesuffix(b"\r")
        if len(raw) > max_line_bytes:
            size = len(chunk)
            while chunk and not chunk.endswith(b"\n"):
                chunk = source.readline(2**16)
                size += len(chunk)
            yield Line(number, size, None)
            continue
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield Line(number, len(raw), raw)


def count_lines(source: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> int | None:
    """How many lines `read_lines` will yield; None for a pipe or a file too large to read twice."""
    if not source.seekable():
        return None
    start = source.tell()
    size = source.seek(0, os.SEEK_END) - start
    source.seek(start)
    if not 0 < size <= COUNTED_BYTES:
        return None
    total = sum(1 for _ in read_lines(source, max_line_bytes))
    source.seek(start)
    return total


class Engine(Protocol):
    """What a batch run needs of `XlaBatchEngine`."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def has_unfinished(self) -> bool: ...
    def submit(
        self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> str: ...
    def step(self, *, only_finished: bool = False) -> list[RequestOutput]: ...
    def abort(self, request_id: str) -> bool: ...


class BatchRun:
    """One pass of lines through an engine into a file.

    At most `2 * max_num_seqs` requests are unfinished in the engine at any time: enough to refill every slot
    at once, few enough to read the file as it is needed. With `ordered`, results wait for those of earlier
    lines, and reading waits while `ORDERED_WINDOW` times as many lines are read and not written.

    engine: an `XlaBatchEngine`; requests others gave it are left alone.
    lines: from `read_lines`.
    sink: open for writing bytes; each line is flushed, so a killed run leaves every finished line behind.
    model: name written into results whose line named none.
    created: Unix seconds written into every result.
    defaults: sampling fields for lines that do not say otherwise.
    fingerprint: of the engine, to be written into every result; None for results without.
    on_turn: called with the tally after every engine step.
    """

    def __init__(
        self,
        engine: Engine,
        lines: Iterable[Line],
        sink: BinaryIO,
        *,
        model: str,
        created: int,
        defaults: Mapping[str, Any] | None = None,
        ordered: bool = False,
        fingerprint: str | None = None,
        on_turn: Callable[[Tally], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self._engine = engine
        self._lines = iter(lines)
        self._sink = sink
        self._model = model
        self._created = created
        self._defaults = dict(defaults or {})
        self._ordered = ordered
        self._fingerprint = fingerprint
        self._on_turn = on_turn
        self._clock = clock
        self._max_in_flight = 2 * engine.max_num_seqs
        self._live: dict[str, LineRequest] = {}  # by engine request id
        self._order: deque[int] = deque()  # ordered output: lines read and not yet written
        self._held: dict[int, bytes] = {}  # ordered output: results waiting for an earlier line
        self._first_use: dict[bytes, int] = {}  # hash of custom_id -> line
        self._exhausted = False

    def run(self) -> Tally:
        """Run until every line has its output, the user interrupts, or the engine dies.

        However it ends, no request of this run stays in the engine and what finished is in the file. An
        interrupted request gets no line: it has no result, and a later run may ask for it again. When the
        engine dies, the requests it held get error lines. Raises OSError when the output cannot be written.
        """
        try:
            while self._fill():
                if self._live:
                    self._turn()
        except KeyboardInterrupt:
            self.tally.interrupted = True
        finally:
            self._abort_live()
        for number in sorted(self._held):  # only after an interrupt: earlier lines will not come
            self._write(self._held.pop(number))
        return self.tally

    def _fill(self) -> bool:
        """Submit lines until enough are in flight; true while there is more to do.

        One call looks at a bounded number of lines, so that a stretch of bad ones does not hold up live rows.
        """
        for _ in range(self._max_in_flight):
            if self._exhausted or len(self._live) >= self._max_in_flight:
                break
            if len(self._order) >= ORDERED_WINDOW * self._max_in_flight:
                break
            try:
                line = next(self._lines, None)
            except OSError as error:
                self.tally.failure, line = error, None
            if line is None:
                self._exhausted = True
            else:
                self._accept(line)
        return bool(self._live) or not self._exhausted

    def _accept(self, line: Line) -> None:
        if self._ordered:
            self._order.append(line.number)
        request = self._read(line)
        if isinstance(request, LineError):
            self._put_error(request)
        else:
            self._submit(request)

    def _read(self, line: Line) -> LineRequest | LineError:
        if line.raw is None:
            message = f"the line has {line.size} bytes, more than the limit; raise --max-line-bytes"
            return line_error(line.number, "line_too_long", message)
        request = parse_line(line.raw, line.number, self._defaults)
        name = blake2b(request.custom_id.encode("utf-8"), digest_size=16).digest()
        first = self._first_use.setdefault(name, line.number)
        if first != line.number and isinstance(request, LineRequest):
            message = f"custom_id {request.custom_id!r} was already used on line {first}; ids must be unique"
            return line_error(line.number, "duplicate_custom_id", message, request.custom_id)
        return request

    def _submit(self, request: LineRequest) -> None:
        request_id = f"batch-{request.line}"  # ids are ours; the caller's is data
        self._live[request_id] = request  # first, so that an interrupt inside submit still aborts it
        try:
            self._engine.submit(request.prompt, request.params, request_id=request_id)
        except EngineClosedError as error:
            self._engine_died(error)
        except Exception as error:  # one bad request harms nobody else
            self._put_error(line_error(request.line, _code(error), _describe(error), request.custom_id))
            del self._live[request_id]

    def _turn(self) -> None:
        """One engine step and its results."""
        try:
            outputs = self._engine.step(only_finished=True)
            if not outputs and not self._engine.has_unfinished:
                raise XlaEngineError("the engine ended without a result for every request")
        except Exception as error:
            self._engine_died(error)
            return
        for output in outputs:
            if output.finished and output.request_id in self._live:
                self._finish(self._live[output.request_id], output)
                del self._live[output.request_id]
        if self._on_turn is not None:
            self._on_turn(self.tally)

    def _finish(self, request: LineRequest, output: RequestOutput) -> None:
        error = output_error(request, output)
        if error is not None:
            self._put_error(error)
            return
        line = result_line(
            request, output, created=self._created, model=self._model, fingerprint=self._fingerprint
        )
        self._put(request.line, line)
        self.tally.ok += 1
        self.tally.prompt_tokens += len(output.prompt_token_ids)
        self.tally.generated_tokens += len(output.outputs[0].token_ids)
        if output.metrics is not None:
            self._note_first_token(output.metrics.first_token_time)
            if output.metrics.ttft is not None:
                self.tally.ttft.add(output.metrics.ttft)
            for seconds in output.metrics.inter_token_latencies:
                self.tally.inter_token.add(seconds)

    def _note_first_token(self, at: float | None) -> None:
        earlier = self.tally.first_token_at
        if at is not None and (earlier is None or at < earlier):
            self.tally.first_token_at = at

    def _engine_died(self, error: Exception) -> None:
        """Stop reading; every request the engine held ends with an error line."""
        self.tally.failure = error
        self._exhausted = True
        for request in self._live.values():
            self._put_error(line_error(request.line, _code(error), _describe(error), request.custom_id))
        self._live.clear()

    def _put_error(self, error: LineError) -> None:
        self._put(error.line, error_line(error))
        self.tally.failed[error.code] += 1
        if len(self.tally.first_errors) < SHOWN_ERRORS:
            self.tally.first_errors.append(error)

    def _put(self, number: int, data: bytes) -> None:
        if not self._ordered:
            self._write(data)
            return
        self._held[number] = data
        while self._order and self._order[0] in self._held:
            self._write(self._held.pop(self._order.popleft()))

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self._sink.flush()

    def _abort_live(self) -> None:
        self.tally.unwritten = len(self._live)
        for request_id in self._live:
            with contextlib.suppress(Exception):  # the run is over already; nothing may hide why
                self._engine.abort(request_id)
        self._live.clear()


def _code(error: Exception) -> str:
    return error.code if isinstance(error, XlaEngineError) else "engine_error"


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, XlaEngineError) else f"{type(error).__name__}: {error}"
