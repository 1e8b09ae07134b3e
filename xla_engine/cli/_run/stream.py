"""`xla-engine run --stream`: read requests and control lines, write interleaved events."""

import contextlib
import os
import sys
from typing import Any, BinaryIO

import click

from xla_engine.batch.stream.event_stream import EventStream
from xla_engine.cli import _common
from xla_engine.cli._run.batch import explain_failure, run_state
from xla_engine.cli._run.files import open_input, silence_stdout
from xla_engine.cli._run.signals import interrupts
from xla_engine.cli._run.watched import Watched


def _own_stdin() -> BinaryIO:
    """A separate file for standard input that is never closed: a thread may still read from it at exit."""
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # not a real file
        return sys.stdin.buffer


def run_stream(
    source: str,
    watched: Watched,
    defaults: dict[str, Any],
    max_line_bytes: int,
    drain_timeout_s: float | None,
    options: dict[str, Any],
) -> None:
    """Run until the input ends; exit with the command's status."""
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            file = _own_stdin() if source == "-" else stack.enter_context(open_input(source))
            engine = stack.enter_context(_common.load_engine(options, show=True))
            stack.enter_context(watched.logging(engine, lambda name: stream.custom_id(name)))
        stream = EventStream(
            engine,
            file,
            sys.stdout.buffer,
            defaults=defaults,
            max_line_bytes=max_line_bytes,
            keep_finished=options.get("keep_finished", 0),
            on_turn=lambda: live.update(),
        )
        live = watched.begin(engine, stream.custom_id, lambda: run_state(stream.totals))
        with interrupts(stream.interrupt, "finishing the running requests", drain_timeout_s):
            totals = stream.run()
        live.update(force=True)
        live.report_failures()
    if isinstance(totals.failure, BrokenPipeError):
        silence_stdout()
        click.echo(f"the reader has disconnected; {totals.unwritten} requests were aborted", err=True)
    else:
        explain_failure(totals.failure)
    if totals.interrupted:
        sys.exit(_common.INTERRUPTED)
    if totals.failed or totals.failure is not None:
        sys.exit(_common.SOME_FAILED)
