"""Run batches: choose the next one, run each in its own thread, and publish its results."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from xla_engine.batch.lines import Line, read_lines
from xla_engine.batch.output_file import Mode, OutputFile
from xla_engine.batch.receipts import ReceiptFile, ReceiptLines, receipts_header
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun, Writer
from xla_engine.batch.totals import RunTotals
from xla_engine.errors import XlaEngineError
from xla_engine.openai.fields import CHAT_URL, COMPLETIONS_URL, MAX_CUSTOM_ID, RESPONSES_URL
from xla_engine.server.batches.engine_view import EngineView
from xla_engine.server.batches.store import (
    UNFINISHED,
    BatchRecord,
    BatchStore,
    FileRecord,
    LineCounts,
    room_on_disk,
)
from xla_engine.server.errors import ApiError
from xla_engine.server.service import Service
from xla_engine.utils.json_line import load_object

RUNNING = 4  # concurrent batches; their lines are interleaved
TICK_S = 0.5
SAVE_S = 5.0  # time between writes of a running batch's counts
EXPIRE_S = 60.0  # time between checks for expired files
RETRY_S = 5.0  # time between attempts to publish results while the disk is full

log = logging.getLogger("xla_engine.server.batches")
SHOWN_PROBLEMS = 50
MAX_MESSAGE = 200  # characters; short, because lists show the problems of up to 100 batches
_ASKED = {COMPLETIONS_URL: "prompt", CHAT_URL: "messages", RESPONSES_URL: "input"}


class Job:
    """A running batch. stopped: read no more lines, because the server closes or the batch was cancelled."""

    def __init__(self, record: BatchRecord, view: EngineView) -> None:
        self.record = record
        self.view = view
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None
        self.saved = time.monotonic()  # when the counts were last written

    def count(self, totals: RunTotals, before: tuple[int, int]) -> None:
        """Update the counts. before: lines with a result and with an error when this run began."""
        counts = self.record.request_counts
        counts.completed = before[0] + totals.ok
        counts.failed = before[1] + totals.failed.total()


class _CountedSink:
    """Writes a result file, and counts its bytes for its tenant. Raises ApiError if there is no room."""

    def __init__(self, sink: Writer, store: BatchStore, file_id: str, tenant: str) -> None:
        self._sink, self._store = sink, store
        self._file_id, self._tenant = file_id, tenant

    def write(self, data: bytes) -> None:
        self._store.stored.add(self._file_id, self._tenant, len(data))
        self._sink.write(data)


class Batches:
    """Runs the batches of a store, with lower priority than interactive requests.

    At most `RUNNING` batches run at a time; the next is taken from the tenant with the fewest running. A killed
    server leaves whole result lines and records of what is unfinished, and the next server runs exactly the lines
    without a result.
    """

    def __init__(self, service: Service, store: BatchStore) -> None:
        self.store = store
        self._service = service
        self._jobs: dict[str, Job] = {}
        # batches whose results could not be published, and when to retry
        self._retry_at: dict[str, float] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Resume unfinished batches. Call it in the engine's event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._supervise())

    def wake(self) -> None:
        """Announce a new batch."""
        self._news.set()

    async def close(self) -> None:
        """Stop at once. Lines in flight get no result, and run again with the next server."""
        if self._task is not None:
            self._task.cancel()
        jobs = list(self._jobs.values())
        for job in jobs:
            job.stopped.set()
            job.view.halted.set()
        for job in jobs:
            if job.thread is not None:
                await asyncio.to_thread(job.thread.join)
        self.store.close()

    def cancel(self, record: BatchRecord) -> None:
        """Cancel a batch. Finished lines keep their results."""
        record.enter("cancelling")
        self._save(record)
        if (job := self._jobs.get(record.id)) is not None:
            job.stopped.set()
            job.view.halted.set()
        self.wake()

    async def _supervise(self) -> None:
        looked = -EXPIRE_S
        while not self._service.refusing:
            while (
                self._service.is_alive and len(self._jobs) < RUNNING and (record := self._next()) is not None
            ):
                self._begin(record)
            if time.monotonic() - looked > EXPIRE_S:
                looked = time.monotonic()
                await asyncio.to_thread(self.store.expire_files, time.time())
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), TICK_S)

    def _next(self) -> BatchRecord | None:
        """The oldest waiting batch of the tenant with the fewest running batches."""
        waiting = [
            record
            for record in self.store.batches.values()
            if record.status in UNFINISHED
            and record.id not in self._jobs
            and time.monotonic() >= self._retry_at.get(record.id, 0.0)
        ]
        tenants = [job.record.tenant for job in self._jobs.values()]
        return min(waiting, key=lambda record: (tenants.count(record.tenant), record.id), default=None)

    def _begin(self, record: BatchRecord) -> None:
        assert self._loop is not None
        view = EngineView(
            self._service, self._loop, shown_name(record), salt=record.tenant, expires_at=record.expires_at
        )
        job = self._jobs[record.id] = Job(record, view)
        if record.status == "cancelling":
            job.stopped.set()
            view.halted.set()
        self._service.batch_jobs.add(record.id)
        job.thread = threading.Thread(target=self._run, args=(job,), name=record.id, daemon=True)
        job.thread.start()

    # -- in the job's thread ----------------------------------------------------------------------------------

    def _run(self, job: Job) -> None:
        record = job.record
        try:
            with room_on_disk():
                over = self._run_to_end(job)
        except Exception as error:
            log.exception("batch %s failed", record.id)
            over = True
            if record.status != "cancelling":
                record.note(_failure(error))
                record.enter("finalizing")
                self._save(record)
        if over:
            self._end(job)
        self._save(record)
        self.store.forget_ended(record.tenant)
        self._jobs.pop(record.id, None)
        self._service.batch_jobs.discard(record.id)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self.wake)

    def _end(self, job: Job) -> None:
        """Publish the results of a batch, however it ended. If the disk is full, it stays unfinished and is
        retried."""
        record = job.record
        try:
            self._finalize(job)
        except OSError as error:
            log.warning("batch %s cannot be finished; trying again in %g s: %s", record.id, RETRY_S, error)
            self._retry_at[record.id] = time.monotonic() + RETRY_S
        else:
            self._retry_at.pop(record.id, None)

    def _save(self, record: BatchRecord) -> None:
        try:
            self.store.save_batch(record)
        except OSError as error:
            log.error("the state of batch %s could not be written: %s", record.id, error)

    def _run_to_end(self, job: Job) -> bool:
        """Validate a batch's file and run its lines. Returns false if the next server has to continue."""
        record, store, settings = job.record, self.store, self._service.settings
        source = store.data_path(record.input_file_id)
        if record.status == "validating":
            total, problems = problems_of(
                source, record.endpoint, self._service.model_names, settings.max_file_lines
            )
            record.request_counts = LineCounts(total=total)
            if problems:
                record.note(*problems)
                return True
            if record.status == "validating":  # not cancelled meanwhile
                record.enter("in_progress")
            store.save_batch(record)
        if record.status in ("in_progress", "cancelling"):
            if not self._run_lines(job):
                return False
            if record.status == "in_progress":
                record.enter("finalizing")
                store.save_batch(record)
        return True

    def _run_lines(self, job: Job) -> bool:
        """Run the lines without a result. Returns whether the batch is over."""
        record, service = job.record, self._service
        done = FinishedLines()
        ids = (record.results_id, record.errors_id)
        with contextlib.ExitStack() as stack:
            for name in record.output_ids:
                self.store.open_file(name)
            paths = [self.store.data_path(name) for name in ids]
            outputs = [stack.enter_context(OutputFile(str(path), Mode.RESUME)) for path in paths]
            for output in outputs:
                output.claim(done)
            before = (done.results, done.errors)
            results, errors = (
                _CountedSink(output.begin(), self.store, name, record.tenant)
                for output, name in zip(outputs, ids, strict=True)
            )
            header, defaults = service.header(created=done.created), service.defaults()
            receipts = None
            if record.receipts_id:
                receipts = ReceiptFile(self.store.data_path(record.receipts_id), Mode.RESUME)
                stack.callback(receipts.close)
                receipts.begin(receipts_header(service.engine, header, defaults), done)
                size = receipts.path.stat().st_size
                self.store.stored.replace(record.receipts_id, record.tenant, size)
            source = stack.enter_context(open(self.store.data_path(record.input_file_id), "rb"))
            run = BatchRun(
                job.view,
                self._until_stopped(job, read_lines(source)),
                results,
                errors=errors,
                receipts=None
                if receipts is None
                else ReceiptLines(
                    _CountedSink(receipts, self.store, record.receipts_id, record.tenant).write
                ).add,
                header=header,
                defaults=defaults,
                done=done,
                on_turn=lambda: self._show(job, run.totals, before),
            )
            totals = run.run()
            is_over = record.status == "cancelling" or not totals.interrupted
            if receipts is not None and is_over and totals.failure is None:
                receipts.finish()
        job.count(totals, before)
        if totals.failure is not None:
            raise totals.failure
        return is_over

    def _until_stopped(self, job: Job, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines until the job is stopped or the server drains; `BatchRun` then finishes the lines in flight."""
        for line in lines:
            if job.stopped.is_set() or self._service.refusing:
                raise KeyboardInterrupt
            yield line

    def _show(self, job: Job, totals: RunTotals, before: tuple[int, int]) -> None:
        job.count(totals, before)
        if time.monotonic() - job.saved >= SAVE_S:
            job.saved = time.monotonic()
            self.store.save_batch(job.record)

    def _finalize(self, job: Job) -> None:
        """Publish the files that are not empty. Idempotent, because the next server may repeat it."""
        record, store = job.record, self.store
        store.count_results(record)
        shown: list[str | None] = []
        for file_id, word in zip(record.output_ids, ("output", "error", "receipts"), strict=False):
            path = store.data_path(file_id)
            if path.exists() and (size := path.stat().st_size):
                if file_id not in store.files or store.files[file_id].bytes != size:
                    results = FileRecord(
                        id=file_id,
                        filename=f"{record.id}_{word}.jsonl",
                        purpose="batch_output",
                        tenant=record.tenant,
                        expires_at=record.output_expiry(),
                    )
                    store.finish_file(results)
                shown.append(file_id)
            else:
                store.delete_file(file_id)
                shown.append(None)
        record.output_file_id, record.error_file_id, record.receipts_file_id = (*shown, None)[:3]
        if record.status == "cancelling":
            record.enter("cancelled")
        elif record.errors is not None:
            record.enter("failed")
        else:
            record.enter("expired" if job.view.expired else "completed")


def shown_name(record: BatchRecord) -> str:
    """The name of a batch's requests in `/v1/requests`, which shows the requests of all keys."""
    return f"batch-{blake2b(record.id.encode(), digest_size=6).hexdigest()}"


def _failure(error: Exception) -> dict[str, Any]:
    """The error of a batch that ended early, as clients see it."""
    if isinstance(error, ApiError | XlaEngineError):
        return {"code": error.code, "message": str(error)}
    return {"code": "internal_error", "message": f"{type(error).__name__}: {error}"}


def problems_of(
    path: Path, endpoint: str, model_names: Sequence[str], max_lines: int
) -> tuple[int, list[Any]]:
    """The number of lines in a file, and its problems: code, message, line and field of each.

    Only the envelope is checked here. A line's parameters are checked when it runs, and may fail it alone.
    """
    names: dict[str, int] = {}
    found: list[Any] = []
    total = 0
    with open(path, "rb") as file:
        for line in read_lines(file):
            total += 1
            if total > max_lines:
                message = f"the file has more than {max_lines} lines; send it in parts"
                return total, [_problem("too_many_tasks", message, None)]
            found += _problems_of_line(line, endpoint, model_names, names)
            if len(found) >= SHOWN_PROBLEMS:
                break
    if not total:
        found.append(_problem("empty_file", "the file contains no request", None))
    return total, found[:SHOWN_PROBLEMS]


def _problems_of_line(
    line: Line, endpoint: str, model_names: Sequence[str], names: dict[str, int]
) -> Iterator[Any]:
    number = line.number
    if line.raw is None:
        yield _problem("line_too_long", f"the line has {line.size} bytes", number)
        return
    try:
        record = load_object(line.raw)
    except ValueError as error:
        yield _problem("invalid_json_line", f"the line is not valid JSON: {error}", number)
        return
    name = record.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_CUSTOM_ID:
        message = f"custom_id must be text of 1 to {MAX_CUSTOM_ID} characters"
        yield _problem("missing_required_parameter", message, number, "custom_id")
    elif (first := names.setdefault(name, number)) != number:
        yield _problem("duplicate_custom_id", f"{name!r} was used on line {first}", number, "custom_id")
    if record.get("method", "POST") != "POST":
        yield _problem("invalid_method", 'method must be "POST"', number, "method")
    if record.get("url") != endpoint:
        message = f"url is {record.get('url')!r}, and the batch's endpoint {endpoint}"
        yield _problem("mismatched_endpoint", message, number, "url")
    body, asked = record.get("body"), _ASKED.get(endpoint)
    if not isinstance(body, dict):
        yield _problem("missing_required_parameter", "body must be an object", number, "body")
        return
    if isinstance(model := body.get("model"), str) and model not in model_names:
        message = f"model {model!r} is not supported here; this server has {', '.join(model_names)}"
        yield _problem("model_not_found", message, number, "body.model")
    if body.get("stream"):
        yield _problem(
            "streaming_unsupported", "streaming is not supported in batches", number, "body.stream"
        )
    if asked is not None and asked not in body:
        yield _problem("missing_required_parameter", f"the body has no {asked}", number, f"body.{asked}")


def _problem(code: str, message: str, line: int | None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "message": message[:MAX_MESSAGE], "line": line, "param": param}
