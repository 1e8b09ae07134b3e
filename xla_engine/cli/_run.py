"""The modes of `xla-engine run`: from an input file to an output file, a stream over pipes, or a dry run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import click

import xla_engine
from xla_engine.batch.datasets.answers import AnswerColumns
from xla_engine.batch.datasets.files import is_table
from xla_engine.batch.datasets.output import answer_cell
from xla_engine.batch.earlier_runs import LastRun, elsewhere, recall, remember
from xla_engine.batch.output_file import Mode, OutputFile, same_file
from xla_engine.batch.receipts import ReceiptFile, ReceiptLines, receipts_header, whole_line
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.shards import Shard, ShardOutput
from xla_engine.batch.signatures import Signer
from xla_engine.batch.stream import EventStream
from xla_engine.batch.totals import RunTotals, summary_lines
from xla_engine.cli import _common
from xla_engine.cli._input import (
    Pooled,
    TableOutput,
    check_first_line,
    check_template,
    open_input,
    open_lines,
)
from xla_engine.cli._table_options import TableOptions
from xla_engine.config import AUTO, EngineConfig
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import OutputError, XlaEngineError
from xla_engine.observability.status_file import LiveFile, status_file
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.openai.requests import LineError
from xla_engine.openai.results import ResultHeader
from xla_engine.utils.progress import Progress
from xla_engine.utils.startup import StartTimes

if TYPE_CHECKING:
    from xla_engine.engine.identity import EngineIdentity
    from xla_engine.open_engine import EngineClient

Names = Callable[[str], str | None]  # custom_id by engine request id
_ASKED = (signal.SIGINT, signal.SIGTERM)
_BOOT_S = 1.0  # an interpreter starts in less, unless the machine is very busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Paths of the files that show the state of a run; None disables a file."""

    status_path: str | None = None
    metrics_path: str | None = None
    step_log_path: str | None = None

    @contextlib.contextmanager
    def logging(self, engine: EngineClient, names: Names) -> Iterator[None]:
        """Write the step log while the block runs, or until the disk is full. Raises OSError and ConfigError."""
        if self.step_log_path is None:
            yield
            return
        from xla_engine.engine.batch_engine import XlaBatchEngine

        assert isinstance(engine, XlaBatchEngine)  # `run` rejects a step log with data parallelism
        ended = False
        try:
            with logging_steps(engine, self.step_log_path, names=names):
                yield
                ended = True
        except OSError as error:
            if not ended:
                raise
            click.echo(f"the step log could not be written: {_common.os_message(error)}", err=True)

    def begin(self, engine: EngineClient, names: Names, run: Callable[[], Mapping[str, Any]]) -> LiveFiles:
        """Create the files that are updated repeatedly, and write each once. run: returns the run's own counts."""
        files: dict[str, LiveFile] = {}
        if self.status_path is not None:
            files["status"] = status_file(self.status_path, engine, names=names, run=run)
        if self.metrics_path is not None:
            files["metrics"] = LiveFile(self.metrics_path, lambda: engine.metrics_text().encode())
        with _common.startup_errors():
            for file in files.values():
                file.write()
        return LiveFiles(files)


