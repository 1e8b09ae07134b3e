"""The command line: `xla-engine run | graphs | verify | replay | shrink | compare`.

jax and the engine are imported inside the commands, so that help and a wrong option answer at once.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import stat
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import click

from xla_engine import __version__
from xla_engine.batch import MAX_LINE_BYTES, BatchRun, count_lines, read_lines
from xla_engine.errors import XlaEngineError
from xla_engine.fingerprint import EngineIdentity, compare_files
from xla_engine.progress import Progress, Tally, counting, summary_lines
from xla_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from xla_engine.engine import XlaBatchEngine
    from xla_engine.record import Record

SOME_FAILED, NOT_STARTED, INTERRUPTED = 1, 2, 130  # exit statuses beside 0

_imported_at = time.monotonic()


class NotStarted(click.ClickException):
    """Nothing ran; the message says why."""

    exit_code = NOT_STARTED


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C has an exit status of its own; click's is 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="xla-engine")
def main() -> None:
    """Batch engine for language models on JAX/XLA: the same bits, whatever the batch.

    \b
    xla-engine run examples/requests.jsonl -o out.jsonl

    Without --model the small model that ships with the package is used; it writes Python. Each command
    explains itself with --help.
    """


def model_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every command that loads a model: the directory and `EngineConfig` fields."""
    options = (
        click.option(
            "--model", metavar="DIR", help="Hugging Face model directory.  [default: embedded model]"
        ),
        click.option("--max-num-seqs", type=click.IntRange(1), default=16, help="Requests decoded together."),
        click.option(
            "--max-model-len",
            type=click.IntRange(2),
            help="Prompt plus generated tokens of a request at most.  [default: the model's, at most 2048]",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["auto", "bfloat16", "float32"]),
            default="auto",
            help="Type of weights and activations; auto is the checkpoint's.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@main.command(short_help="Complete a file of requests.", context_settings={"show_default": True})
@click.argument("input_path", metavar="INPUT")
@click.option("-o", "--output", "output_path", metavar="OUTPUT", required=True, help="Results file, or -.")
@model_options
@click.option(
    "--lag",
    type=click.IntRange(0, 1),
    default=1,
    help="1: the host reads a step while the device computes the next; 0: one by one.",
)
@click.option("--seed", type=int, default=0, help="Randomness of requests that bring no seed of their own.")
@click.option("--max-tokens", type=int, help="max_tokens of lines without one.  [default: 16]")
@click.option("--temperature", type=float, help="temperature of lines without one.  [default: 1.0]")
@click.option("--ordered", is_flag=True, help="Write results in the order of the input, not as they finish.")
@click.option(
    "--max-line-bytes", type=click.IntRange(1), default=MAX_LINE_BYTES, help="A longer line is an error line."
)
@click.option("--created", type=int, help='Unix time written as "created".  [default: now]')
@click.option("--fingerprint", is_flag=True, help="Results carry hashes for `xla-engine compare`.")
@click.option("--no-progress", is_flag=True, help="Print only the summary.")
def run(
    input_path: str,
    output_path: str,
    max_tokens: int | None,
    temperature: float | None,
    ordered: bool,
    max_line_bytes: int,
    created: int | None,
    fingerprint: bool,
    no_progress: bool,
    **options: Any,
) -> None:
    """Complete every line of INPUT (a JSONL file, or - for standard input).

    A line is a request: the prompt (text or token ids) with any sampling fields, or an OpenAI Batch line for
    /v1/completions. Both kinds may be mixed; blank lines are skipped.

    \b
    {"prompt": "def main(", "max_tokens": 32, "temperature": 0}
    {"custom_id": "b", "prompt": [17, 4, 99], "temperature": 0.8, "top_p": 0.9, "seed": 7, "logprobs": 0}
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x =", "max_tokens": 8}}

    Sampling fields: temperature, top_k, top_p, min_p, seed, max_tokens, stop_token_ids, ignore_eos, logprobs
    (0: the log-probability of each token), skip_special_tokens. An unknown field is an error, never ignored.

    OUTPUT gets one OpenAI Batch result line per request, written as it finishes; match them by custom_id
    (line-<n> where the input had none). A line that cannot run gets "error": {"code", "message", "line"} and
    harms no other. An existing OUTPUT is overwritten once the model is loaded; whatever has finished is in it
    even if the run is killed. With --ordered, two runs of one file with the same options differ in "created"
    only.

    \b
    Exit status: 0 all lines have results, 1 some failed, 2 could not start, 130 interrupted by Ctrl-C
    (requests without a result get no line then).

    \b
    Examples:
      xla-engine run examples/requests.jsonl -o out.jsonl
      xla-engine run in.jsonl -o out.jsonl --model ./SmolLM2-135M --max-num-seqs 32 --max-tokens 64
      cat in.jsonl | xla-engine run - -o - --ordered > out.jsonl
    """
    defaults = {"max_tokens": max_tokens, "temperature": temperature}
    defaults = {name: value for name, value in defaults.items() if value is not None}
    try:
        with contextlib.ExitStack() as stack:
            with _starting():
                SamplingParams.from_mapping(defaults)
                source = stack.enter_context(_open_input(input_path))
                total = None if no_progress else count_lines(source, max_line_bytes)
                lines = read_lines(source, max_line_bytes)
                first = next(lines, None)
                if first is None:
                    raise NotStarted(f"empty_file: {input_path} holds no request")
                sink = stack.enter_context(_open_output(output_path, source))
                engine = stack.enter_context(_load(options, show=not no_progress))
                _truncate(sink)
            began = time.monotonic()
            progress = Progress(total, slots=engine.max_num_seqs, stream=None if no_progress else sys.stderr)
            batch = BatchRun(
                engine,
                itertools.chain([first], lines),
                sink,
                model=_model_name(options["model"]),
                created=int(time.time()) if created is None else created,
                defaults=defaults,
                ordered=ordered,
                fingerprint=EngineIdentity.of(engine).digest() if fingerprint else None,
                on_turn=functools.partial(_show, progress, engine),
            )
            with progress:
                tally = batch.run()
                _show(progress, engine, tally, last=True)
            ended = time.monotonic()
            stats = engine.stats()
    except OSError as error:
        _output_failed(output_path, error)
    _explain(tally, output_path)
    cold_start = None if tally.first_token_at is None else tally.first_token_at - _process_start()
    for text in summary_lines(tally, stats, wall=ended - began, cold_start=cold_start):
        click.echo(text, err=True)
    if tally.interrupted:
        sys.exit(INTERRUPTED)
    if tally.failed or tally.failure is not None:
        sys.exit(SOME_FAILED)


@main.command(short_help="List the compiled programs.", context_settings={"show_default": True})
@model_options
def graphs(**options: Any) -> None:
    """List every compiled program: name, shapes, seconds to lower and compile, scratch and reused memory.

    This is all that ever runs on the device; nothing is compiled after start-up. temp is the scratch memory
    of one call, alias the memory of its inputs that is updated in place.

    \b
    Example:
      xla-engine graphs --model ./SmolLM2-135M --max-num-seqs 32
    """
    with contextlib.ExitStack() as stack:
        with _starting():
            engine = stack.enter_context(_load(options, show=True))
        rows = [("program", "lower s", "compile s", "temp MiB", "alias MiB", "shapes")]
        for report in engine.inventory_report():
            seconds = (f"{report.lower_seconds:.2f}", f"{report.compile_seconds:.2f}")
            sizes = (f"{report.temp_bytes / 2**20:.2f}", f"{report.alias_bytes / 2**20:.2f}")
            rows.append((report.name, *seconds, *sizes, report.shapes))
        stats = engine.stats()
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for name, *numbers, shapes in rows:
        columns = (f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True))
        click.echo(f"{name:<{widths[0]}}  {'  '.join(columns)}  {shapes}")
    click.echo(
        f"{len(rows) - 1} programs; load {stats.load_seconds:.2f} s, compile {stats.compile_seconds:.2f} s"
    )


