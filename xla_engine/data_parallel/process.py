"""The parent's handle of an engine's process."""

import contextlib
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

from xla_engine.data_parallel.shares import Share
from xla_engine.data_parallel.wire import Message, decode, encode
from xla_engine.text.worker_process import why_ended

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from xla_engine.data_parallel.worker import main; main(int(sys.argv[2]))"
)
_READ = 1 << 20


class EngineProcess:
    """One process with one engine. It ends when its parent ends, for whatever reason.

    results: file descriptor that becomes readable for messages and at the end of the process.
    """

    def __init__(self, model: str | None, config: Message, share: Share) -> None:
        """Start it. Raises OSError."""
        self.results, theirs = os.pipe()
        # The parent's environment, except for the device.
        device = () if share.gpu is None else ("env", f"CUDA_VISIBLE_DEVICES={share.gpu}")
        command = [*device, sys.executable, "-c", _START, json.dumps(sys.path), str(theirs)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(theirs,)
            )
        except BaseException:
            os.close(self.results)
            raise
        finally:
            os.close(theirs)
        self._buffer = bytearray()
        self.stop = weakref.finalize(self, _stop, self._process, self.results)
        self.tell({"model": model, "config": config, "cores": list(share.cores)})

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Message) -> None:
        """Send a message. If the process has ended it is lost, and `receive` will report the end."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):
            stdin.write(encode(message))
            stdin.flush()

    def receive(self) -> Iterator[Message | None]:
        """Wait for messages and yield all that have come; then None if the process has ended.

        An incomplete last message is dropped.
        """
        data = os.read(self.results, _READ)
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            with contextlib.suppress(ValueError):  # incomplete if an interrupt came between two reads
                yield decode(bytes(line))
        if not data:
            yield None

    def why_ended(self) -> str:
        """Why the process ended, in words. It must have ended, or be about to."""
        try:
            return why_ended(self._process.wait(timeout=10), 0)
        except subprocess.TimeoutExpired:
            return "closed its pipe"

    def close(self, timeout_s: float = 10.0) -> None:
        """Ask the process to end, and kill it after the timeout."""
        if not self.stop.alive:
            return
        self.tell({"op": "close"})
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.stop()


def _stop(process: subprocess.Popen[Any], results: int) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with contextlib.suppress(OSError):
        os.close(results)
