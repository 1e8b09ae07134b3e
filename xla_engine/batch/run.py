"""Run a file of requests through an engine. Every input line gets exactly one output line.

Lines are read as slots become free and results are written as they finish, so a file of any length runs in bounded
memory (except for about 30 bytes a line, which detect duplicate ids). A line that cannot run gets an error line and
does not affect other lines.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from xla_engine.batch.lines import Line, LineReader
from xla_engine.batch.receipts import Answered
from xla_engine.batch.record_ids import line_digest, record_id, salt_of
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.submit import reads_pictures, ready_prompt, submit_prompt, whole_request
from xla_engine.batch.totals import RunTotals
from xla_engine.engine.protocol import LineEngine
from xla_engine.errors import EngineClosedError, ResumeError, XlaEngineError
from xla_engine.openai.requests import LineError, LineRequest, explain, line_error
from xla_engine.openai.results import (
    ResultHeader,
    asked_for,
    error_line,
    output_error,
    result_line,
)
from xla_engine.outputs import RequestOutput

SHOWN_ERRORS = 5  # line errors shown in the summary; the output file has all of them
READERS = 32  # threads that wait for pictures, so that slow hosts do not stop the others
READ_S = 0.1  # seconds to wait for pictures while nothing else runs
ORDERED_WINDOW = 16  # ordered output: lines read but not yet written, per request in flight


class Writer(Protocol):
    """Takes whole lines and writes each at once, so that a killed run keeps every finished line."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(slots=True)
class _Job:
    """A line in flight: its request, the id of its output line, the results of its prompts so far, and its bytes."""

    request: LineRequest
    name: str
    outputs: list[RequestOutput | None]
    raw: bytes | None