@main.command(short_help="Check that batching changes no bit.", context_settings={"show_default": True})
@model_options
@click.option("--requests", type=click.IntRange(1), default=200, help="Random requests to compare.")
@click.option(
    "--schedules", type=click.IntRange(1), default=4, help="Random schedules they are dealt out to."
)
@click.option("--seed", type=int, default=0, help="Which random requests and schedules.")
@click.option(
    "--against",
    type=click.Choice(["alone", "config", "transformers"]),
    default="alone",
    help="alone: among peers against alone, bit for bit. config: other engine configurations, and prefill for "
    "decode. transformers: greedy tokens in float32 (extra `oracle`).",
)
@click.option(
    "--oracle-python",
    metavar="PATH",
    help="Interpreter that has torch and transformers.  [default: this one]",
)
@click.option(
    "--record",
    "record_path",
    metavar="FILE",
    help="Write the first schedule that differs, else the last, for `xla-engine replay` and `shrink`.",
)
def verify(
    requests: int,
    schedules: int,
    seed: int,
    against: str,
    oracle_python: str | None,
    record_path: str | None,
    **options: Any,
) -> None:
    """Check that batching changes no bit: run random requests each alone, then together, and compare.

    Prompt lengths, caps, sampling settings, arrival times and aborted neighbours are random; lag 0 and 1 take
    turns. Tokens and log-probability bits of each request must be the same among peers as alone in the same
    engine. Prints what was compared and the differences.

    That is level A, promised everywhere. Level B (--against config) is reported: on CPUs in bfloat16 tokens agree
    and nearly all bits do; each first difference is printed with the gap between the two largest logits. Level C
    (--against transformers) compares tokens with an external implementation.

    \b
    Exit status: 0 no difference, 1 a difference at level A or C, 2 could not start.

    \b
    Example:
      xla-engine verify --model ./SmolLM2-135M --requests 50 --max-model-len 256
      xla-engine verify --requests 10000 --schedules 300
      xla-engine verify --against config
      xla-engine verify --record failing.json
    """
    if record_path is not None and against != "alone":
        raise NotStarted("--record goes with --against alone: there is one engine to record")
    with contextlib.ExitStack() as stack:
        with _starting():
            engine = stack.enter_context(_load(options, show=True))
            from xla_engine import levels
            from xla_engine import verify as law
            from xla_engine.record import RecordKeeper, write_record

            if record_path is not None:
                open(record_path, "ab").close()  # a path that cannot be written is told before the work
        if against == "alone":
            count = stack.enter_context(counting("verifying", sys.stderr, 2 * requests))
            keeper = None if record_path is None else RecordKeeper()
            report = law.verify(
                engine, requests=requests, schedules=schedules, seed=seed, progress=count, keeper=keeper
            )
            if record_path is not None and keeper is not None and keeper.record is not None:
                with _starting():
                    write_record(record_path, keeper.record)
            click.echo("\n".join(report.lines()))
            failed = not report.ok
        elif against == "config":
            results = levels.across_configurations(engine, requests=requests, seed=seed)
            click.echo("\n".join(levels.table(results)))
            failed = False  # level B is reported, not promised
        else:
            with _starting():
                result = levels.against_transformers(
                    engine, requests=requests, seed=seed, python=oracle_python
                )
            click.echo("\n".join(levels.table([result])))
            failed = result.differing_tokens > 0
    if failed:
        sys.exit(SOME_FAILED)


