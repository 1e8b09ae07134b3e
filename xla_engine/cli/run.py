"""`xla-engine run`: a file of requests in, a file of results out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from xla_engine.batch import MAX_LINE_BYTES, BatchRun, count_lines, read_lines
from xla_engine.cli import _common, _files
from xla_engine.errors import XlaEngineError
from xla_engine.fingerprint import EngineIdentity
from xla_engine.progress import Progress, Tally, summary_lines
from xla_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from xla_engine.engine import XlaBatchEngine

_imported_at = time.monotonic()


@click.command(short_help="Complete a file of requests.", context_settings={"show_default": True})
@click.argument("input_path", metavar="INPUT")
@click.option("-o", "--output", "output_path", metavar="OUTPUT", required=True, help="Results file, or -.")
@_common.model_options
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
            with _common.starting():
                SamplingParams.from_mapping(defaults)
                source = stack.enter_context(_files.open_input(input_path))
                total = None if no_progress else count_lines(source, max_line_bytes)
                lines = read_lines(source, max_line_bytes)
                first = next(lines, None)
                if first is None:
                    raise _common.NotStarted(f"empty_file: {input_path} holds no request")
                sink = stack.enter_context(_files.open_output(output_path, source))
                engine = stack.enter_context(_common.load_engine(options, show=not no_progress))
                _files.truncate(sink)
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
        sys.exit(_common.INTERRUPTED)
    if tally.failed or tally.failure is not None:
        sys.exit(_common.SOME_FAILED)


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
    click.echo(
        f"Error: cannot write {_common.os_message(error, path)}; the lines before are complete", err=True
    )
    sys.exit(_common.SOME_FAILED)


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
