"""Files that are rewritten while an engine runs, for others to read; its state as JSON. Touches no device."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from xla_engine.observability.stats import EngineStats
from xla_engine.scheduler import Snapshot
from xla_engine.utils.new_file import naming, replacing

INTERVAL = 1.0  # seconds between writes
SHOWN_WAITING = 1000  # limit on listed waiting requests; `num_waiting` counts all


class LiveFile:
    """Writes `path` atomically every `INTERVAL` seconds: a reader sees the latest state or the one before.

    content: returns the current content. failure: error of the last failed write, because a full disk must not end
    the run.
    """

    def __init__(
        self, path: Path | str, content: Callable[[], bytes], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failure: OSError | None = None
        self._path = Path(path)
        self._content = content
        self._clock = clock
        self._last = -math.inf

    def update(self, *, force: bool = False) -> None:
        """Write the state if it is due, or always with `force`."""
        if not force and self._clock() - self._last < INTERVAL:
            return
        try:
            self.write()
        except OSError as error:
            self.failure = error
        self._last = self._clock()

    def write(self) -> None:
        """Write the state. Raises OSError, which names the file."""
        content = self._content()
        with naming(self._path):
            if (
                self._path.exists() and not self._path.is_file()
            ):  # a pipe or a device is written, not replaced
                self._path.write_bytes(content)
                return
            with replacing(self._path) as file:
                file.write(content)


class StatusSource(Protocol):
    """The part of an engine that the file reads."""

    def snapshot(self) -> Snapshot: ...
    def stats(self) -> EngineStats: ...


def status_file(
    path: Path | str,
    engine: StatusSource,
    *,
    names: Callable[[str], str | None],
    run: Callable[[], Mapping[str, Any]],
    clock: Callable[[], float] = time.monotonic,
) -> LiveFile:
    """The state of an engine and of the run that uses it, as one JSON object.

    engine: gives slots, queue, reasons and counters.
    names: returns the custom_id of an engine request, or None.
    run: returns the run's own counts as JSON values.
    """

    def request(view: Any) -> dict[str, Any]:
        return {"custom_id": names(view.request_id), **asdict(view)}

    def content() -> bytes:
        snapshot = engine.snapshot()
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "run": run(),
            "slots": [
                {**asdict(slot), "request": slot.request and request(slot.request)} for slot in snapshot.slots
            ],
            "num_waiting": len(snapshot.waiting),
            "waiting": [request(view) for view in snapshot.waiting[:SHOWN_WAITING]],
            "draining": [request(view) for view in snapshot.draining],
            "counters": asdict(snapshot.counters),
            "stats": asdict(engine.stats()),
        }
        finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
        return json.dumps(finite, indent=1).encode() + b"\n"

    return LiveFile(path, content, clock=clock)
