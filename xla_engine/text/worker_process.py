"""A worker process for work that could crash or block this process. `worker_main` runs in it."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


class WorkerEndedError(Exception):
    """The worker died during a request; the text says why."""


class WorkerProcess:
    """A process that answers requests with a worker file. Starts on first use or by `start`, and again if it dies.

    Thread-safe; requests are answered one at a time. The process ends with its parent.
    process: the running one; None before the first.
    """

    def __init__(self, worker: str) -> None:
        """worker: a worker file in this folder, or the path of one; see `worker_main`."""
        self._files = [str(Path(__file__).parent / name) for name in ("worker_main.py", worker)]
        self._lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self._owner = 0
        atexit.register(self.stop)

    def start(self) -> None:
        """Start the process now, so that the first request does not wait for it."""
        with (
            contextlib.suppress(WorkerEndedError),
            self._lock,
        ):  # the first request tries again, and reports it
            self._running()

    def ask(self, cpu_limit_s: float, request: str) -> dict[str, Any]:
        """Send a JSON object and return the answer. Raises WorkerEndedError."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(f"{cpu_limit_s} {request}\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            except BaseException:  # an interrupt: the next request must not read this answer
                self.stop()
                raise
            if answer.endswith("\n"):
                return dict(json.loads(answer))
            status = process.wait()
            self.stop()
        raise WorkerEndedError(why_ended(status, cpu_limit_s))

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():  # inherited by a fork: the process belongs to the parent
            self.process, self._owner = None, os.getpid()
        if self.process is None or self.process.poll() is not None:
            self.stop()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", *self._files],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="ascii",  # json escapes everything else, including lone surrogates
                )
            except OSError as error:
                raise WorkerEndedError(f"cannot start its process ({error})") from error
        return self.process

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):  # unflushed data has no reader
                process.communicate()


def why_ended(status: int, cpu_limit_s: float) -> str:
    """Explain the exit status (negative for a signal) of a process under limits."""
    if status == -signal.SIGPROF:
        return f"used more than {cpu_limit_s:g} s of processor time"
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"ended its process ({how})"
