"""`xla-engine run` from an input file to an output file."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from xla_engine.batch.known_engines import elsewhere, recall, remember
from xla_engine.batch.last_run import LastRun
from xla_engine.batch.output_file import Mode, OutputFile, same_file
from xla_engine.batch.results import ResultHeader
from xla_engine.batch.resume import FinishedLines
from xla_engine.batch.run import BatchRun
from xla_engine.batch.totals import RunTotals, summary_lines
from xla_engine.cli import _common
from xla_engine.cli._run.files import silence_stdout
from xla_engine.cli._run.first_line import check_first_line, check_template
from xla_engine.cli._run.shards import ShardOutput
from xla_engine.cli._run.signals import interrupts
from xla_engine.cli._run.tables import TableOptions, TableOutput, open_lines
from xla_engine.cli._run.watched import LiveFiles, Watched
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import OutputError, XlaEngineError
from xla_engine.utils.progress import Progress
from xla_engine.utils.startup import StartTimes

if TYPE_CHECKING:
    from xla_engine.batch.shards.shard import Shard
    from xla_engine.engine.client import EngineClient
    from xla_engine.engine.identity import EngineIdentity

_imported_at = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Paths that `run` reads and writes. errors: None if errors go to the output."""

    source: str
    output: str
    errors: str | None
    watched: Watched
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of `run` other than those of files and engine."""

    defaults: dict[str, Any]
    ordered: bool
    max_line_bytes: int
    created: int | None
    fingerprint: bool
    progress: bool
    drain_timeout_s: float | None
    tables: TableOptions
    shard: Shard | None


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
    if totals.interrupted:
        sys.exit(_common.INTERRUPTED)
    if totals.failed or totals.failure is not None:
        sys.exit(_common.SOME_FAILED)


def _run(files: Files, settings: Settings, engine_options: dict[str, Any]) -> tuple[RunTotals, list[str]]:
    times = StartTimes(_process_start())
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            table = TableOutput.wanted(files.output, settings.tables)
            if table is None and (settings.tables.keep_columns, settings.tables.journal) != (None, None):
                raise OutputError("--keep-columns and --journal are for a table, or a URL, as OUTPUT")
            if table is not None:
                if files.errors is not None:
                    raise OutputError(f"{files.output} has a column for errors; leave out --errors")
                table.check(files.source, files.mode)
                files = replace(files, output=str(table.journal))
            source = stack.enter_context(
                open_lines(
                    files.source,
                    settings.tables,
                    settings.max_line_bytes,
                    count=settings.progress and settings.shard is None,
                    keep=table is not None,
                )
            )
            lines = source.lines if table is None else table.begin(source.lines, settings.defaults)
            if table is not None and table.is_whole(lines, settings.shard):
                return RunTotals(), [f"{table.out} is complete; there is nothing to do"]
            first = next(lines, None)
            if first is None:
                raise _common.NotStarted(f"empty_file: {files.source} holds no request")
            request = check_first_line(first, files.source, engine_options["model"], settings.defaults)
            lines = itertools.chain([first], lines)
            done = FinishedLines()
            shard = ShardOutput(settings.shard, files.output, files.errors, files.mode)
            outputs = [
                stack.enter_context(OutputFile(path, files.mode))
                for path in (files.output, files.errors)
                if path is not None
            ]
            _check_distinct([source.file, *(output.file for output in outputs)], files)
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
            engine = stack.enter_context(
                _common.load_engine(engine_options, show=settings.progress, times=times)
            )
            times.next("first token")
            check_template(request, engine, engine_options["model"])
            header = _header(engine, settings, done, engine_options["model"])
            stack.enter_context(files.watched.logging(engine, lambda name: batch.custom_id(name)))
            sinks = [output.begin() for output in outputs]
        began = time.monotonic()
        screen = sys.stderr if settings.progress else None
        progress = Progress(source.total, slots=engine.max_num_seqs, stream=screen)
        batch = BatchRun(
            engine,
            lines,
            sinks[0],
            errors=sinks[-1],
            header=header,
            defaults=settings.defaults,
            ordered=settings.ordered,
            done=done,
            on_turn=lambda: show(),
        )
        live = files.watched.begin(
            engine, batch.custom_id, lambda: {"draining": batch.draining, **run_state(batch.totals)}
        )
        show = functools.partial(_show, progress, engine, batch.totals, live)
        doing = "finishing the running requests"
        with progress, interrupts(batch.interrupt, doing, settings.drain_timeout_s):
            totals = batch.run()
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
                table.finish(source, settings.shard, failed=bool(done.errors or totals.failed))
    cold_start = None
    if totals.first_token_at is not None:
        cold_start = totals.first_token_at - _process_start()
        times.next("", totals.first_token_at)
    return totals, summary_lines(totals, stats, wall=ended - began, cold_start=cold_start, parts=str(times))


def _check_distinct(opened: list[Any], files: Files) -> None:
    names = [files.source, files.output, files.errors]
    for (first, one), (second, other) in itertools.combinations(zip(names, opened, strict=False), 2):
        if one is not None and same_file(one, other):
            raise OutputError(f"{first} and {second} are the same file; write the results to another")


def _as_recorded(options: dict[str, Any], done: FinishedLines) -> dict[str, Any]:
    """Options of a resumed run. `max_model_len` defaults to the first run's, whose memory or default may have
    differed."""
    made_with = recall(done.system_fingerprint)
    if made_with is None or options["max_model_len"] is not None:
        return options
    return options | {"max_model_len": made_with.config.get("max_model_len")}


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
        return f"on another machine and here, {'; '.join(made_with.differences(identity))}"
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
        progress.show(done=done, tokens=engine.stats().generation_tokens, busy=engine.num_running)
    live.update(force=last)


def _explain(totals: RunTotals, files: Files) -> None:
    """Print what went wrong, before the summary."""
    where = files.errors or files.output
    for error in totals.first_errors:
        click.echo(f"line {error.line}: {error.code}: {error.message}", err=True)
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
        silence_stdout()
    again = "" if files.output == "-" else ", use --resume to continue after them"
    message = f"cannot write {_common.os_message(error, files.output)}; the lines before are complete{again}"
    click.echo(f"Error: {message}", err=True)
    sys.exit(_common.SOME_FAILED)


def _process_start() -> float:
    """Start of this process on the monotonic clock; if the system cannot tell, the import of this module."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return _imported_at
    began = time.monotonic() - age
    return began if 0 <= _imported_at - began < 60 else _imported_at