class BatchRun:
    """Runs lines through an engine and writes their results.

    At most `2 * max_num_seqs` lines are in flight: enough to refill all slots at once, while the file is still read
    lazily. With `ordered`, results wait for those of earlier lines, and reading pauses while `ORDERED_WINDOW` times
    as many lines are read but not written.

    engine: an `XlaBatchEngine`; requests from other callers are left alone.
    lines: from `read_lines`.
    sink: takes output lines. errors: takes error lines; None writes them to `sink`. receipts: takes each answer
        before its line is written.
    header: the fields that all results share.
    defaults: sampling fields for lines that do not set them.
    done: lines that an earlier run finished, which are skipped.
    on_turn: called after every engine step.
    draining: whether the run has been interrupted and reads no more lines.
    """

    def __init__(
        self,
        engine: LineEngine,
        lines: Iterable[Line],
        sink: Writer,
        *,
        header: ResultHeader,
        errors: Writer | None = None,
        receipts: Callable[[Answered], object] | None = None,
        defaults: Mapping[str, Any] | None = None,
        ordered: bool = False,
        done: FinishedLines | None = None,
        on_turn: Callable[[], object] | None = None,
    ) -> None:
        self.totals = RunTotals()
        self._engine = engine
        self._lines = iter(lines)
        self._sink = sink
        self._errors = sink if errors is None else errors
        self._receipts = receipts
        self._header = header
        self._reader = LineReader(defaults)
        self._salt = salt_of(defaults)
        self._ordered = ordered
        self._done = FinishedLines() if done is None else done
        self._on_turn = on_turn
        self._max_in_flight = 2 * engine.max_num_seqs
        self._live: dict[str, tuple[_Job, int]] = {}  # by engine request id: the job and which of its prompts
        self._jobs: dict[int, _Job] = {}  # by line
        self._order: deque[int] = deque()  # ordered output: lines read but not yet written
        # ordered output: results waiting for an earlier line
        self._held: dict[int, tuple[Writer, bytes, Callable[[], object] | None]] = {}
        self._pictures: dict[str, Future[Any]] = {}  # prompts whose pictures are being read
        self._readers = ThreadPoolExecutor(
            READERS, thread_name_prefix="pictures"
        )  # starts no thread until then
        self._exhausted = self._reading = self.draining = False

    def run(self) -> RunTotals:
        """Run until every line has its output, the user interrupts, or the engine fails.

        In each case no request of this run stays in the engine, and all finished lines are written (with `ordered`,
        up to the first unfinished line). An interrupted request gets no line, so a later run can repeat it. If the
        engine fails, its requests get error lines. Raises OSError if the output cannot be written.
        """
        try:
            while self._fill():
                if self._live:
                    self._turn()
        except KeyboardInterrupt:
            self.totals.interrupted = True
        finally:
            self._readers.shutdown(wait=False, cancel_futures=True)
            self._abort_live()
        return self.totals

    def interrupt(self) -> None:
        """For a signal handler: stop reading and finish the lines in flight; the second call stops at once."""
        if self.draining or self._reading:
            raise KeyboardInterrupt
        self.draining = True

    def custom_id(self, request_id: str) -> str | None:
        """The custom_id of an engine request of this run."""
        job, _ = self._live.get(whole_request(request_id), (None, 0))
        return None if job is None else job.request.custom_id

    def _fill(self) -> bool:
        """Submit lines until enough are in flight. Returns true while there is more to do.

        A call reads a bounded number of lines, so that a run of bad lines does not delay live requests.
        """
        self._submit_read()
        for _ in range(self._max_in_flight):
            if self._exhausted or len(self._jobs) >= self._max_in_flight:
                break
            if len(self._order) >= ORDERED_WINDOW * self._max_in_flight:
                break
            if (line := self._next_line()) is None:
                self._exhausted = True
            else:
                self._accept(line)
        return bool(self._live) or not self._exhausted

    def _next_line(self) -> Line | None:
        try:
            self._reading = True
            if self.draining:  # checked here, because interrupts are caught here
                raise KeyboardInterrupt
            line = next(self._lines, None)
        except KeyboardInterrupt:
            self.draining = self.totals.interrupted = True
            return None
        except OSError as error:
            self.totals.failure = error
            return None
        finally:
            self._reading = False
        if line is None and self.totals.resumed < len(self._done):
            self.totals.failure = ResumeError(
                f"the output has {len(self._done) - self.totals.resumed} lines of an input that was longer"
            )
        return line

    def _accept(self, line: Line) -> None:
        digest = line_digest(line.raw, line.size, self._salt)
        request = self._reader.read(line)
        if self._is_done(line.number, digest) or self._exhausted:
            return
        if self._ordered:
            self._order.append(line.number)
        if isinstance(request, LineError):
            self._put_error(request, record_id(line.number, digest), line.raw)
        else:
            name = record_id(line.number, digest)
            self._submit(_Job(request, name, [None] * len(request.prompts), line.raw))

    def _is_done(self, number: int, digest: int) -> bool:
        """Whether an earlier run finished the line. Ends this run if that run had a different input."""
        known = self._done.digest(number)
        if known is not None and known != digest:
            message = f"line {number} or the sampling defaults differ from those of the output"
        elif known is None and self._ordered and number < self._done.ordered_from:
            message = (
                f"line {number} has no output, but later lines do: the file was not written with --ordered"
            )
        else:
            self.totals.resumed += known is not None
            return known is not None
        self.totals.failure, self._exhausted = ResumeError(message), True
        return False

    def _submit(self, job: _Job) -> None:
        request = job.request
        self._jobs[request.line] = job
        for index, prompt in enumerate(request.prompts):
            # The engine's id is ours; the custom_id is only data. Register it before submit, so that an interrupt
            # during submit still aborts the request.
            request_id = f"batch-{request.line}" + (f"-{index}" if index else "")
            self._live[request_id] = (job, index)
            if reads_pictures(prompt):
                self._pictures[request_id] = self._readers.submit(ready_prompt, self._engine, prompt)
            elif not self._queue(request_id):
                return

    def _submit_read(self) -> None:
        """Submit the prompts whose pictures have been read."""
        for request_id, ready in list(self._pictures.items()):
            if not ready.done():
                continue
            del self._pictures[request_id]
            if request_id in self._live:  # else another prompt of its line has failed
                self._queue(request_id, ready)

    def _queue(self, request_id: str, ready: Future[Any] | None = None) -> bool:
        """Submit a prompt. Returns false if its line has failed. ready: the prompt with its pictures, if any."""
        job, index = self._live[request_id]
        prompt, refused = job.request.prompts[index], partial(self._refused, request_id)
        try:
            made = None if ready is None else ready.result()
            submit_prompt(self._engine, job.request, prompt, request_id, refused, ready=made)
        except EngineClosedError as error:
            self._engine_died(error)
        except Exception as error:  # a bad request fails alone
            self._refused(request_id, error)
        return request_id in self._live

    def _refused(self, request_id: str, error: Exception) -> None:
        """Fail a line after the engine rejects one of its prompts, in `submit` or later."""
        job, _ = self._live.pop(request_id, (None, 0))
        if job is not None:
            self._fail(job, line_error(job.request.line, *explain(error), job.request.custom_id))

    def _turn(self) -> None:
        """Run one engine step and take its results; or wait for pictures, if there is nothing else."""
        if self._pictures and not self._live.keys() - self._pictures.keys():
            wait(self._pictures.values(), READ_S, FIRST_COMPLETED)
            return
        try:
            outputs = self._engine.step(only_finished=True)
            if self._live and not outputs and not self._engine.has_unfinished:
                raise XlaEngineError("the engine ended without a result for every request")
        except Exception as error:
            self._engine_died(error)
            return
        for output in outputs:
            if output.finished and output.request_id in self._live:
                self._take(output)
        if self._on_turn is not None:
            self._on_turn()

    def _take(self, output: RequestOutput) -> None:
        """Take the result of one prompt of a line."""
        job, index = self._live[output.request_id]
        if (error := output_error(job.request, output)) is not None:
            del self._live[output.request_id]
            self._fail(job, error)
            return
        job.outputs[index] = asked_for(job.request, output)
        if all(job.outputs):
            self._finish(job, [done for done in job.outputs if done is not None])
        del self._live[output.request_id]  # last, so that an interrupt leaves no line half finished

    def _finish(self, job: _Job, outputs: list[RequestOutput]) -> None:
        request = job.request
        answer = result_line(request, outputs, job.name, self._header)
        self._put(request.line, self._sink, answer, self._receipt(job.raw, request, answer, outputs))
        del self._jobs[job.request.line]
        self.totals.ok += 1
        for output in outputs:
            self.totals.count(
                output,
                default_limit=job.request.default_limit,
                default_sampling=job.request.default_sampling,
            )

    def _fail(self, job: _Job, error: LineError) -> None:
        """Fail a line, and abort its other prompts."""
        for request_id in [name for name, (other, _) in self._live.items() if other is job]:
            with contextlib.suppress(Exception):
                self._engine.abort(request_id)
            del self._live[request_id]
        self._put_error(error, job.name, job.raw)
        del self._jobs[job.request.line]

    def _engine_died(self, error: Exception) -> None:
        """Stop reading, and write an error line for every request in the engine."""
        self.totals.failure = error
        self._exhausted = True
        self._live.clear()
        self._pictures.clear()
        for job in list(self._jobs.values()):
            line, custom_id = job.request.line, job.request.custom_id
            self._fail(job, line_error(line, *explain(error), custom_id))

    def _put_error(self, error: LineError, name: str, raw: bytes | None) -> None:
        answer = error_line(error, name)
        self._put(error.line, self._errors, answer, self._receipt(raw, error, answer, (), error.code))
        self.totals.failed[error.code] += 1
        if len(self.totals.first_errors) < SHOWN_ERRORS:
            self.totals.first_errors.append(error)

    def _receipt(
        self,
        raw: bytes | None,
        of: LineRequest | LineError,
        answer: bytes,
        outputs: Sequence[RequestOutput],
        error: str | None = None,
    ) -> Callable[[], object] | None:
        """Writes the receipt of an answer; None without receipts."""
        if self._receipts is None:
            return None
        return partial(self._receipts, Answered(raw, of.line, of.custom_id, answer, outputs, error))

    def _put(self, number: int, writer: Writer, data: bytes, receipt: Callable[[], object] | None) -> None:
        if not self._ordered:
            self._write(writer, data, receipt)
            return
        self._held[number] = (writer, data, receipt)
        while self._order and self._order[0] in self._held:
            self._write(*self._held.pop(self._order.popleft()))

    def _write(self, writer: Writer, data: bytes, receipt: Callable[[], object] | None) -> None:
        if receipt is not None:
            receipt()
        writer.write(data)
        self.totals.written += 1

    def _abort_live(self) -> None:
        self.totals.unwritten = len(self._jobs) + len(self._held)
        for request_id in self._live:
            with contextlib.suppress(Exception):  # the run is over; do not hide the reason
                self._engine.abort(request_id)
        self._live.clear()
        self._jobs.clear()
