"""Write lines to a pipe whose reader may be slow."""

import threading
from collections import deque
from typing import BinaryIO


class EventWriter:
    """Writes lines in its own thread, so that a slow reader does not delay the engine. Loses no line.

    failure: the error that closed the pipe; None while it is open.
    """

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._lines: deque[bytes] = deque()
        self._unsent = 0
        self._open = True
        self._changed = threading.Condition()
        self.failure: OSError | None = None
        self._thread = threading.Thread(target=self._write_all, name="xla-engine-stream-out", daemon=True)
        self._thread.start()

    @property
    def unsent(self) -> int:
        """Bytes queued and not yet taken by the pipe."""
        return self._unsent

    def put(self, line: bytes) -> None:
        """Queue a line, and return at once."""
        with self._changed:
            self._lines.append(line)
            self._unsent += len(line)
            self._changed.notify_all()

    def wait_until_below(self, size: int) -> None:
        """Wait until fewer than `size` bytes are unsent or the pipe is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent < size or self.failure is not None)

    def close(self) -> None:
        """Wait until all lines are written or the pipe is closed."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or not self._open)
                if not self._lines:
                    return
                lines, self._lines = self._lines, deque()
            data = b"".join(lines)
            try:
                self._sink.write(data)
                self._sink.flush()
            except (OSError, ValueError) as error:  # ValueError: someone else closed the file
                with self._changed:
                    self.failure = error if isinstance(error, OSError) else OSError(str(error))
                    self._changed.notify_all()
                return
            with self._changed:
                self._unsent -= len(data)
                self._changed.notify_all()
