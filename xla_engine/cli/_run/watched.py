"""Files that show the state of a run: status, metrics, step log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common
from xla_engine.observability.live_file import LiveFile
from xla_engine.observability.status_file import status_file
from xla_engine.observability.step_log_writer import logging_steps

if TYPE_CHECKING:
    from xla_engine.engine.client import EngineClient

Names = Callable[[str], str | None]  # custom_id by engine request id


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Paths of these files; None disables a file."""

    status: str | None = None
    metrics: str | None = None
    step_log: str | None = None

    def logging(self, engine: EngineClient, names: Names) -> contextlib.AbstractContextManager[None]:
        """Write the step log while the block runs. Raises OSError and ConfigError."""
        if self.step_log is None:
            return contextlib.nullcontext()
        from xla_engine.engine.batch_engine import XlaBatchEngine

        assert isinstance(engine, XlaBatchEngine)  # `run` rejects a step log with data parallelism
        return logging_steps(engine, self.step_log, names=names)

    def begin(self, engine: EngineClient, names: Names, run: Callable[[], Mapping[str, Any]]) -> LiveFiles:
        """Create the files that are updated repeatedly, and write each once. run: returns the run's own counts."""
        files: dict[str, LiveFile] = {}
        if self.status is not None:
            files["status"] = status_file(self.status, engine, names=names, run=run)
        if self.metrics is not None:
            files["metrics"] = LiveFile(self.metrics, lambda: engine.metrics_text().encode())
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
                click.echo(f"the {what} file could not be written: {file.failure}", err=True)
