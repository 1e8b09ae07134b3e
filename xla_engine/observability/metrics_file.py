"""A file with the metrics of an engine, written while it runs: for node_exporter's textfile collector, or a look."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from xla_engine.observability.live_file import LiveFile


class Measured(Protocol):
    """What has metrics."""

    def metrics_text(self) -> str: ...


class MetricsFile(LiveFile):
    """`metrics_text()` of an engine."""

    def __init__(self, path: Path | str, engine: Measured, **when: Any) -> None:
        """when: the options of `LiveFile`."""
        super().__init__(path, lambda: engine.metrics_text().encode(), **when)
