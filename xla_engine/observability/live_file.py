"""A file that is rewritten regularly while an engine runs, for others to read."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from xla_engine.utils.new_file import open_new

INTERVAL = 1.0  # seconds between writes


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
        """Write the state. Raises OSError."""
        fresh = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with open_new(fresh) as file:
                file.write(self._content())
            os.replace(fresh, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise
