"""A JSON file with the state of a running engine. Touches no device."""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from xla_engine.observability.live_file import LiveFile
from xla_engine.observability.stats import EngineStats
from xla_engine.scheduler import Snapshot

SHOWN_WAITING = 1000  # limit on listed waiting requests; `num_waiting` counts all


class Seen(Protocol):
    """The part of an engine that the file reads."""

    def snapshot(self) -> Snapshot: ...
    def stats(self) -> EngineStats: ...


def status_file(
    path: Path | str,
    engine: Seen,
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
        return {"custom_id": names(view.request_id), **_plain(view)}

    def content() -> bytes:
        snapshot = engine.snapshot()
        record = {
            "time": time.time(),
            "pid": os.getpid(),
            "run": run(),
            "slots": [
                {**_plain(slot), "request": slot.request and request(slot.request)} for slot in snapshot.slots
            ],
            "num_waiting": len(snapshot.waiting),
            "waiting": [request(view) for view in snapshot.waiting[:SHOWN_WAITING]],
            "draining": [request(view) for view in snapshot.draining],
            "counters": _plain(snapshot.counters),
            "stats": _plain(engine.stats()),
        }
        return json.dumps(record, indent=1).encode() + b"\n"

    return LiveFile(path, content, clock=clock)


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
