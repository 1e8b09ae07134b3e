"""The process that renders chat templates, as its parent sees it; what runs in it is `chat_worker`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

from xla_engine.errors import ChatTemplateError


class ChatProcess:
    """The process that renders chat templates, started when first needed and again after it was killed.

    Any thread may ask; it answers one at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, request: str, cpu_limit_s: float) -> dict[str, str]:
        """Send one line, read one line. Raises ChatTemplateError when the process does not survive it."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = ""
            except BaseException:  # an interrupt: the answer must not be read by the next one
                self.stop()
                raise
            if answer.endswith("\n"):
                return dict(json.loads(answer))
            status = process.wait()
            self.stop()
        if status == -signal.SIGPROF:
            raise ChatTemplateError(
                f"the chat template used more than {cpu_limit_s:g} s of processor time on these messages"
            )
        raise ChatTemplateError(f"rendering the chat template ended its process (status {status})")

    def _running(self) -> subprocess.Popen[str]:
        if self._owner != os.getpid():  # inherited by a fork: it answers the parent
            self._process, self._owner = None, os.getpid()
        if self._process is None or self._process.poll() is not None:
            self.stop()
            if find_spec("jinja2") is None:
                raise ChatTemplateError("chat templates need jinja2: pip install 'jinja2>=3.1.6'")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("chat_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",  # json escapes everything else, lone surrogates too
            )
        return self._process

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            with contextlib.suppress(OSError):  # what was not flushed has no reader
                process.communicate()