@main.command(short_help="Run a record again, step for step.", context_settings={"show_default": True})
@click.argument("record_path", metavar="FILE")
@click.option("--model", metavar="DIR", help="Where the model is now.  [default: as recorded]")
@click.option("--force", is_flag=True, help="Replay on another model, version or device all the same.")
def replay(record_path: str, model: str | None, force: bool) -> None:
    """Run a record of `xla-engine verify --record` again and stop at the first difference.

    Every plan and every token and log-probability of each step must be as recorded. The engine gets the recorded
    options; a record of another model, option, jax version or device is refused.

    \b
    Exit status: 0 the same, 1 a difference, 2 refused or could not start.

    \b
    Example:
      xla-engine verify --record last.json
      xla-engine replay last.json
    """
    with contextlib.ExitStack() as stack, _starting():
        record, engine = _load_record(stack, record_path, model, force=force)
        from xla_engine import replay as again

        report = again.replay(engine, record, force=force)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(SOME_FAILED)


@main.command(short_help="Reduce a failing record to a small one.", context_settings={"show_default": True})
@click.argument("record_path", metavar="FILE")
@click.option("-o", "--output", "output_path", metavar="SMALLER", required=True, help="The small record.")
@click.option("--model", metavar="DIR", help="Where the model is now.  [default: as recorded]")
@click.option("--max-runs", type=click.IntRange(1), default=1000, help="Batched runs at most.")
@click.option("--force", is_flag=True, help="Shrink on another model, version or device all the same.")
def shrink(record_path: str, output_path: str, model: str | None, max_runs: int, force: bool) -> None:
    """Reduce a record in which a request differs from its alone-run to a small one that still does.

    Leaves out requests, aborts and turns, shortens prompts and outputs and makes sampling plainer as long as some
    request differs between alone and batched; then prints the schedule turn by turn.

    \b
    Exit status: 0 a failing record was written, 1 the failure does not show, 2 refused or could not start.

    \b
    Example:
      xla-engine verify --record failing.json
      xla-engine shrink failing.json -o small.json
    """
    with contextlib.ExitStack() as stack:
        with _starting():
            record, engine = _load_record(stack, record_path, model, force=force)
            from xla_engine import shrink as smaller
            from xla_engine.record import write_record
            from xla_engine.replay import check_identity

            if not force:
                check_identity(engine, record)
        count = stack.enter_context(counting("runs", sys.stderr))
        with _starting():
            report = smaller.shrink(engine, record.schedule, max_runs=max_runs, progress=count)
            if report.record is not None:
                write_record(output_path, report.record)
    click.echo("\n".join(report.lines()))
    if report.record is None:
        sys.exit(SOME_FAILED)