class LiveFiles:
    """Status and metrics files of a run, by kind."""

    def __init__(self, files: Mapping[str, LiveFile]) -> None:
        self._files = files

    def update(self, *, force: bool = False) -> None:
        """Write the files that are due, or all with `force`."""
        for file in self._files.values():
            file.update(force=force)

    def report_failures(self) -> None:
        for what, file in self._files.items():
            if file.failure is not None:
                click.echo(
                    f"the {what} file could not be written: {_common.os_message(file.failure)}", err=True
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Paths that `run` reads and writes. errors: None if errors go to the output. receipts: None for no receipts.

    sign: the file of the private key that signs them; None leaves them unsigned.
    """

    source: str
    output: str
    errors: str | None
    mode: Mode
    receipts: str | None = None
    sign: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of `run` that are not the engine's. defaults: sampling fields and others, as in `parse_line`."""

    defaults: dict[str, Any]
    tables: TableOptions
    watched: Watched
    ordered: bool
    max_line_bytes: int
    created: int | None
    fingerprint: bool
    no_progress: bool
    drain_timeout_s: float | None
    shard: Shard | None
    encoding: str | None
    answers: AnswerColumns | None


def run_file(files: Files, settings: Settings, engine_options: dict[str, Any]) -> None:
    """Run every line and exit with the command's status."""
    try:
        totals, summary = _run(files, settings, engine_options)
    except OSError as error:
        _output_failed(files, error)
    except OutputError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(_common.SOME_FAILED)
    _explain(totals, files)
    for text in summary:
        click.echo(text, err=True)
    _exit(totals)


def _exit(totals: RunTotals) -> None:
    """Exit with the command's status, unless all lines have results."""
    if totals.interrupted:
        sys.exit(_common.INTERRUPTED)
    if totals.failed or totals.failed_before or totals.failure is not None:
        sys.exit(_common.SOME_FAILED)


def _run(files: Files, settings: Settings, engine_options: dict[str, Any]) -> tuple[RunTotals, list[str]]:
    times, shows = StartTimes(_process_start()), not settings.no_progress
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            pooled = _pooled(files.source, settings, engine_options)
            task = None if pooled is None else pooled.task
            table = TableOutput.wanted(files.output, settings.tables, settings.answers, task)
            if table is not None and pooled is not None and files.receipts is not None:
                raise OutputError("a table of vectors or scores has no receipts; leave out --receipts")
            if table is None and (
                (settings.tables.keep_columns, settings.tables.journal) != (None, None) or settings.answers
            ):
                raise OutputError(
                    "--keep-columns, --json-columns and --journal are for a table, or a URL, as OUTPUT"
                )
            if table is not None:
                if files.errors is not None:
                    raise OutputError(f"{files.output} has a column for errors; leave out --errors")
                table.check(files.source, files.mode)
                files = replace(files, output=str(table.journal))
            receipts, rows = None, table is not None and table.has_rows
            if files.receipts is not None:
                signer = None if files.sign is None else Signer.read(files.sign)
                receipts = ReceiptFile(Path(files.receipts), files.mode, signer)
            source = stack.enter_context(
                open_lines(
                    files.source,
                    settings.tables,
                    settings.max_line_bytes,
                    count=shows and settings.shard is None,
                    keep=table is not None,
                    encoding=settings.encoding,
                    pooled=pooled,
                )
            )
            lines = source.lines if table is None else table.begin(source, settings.defaults)
            if table is not None and table.is_whole(lines, settings.shard):
                if receipts is not None and not receipts.is_finished():
                    raise OutputError(
                        f"{table.out} is complete, and was written without {receipts.path}; run again with --overwrite"
                    )
                return RunTotals(), [f"{table.out} is complete; there is nothing to do"]
            request, lines = check_first_line(lines, files.source, engine_options["model"], settings.defaults)
            done = FinishedLines()
            shard = ShardOutput(settings.shard, files.output, files.errors, files.mode)
            outputs = [
                stack.enter_context(OutputFile(path, files.mode))
                for path in (files.output, files.errors)
                if path is not None
            ]
            _check_distinct([source.file, *(output.file for output in outputs)], files)
            if receipts is not None:
                published = None if table is None else table.out
                receipts.check((files.source, files.output, files.errors, published))
            for output in outputs:
                output.claim(done)
            lines = shard.begin(lines, settings.defaults)
            if (first := next(lines, None)) is None and not len(done):
                for output in outputs:
                    output.begin()
                    output.close()
                shard.finish(done, RunTotals(), None)
                if table is not None:
                    table.journal.touch()
                    table.finish(source, settings.shard, failed=False)
                return RunTotals(), [f"shard {settings.shard} has none of the input's lines"]
            lines = itertools.chain([] if first is None else [first], lines)
            engine_options = _as_recorded(engine_options, done)
            engine = stack.enter_context(_common.load_engine(engine_options, show=shows, times=times))
            times.next("first token")
            check_template(request, engine, engine_options["model"])
            header = _header(engine, settings, done, engine_options["model"])
            stack.enter_context(settings.watched.logging(engine, lambda name: batch.custom_id(name)))
            sinks = [output.begin() for output in outputs]
            if receipts is not None:
                stack.callback(receipts.close)
                receipts.begin(receipts_header(engine, header, settings.defaults, table=rows), done)
        began = time.monotonic()
        progress = Progress(
            source.total, slots=engine.max_num_seqs, before=len(done), stream=sys.stderr if shows else None
        )
        batch = BatchRun(
            engine,
            lines,
            sinks[0],
            errors=sinks[-1],
            receipts=None
            if receipts is None
            else ReceiptLines(receipts.write, answer_cell if rows else whole_line).add,
            header=header,
            defaults=settings.defaults,
            ordered=settings.ordered,
            done=done,
            on_turn=lambda: show(),
        )
        live = settings.watched.begin(
            engine, batch.custom_id, lambda: {"draining": batch.draining, **run_state(batch.totals)}
        )
        show = functools.partial(_show, progress, engine, batch.totals, live)
        doing = "finishing the running requests"
        with progress, interrupts(batch.interrupt, doing, settings.drain_timeout_s):
            totals = batch.run()
            totals.failed_before = done.errors
            show(last=True)
        live.report_failures()
        ended = time.monotonic()
        stats = engine.stats()
        if totals.failure is None and not totals.interrupted:
            LastRun(
                answers=totals.finish_reasons.total(),
                generated_tokens=totals.generated_tokens,
                seconds=ended - began,
            ).keep(engine_options["model"] or embedded_model_directory())
            for output in outputs:
                output.close()
            shard.finish(done, totals, header.system_fingerprint)
            if table is not None:
                table.finish(source, settings.shard, receipts, failed=bool(done.errors or totals.failed))
            elif receipts is not None:
                receipts.finish()
    cold_start = None
    if totals.first_token_at is not None:
        cold_start = totals.first_token_at - _process_start()
        times.next("", totals.first_token_at)
    return totals, summary_lines(totals, stats, wall=ended - began, cold_start=cold_start, parts=str(times))


def _pooled(source: str, settings: Settings, options: dict[str, Any]) -> Pooled | None:
    """How rows of the input become requests, if it is a table and the model pools."""
    if not is_table(source) and not settings.tables.asks_for_columns:
        return None
    model = _common.check_model(options, EngineConfig(**_common.config_fields(options)))
    return Pooled.of(model, settings.tables, settings.defaults)


def _check_distinct(opened: list[Any], files: Files) -> None:
    names = [files.source, files.output, files.errors]
    for (first, one), (second, other) in itertools.combinations(zip(names, opened, strict=False), 2):
        if one is not None and same_file(one, other):
            raise OutputError(f"{first} and {second} are the same file; write the results to another")


def _as_recorded(options: dict[str, Any], done: FinishedLines) -> dict[str, Any]:
    """Options of a resumed run. `max_model_len` and the form of the weights default to the first run's, whose memory
    or defaults may have differed."""
    if (made_with := recall(done.system_fingerprint)) is None:
        return options
    recorded = {}
    if options["max_model_len"] is None:
        recorded["max_model_len"] = made_with.config.get("max_model_len")
    if options["quantization"] == AUTO:
        recorded["quantization"] = made_with.config.get("quantization")
    return options | recorded


def _header(engine: EngineClient, settings: Settings, done: FinishedLines, model: str | None) -> ResultHeader:
    """The header of all results. A resumed run keeps the first run's."""
    identity = engine.identity()
    digest = identity.digest()
    remember(identity)
    if done.system_fingerprint not in (None, digest, identity.digest(with_devices=True)):
        raise OutputError(
            f"the output was made with engine {done.system_fingerprint}, this one is {digest}: "
            f"{_differences(identity, done.system_fingerprint)}. Resume with the same, or use another file"
        )
    created = next(time for time in (settings.created, done.created, int(time.time())) if time is not None)
    return ResultHeader(
        created=created,
        model="embedded" if model is None else Path(model).resolve().name,
        system_fingerprint=done.system_fingerprint or digest,
        hashes=settings.fingerprint,
        tokenizer=engine.tokenizer,
        labels=engine.validator.labels,
    )


def _differences(identity: EngineIdentity, digest: str | None) -> str:
    """What tells an engine from the one of this digest."""
    if (made_with := recall(digest)) is not None:
        return f"then and now, {'; '.join(made_with.differences(identity))}"
    if (made_with := elsewhere(digest, identity)) is not None:
        found = f"on another machine and here, {'; '.join(made_with.differences(identity))}"
        form = made_with.config.get("quantization")
        same = form == identity.config.get("quantization")
        return found if same else f"{found}; add --quantization {form or 'none'}"
    here = ", ".join(f"{name} {word}" for name, word in identity.platform.items())
    return f"another model, option, version or device (it did not run on this machine: {here})"


def run_state(totals: RunTotals) -> dict[str, Any]:
    """The totals of a run as JSON values, for its status file."""
    state = {name: getattr(totals, name) for name in ("ok", "resumed", "prompt_tokens", "generated_tokens")}
    return {**state, "failed": dict(totals.failed), "interrupted": totals.interrupted}


def _show(
    progress: Progress, engine: EngineClient, totals: RunTotals, live: LiveFiles, *, last: bool = False
) -> None:
    if last or progress.due:
        done = totals.done + totals.resumed
        tokens = totals.prompt_tokens if totals.only_pooled else engine.stats().generation_tokens
        progress.show(done=done, tokens=tokens, busy=engine.num_running)
    live.update(force=last)


def _explain(totals: RunTotals, files: Files) -> None:
    """Print what went wrong, before the summary."""
    where = files.errors or files.output
    for error in totals.first_errors:
        click.echo(_told(error), err=True)
    if (more := totals.failed.total() - len(totals.first_errors)) > 0:
        click.echo(f"... and {more} more lines with an error in {where}", err=True)
    explain_failure(totals.failure)
    if totals.interrupted:
        click.echo(
            f"interrupted: {totals.written} results are written; {totals.unwritten} running requests and the lines "
            f"not read yet have none",
            err=True,
        )
    if (totals.interrupted or totals.failure is not None) and files.output != "-":
        click.echo("to continue, run the same command with --resume", err=True)


def explain_failure(failure: Exception | None) -> None:
    """Print why a run ended early, with a traceback if the error is unexpected."""
    if failure is None:
        return
    if not isinstance(failure, (XlaEngineError, OSError)):
        click.echo("".join(traceback.format_exception(failure)), err=True, nl=False)
    click.echo(f"stopped early: {type(failure).__name__}: {failure}", err=True)


def _output_failed(files: Files, error: OSError) -> NoReturn:
    if "-" in (files.output, files.errors):
        _common.silence_stdout()
    again = "" if files.output == "-" else ", use --resume to continue after them"
    message = f"cannot write {_common.os_message(error, files.output)}; the lines before are complete{again}"
    click.echo(f"Error: {message}", err=True)
    sys.exit(_common.SOME_FAILED)


def _process_start() -> float:
    """Start of this program on the monotonic clock: of the process, or the first import of the package if the process
    ran something else before (`pip install ... && xla-engine` is one process in many shells), or the system cannot
    tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return xla_engine.IMPORTED_AT
    began = time.monotonic() - age
    return began if 0 <= xla_engine.IMPORTED_AT - began < _BOOT_S else xla_engine.IMPORTED_AT


def _own_stdin() -> BinaryIO:
    """A separate file for standard input that is never closed: a thread may still read from it at exit."""
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # not a real file
        return sys.stdin.buffer


def run_stream(source: str, settings: Settings, options: dict[str, Any]) -> None:
    """Run until the input ends; exit with the command's status."""
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            file = _own_stdin() if source == "-" else stack.enter_context(open_input(source))
            engine = stack.enter_context(_common.load_engine(options, show=True))
            stack.enter_context(settings.watched.logging(engine, lambda name: stream.custom_id(name)))
        stream = EventStream(
            engine,
            file,
            sys.stdout.buffer,
            defaults=settings.defaults,
            max_line_bytes=settings.max_line_bytes,
            keep_finished=options.get("keep_finished", 0),
            on_turn=lambda: live.update(),
        )
        live = settings.watched.begin(engine, stream.custom_id, lambda: run_state(stream.totals))
        with interrupts(stream.interrupt, "finishing the running requests", settings.drain_timeout_s):
            totals = stream.run()
        live.update(force=True)
        live.report_failures()
    if isinstance(totals.failure, BrokenPipeError):
        _common.silence_stdout()
        click.echo(f"the reader has disconnected; {totals.unwritten} requests were aborted", err=True)
    else:
        explain_failure(totals.failure)
    _exit(totals)


def dry_run(source: str, settings: Settings, options: dict[str, Any]) -> None:
    """Print errors with line numbers and an estimate of tokens; exit with the command's status."""
    with _common.startup_errors():
        from xla_engine.batch.dry_run import DryRun

        fields = _common.config_fields(options)
        model = options["model"] or embedded_model_directory()
        checks = DryRun(model, EngineConfig(**fields), options.get("files"))
        _common.resume_collections()
        with open_lines(
            source,
            settings.tables,
            settings.max_line_bytes,
            encoding=settings.encoding,
            pooled=_pooled(source, settings, options),
        ) as opened:
            _, lines = check_first_line(opened.lines, source, options["model"], settings.defaults)
            report = checks.run(
                lines, defaults=settings.defaults, on_error=lambda error: click.echo(_told(error))
            )
    for text in report.lines():
        click.echo(text)
    if report.failed:
        sys.exit(_common.SOME_FAILED)


def _told(error: LineError) -> str:
    return f"line {error.line}: {error.code}: {error.message}"


@contextlib.contextmanager
def interrupts(
    interrupt: Callable[[], None], doing: str, drain_timeout_s: float | None = None
) -> Iterator[None]:
    """Call `interrupt` on each signal, and print `doing` after the first one. Main thread only.

    After the second one, signals have their default effect, so that a third ends the process in any case.

    drain_timeout_s: seconds after SIGTERM at which `interrupt` is called again; None disables this.
    """
    asked = 0

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # straight to the terminal: the streams may be in use
            os.write(2, f"\n{text}\n".encode())

    def handle(number: int, _: Any) -> None:
        nonlocal asked
        asked += 1
        if number == signal.SIGALRM:
            say(f"not finished after {drain_timeout_s} s; cancelling the rest")
        elif asked == 1:
            say(f"{doing}; a second signal stops at once")
            if number == signal.SIGTERM and drain_timeout_s is not None:
                signal.setitimer(signal.ITIMER_REAL, max(drain_timeout_s, 1e-6))
        if asked > 1:
            for each in _ASKED:
                signal.signal(each, signal.SIG_DFL)
        interrupt()

    before: dict[signal.Signals, Any] = {}
    try:
        with contextlib.suppress(ValueError):
            for number in (*_ASKED, *(() if drain_timeout_s is None else (signal.SIGALRM,))):
                before[number] = signal.signal(number, handle)
        yield
    finally:
        if drain_timeout_s is not None and before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
