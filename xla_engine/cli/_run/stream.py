"""`xla-engine run --stream`: requests and control lines in, interleaved events out."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, BinaryIO

import click

from xla_engine.batch.event_stream import EventStream
from xla_engine.cli import _common
from xla_engine.cli._run.batch import explain_failure, run_state
from xla_engine.cli._run.files import open_input, silence_stdout
from xla_engine.cli._run.signals import interrupts
from xla_engine.tracing.status_file import StatusFile
from xla_engine.tracing.step_log_writer import logging_steps


def _own_stdin() -> BinaryIO:
    """Standard input as a separate file that is never closed: a thread may still wait in it when the program ends."""
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    except OSError:  # not a file of the system
        return sys.stdin.buffer


def run_stream(
    source: str,
    status_path: str | None,
    step_log_path: str | None,
    defaults: dict[str, Any],
    max_line_bytes: int,
    drain_timeout_s: float | None,
    options: dict[str, Any],
) -> None:
    """Serve until the input ends; exit with the command's status."""
    with contextlib.ExitStack() as stack:
        with _common.startup_errors():
            file = _own_stdin() if source == "-" else stack.enter_context(open_input(source))
            engine = stack.enter_context(_common.load_engine(options, show=True))
            if step_log_path is not None:
                stack.enter_context(
                    logging_steps(engine, step_log_path, names=lambda name: stream.custom_id(name))
                )
        stream = EventStream(
            engine,
            file,
            sys.stdout.buffer,
            defaults=defaults,
            max_line_bytes=max_line_bytes,
            on_turn=lambda: None if status is None else status.update(),
        )
        status = None
        if status_path is not None:
            status = StatusFile(
                status_path, engine, names=stream.custom_id, run=lambda: run_state(stream.totals)
            )
            with _common.startup_errors():
                status.write()
        with interrupts(stream.interrupt, "finishing the requests under way", drain_timeout_s):
            totals = stream.run()
        if status is not None:
            status.update(force=True)
    if isinstance(totals.failure, BrokenPipeError):
        silence_stdout()
        click.echo(f"the reader is gone; {totals.unwritten} requests were aborted", err=True)
    else:
        explain_failure(totals.failure)
    if totals.interrupted:
        sys.exit(_common.INTERRUPTED)
    if totals.failed or totals.failure is not None:
        sys.exit(_common.SOME_FAILED)