@main.command(short_help="Compare two result files.")
@click.argument("a", metavar="A.jsonl")
@click.argument("b", metavar="B.jsonl")
def compare(a: str, b: str) -> None:
    """Compare the results of two runs, matched by custom_id: tokens and log-probability bits.

    With `xla-engine run --fingerprint` the lines carry hashes of both and a fingerprint of model, options, jax and
    device. Without, token ids are compared where "logprobs": 0 put them into the lines, and else the text.

    \b
    Exit status: 0 the same, 1 a difference, 2 a file could not be read.
    """
    with _starting():
        report = compare_files(a, b)
    click.echo("\n".join(report.lines()))
    if not report.ok:
        sys.exit(SOME_FAILED)


def _load_record(
    stack: contextlib.ExitStack, path: str, model: str | None, *, force: bool
) -> tuple[Record, XlaBatchEngine]:
    """A record, and an engine with its options on its model, or on `model`."""
    from dataclasses import asdict

    from xla_engine.record import read_record
    from xla_engine.replay import engine_config

    record = read_record(path)
    config = asdict(engine_config(record, force=force))
    options = {"model": record.model_path if model is None else model, **config}
    return record, stack.enter_context(_load(options, show=True))


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """Whatever keeps a command from starting becomes one line and exit status 2."""
    try:
        yield
    except OSError as error:
        raise NotStarted(_os_message(error)) from error
    except XlaEngineError as error:
        raise NotStarted(f"{error.code}: {error}") from error
    except (RuntimeError, MemoryError) as error:  # XLA raises RuntimeErrors, for lack of memory among others
        raise NotStarted(f"the engine could not start: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _load(options: dict[str, Any], *, show: bool) -> Iterator[XlaBatchEngine]:
    from xla_engine.config import EngineConfig
    from xla_engine.engine import XlaBatchEngine

    fields = {name: value for name, value in options.items() if name != "model"}
    with counting("compiled", sys.stderr if show else io.StringIO()) as count:
        engine = XlaBatchEngine.from_pretrained(options["model"], EngineConfig(**fields), progress=count)
    with engine:
        yield engine


@contextlib.contextmanager
def _open_input(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
    else:
        with open(path, "rb") as source:
            yield source


@contextlib.contextmanager
def _open_output(path: str, source: BinaryIO) -> Iterator[BinaryIO]:
    """Open for writing without touching what is there yet. A new file that stays empty is removed again."""
    if path == "-":
        yield sys.stdout.buffer
        return
    is_new = not os.path.lexists(path)
    sink = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb")
    try:
        if _same_file(source, sink):
            raise NotStarted(f"{path}: output and input are the same file")
        yield sink
        sink.close()
    finally:
        with contextlib.suppress(OSError):  # the write that failed before was the error to report
            sink.close()
        if is_new and os.path.getsize(path) == 0:
            os.unlink(path)


def _same_file(source: BinaryIO, sink: BinaryIO) -> bool:
    try:
        first, second = os.fstat(source.fileno()), os.fstat(sink.fileno())
    except OSError:  # not a file of the system
        return False
    return stat.S_ISREG(first.st_mode) and os.path.samestat(first, second)


def _truncate(sink: BinaryIO) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISREG(os.fstat(sink.fileno()).st_mode):
            sink.truncate(0)


def _show(progress: Progress, engine: XlaBatchEngine, tally: Tally, *, last: bool = False) -> None:
    if last or progress.due:
        progress.show(done=tally.done, tokens=engine.stats().generation_tokens, busy=engine.num_running)


def _explain(tally: Tally, output_path: str) -> None:
    """Say what went wrong, before the summary."""
    for error in tally.first_errors:
        click.echo(f"line {error.line}: {error.code}: {error.message}", err=True)
    if (more := tally.failed.total() - len(tally.first_errors)) > 0:
        click.echo(f"... and {more} more lines with an error in {output_path}", err=True)
    if tally.failure is not None:
        if not isinstance(tally.failure, (XlaEngineError, OSError)):
            click.echo("".join(traceback.format_exception(tally.failure)), err=True, nl=False)
        click.echo(f"stopped early: {type(tally.failure).__name__}: {tally.failure}", err=True)
    if tally.interrupted:
        click.echo(
            f"interrupted: {tally.done} results are in {output_path}; {tally.unwritten} requests under way "
            "and the lines not read yet have none",
            err=True,
        )


def _output_failed(path: str, error: OSError) -> NoReturn:
    if path == "-":  # what is still buffered for standard output must not fail again at exit
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    click.echo(f"Error: cannot write {_os_message(error, path)}; the lines before are complete", err=True)
    sys.exit(SOME_FAILED)


def _os_message(error: OSError, path: str | None = None) -> str:
    name = error.filename or path
    return f"{name}: {error.strerror or error}" if name else str(error)


def _model_name(directory: str | None) -> str:
    return "embedded" if directory is None else Path(directory).resolve().name


def _process_start() -> float:
    """When this process began, on the monotonic clock; if the system does not say, when this was imported."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return _imported_at
    began = time.monotonic() - age
    return began if 0 <= _imported_at - began < 60 else _imported_at
