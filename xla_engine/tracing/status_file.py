"""A JSON file that says what an engine is doing, written while it runs. Touches no device."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from xla_engine.engine.protocol import Engine
from xla_engine.utils.new_file import open_new

INTERVAL = 1.0  # seconds between writes
SHOWN_WAITING = 1000  # requests of the queue that are listed; `num_waiting` counts all


class StatusFile:
    """Writes `path` every `interval` seconds, at once and whole: a reader sees the last state or the one before.

    engine: where slots, queue, reasons and counters come from.
    names: the caller's id of an engine request, None where it has none.
    run: what the run itself counts, as JSON values.
    """

    def __init__(
        self,
        path: Path | str,
        engine: Engine,
        *,
        names: Callable[[str], str | None],
        run: Callable[[], Mapping[str, Any]],
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = Path(path)
        self._engine = engine
        self._names = names
        self._run = run
        self._interval = interval
        self._clock = clock
        self._last = -math.inf
        self.failure: OSError | None = None  # the last write that failed; a full disk must not end the run

    def update(self, *, force: bool = False) -> None:
        """Write the state if it is time to, or in any case with `force`."""
        if not force and self._clock() - self._last < self._interval:
            return
        try:
            self.write()
        except OSError as error:
            self.failure = error
        self._last = self._clock()

    def write(self) -> None:
        """Write the state. Raises OSError."""
        record = {"time": time.time(), "pid": os.getpid(), "run": self._run(), **self._engine_state()}
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with open_new(fresh) as file:
                file.write(json.dumps(record, indent=1).encode() + b"\n")
            os.replace(fresh, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise

    def _engine_state(self) -> dict[str, Any]:
        snapshot = self._engine.snapshot()
        return {
            "slots": [
                {**_plain(slot), "request": slot.request and self._request(slot.request)}
                for slot in snapshot.slots
            ],
            "num_waiting": len(snapshot.waiting),
            "waiting": [self._request(view) for view in snapshot.waiting[:SHOWN_WAITING]],
            "draining": [self._request(view) for view in snapshot.draining],
            "counters": _plain(snapshot.counters),
            "stats": _plain(self._engine.stats()),
        }

    def _request(self, view: Any) -> dict[str, Any]:
        return {"custom_id": self._names(view.request_id), **_plain(view)}


def _plain(value: Any) -> Any:
    """Records as JSON values."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value
