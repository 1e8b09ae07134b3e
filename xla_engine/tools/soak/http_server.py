"""`xla-engine serve` in a separate process for a whole soak, so that its memory is measured over all of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.tools.soak.http_clients import HONEST, HOST, HOSTILE, TEMPLATE, Address
from xla_engine.tools.soak.http_rounds import HttpRounds

ROUNDS = 2  # of clients, after each engine's life
_START_S = 300.0
_LIMITS = {
    "--send-timeout": "2",
    "--max-body-bytes": str(1 << 20),
    "--max-stored-bytes": str(16 << 20),
    "--max-connections": "256",
}


class HttpServer:
    """A server and rounds of its clients, from `with` on.

    options: of the engine, by the names of `EngineConfig`. seed: draws what clients send.
    """

    def __init__(self, model: str | None, options: Mapping[str, Any], seed: int) -> None:
        self._options = {
            f"--{name.replace('_', '-')}": str(value) for name, value in options.items() if value
        }
        if model is not None:
            self._options["--model"] = model
        self._seed = seed
        self._is_ready = False

    def __enter__(self) -> HttpServer:
        self._folder = tempfile.TemporaryDirectory(prefix="soak-")
        folder = Path(self._folder.name)
        (folder / "template").write_text(TEMPLATE)
        (folder / "keys").write_text(f"{HONEST}\n{HOSTILE}\n")
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        options = {**self._options, **_LIMITS, "--host": HOST, "--port": str(port)}
        options |= {"--chat-template": str(folder / "template"), "--api-key-file": str(folder / "keys")}
        options["--batch-dir"] = str(folder / "batches")
        self._log = folder / "log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "xla_engine", "serve", "--no-access-log", *sum(options.items(), ())],
                stdout=log,
                stderr=log,
            )
        self._address = Address(port)
        self._rounds = HttpRounds(self._address, self._process.pid, self._seed)
        self.tally = self._rounds.tally
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()

    def run(self, name: str) -> list[str]:
        """`ROUNDS` rounds, or until something breaks: what did, in words. Raises ConfigError where the server does not
        start."""
        if not self._is_ready:
            self._wait()
        problems: list[str] = []
        for number in range(ROUNDS):
            problems += self._rounds.run(f"{name}/{number}")
            if self._process.poll() is not None:
                problems.append(f"the server has ended: {self._last_words()}")
            if problems:
                break
        return problems

    def _wait(self) -> None:
        until = time.monotonic() + _START_S
        while not self._is_ready:
            if self._process.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"the server of the soak did not start: {self._last_words()}")
            try:
                self._is_ready = self._address.ask("/ready")[0] == 200
            except OSError:
                time.sleep(0.1)

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-500:]
