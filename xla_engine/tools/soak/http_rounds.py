"""Rounds of honest and hostile clients of one server, what must hold after each, and the server.

It runs in a separate process for a whole soak, so that its memory is measured over all of it.
"""

import contextlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from xla_engine.errors import ConfigError
from xla_engine.tools.soak.http_clients import (
    HONEST,
    HORRORS,
    HOST,
    HOSTILE,
    TEMPLATE,
    Body,
    Choices,
    answer_of,
    draw_bodies,
    open_client,
)
from xla_engine.tools.soak.report import SoakReport
from xla_engine.utils.resident import resident_bytes

WARM_ROUNDS = 3  # whose memory is not looked at
_BODIES = 24
_HONEST_CLIENTS, _HOSTILE_CLIENTS = 4, 12
_ASKED, _HORRORS = 4, 4  # of each client in a round
_IDLE_S = 60.0
_START_S = 300.0
_LIMITS = {
    "--send-timeout": "2",
    "--max-body-bytes": str(1 << 20),
    "--max-stored-bytes": str(16 << 20),
    "--max-connections": "256",
}


class HttpRounds:
    """Clients of a server of this machine. What happens is added to `report`, whose seed draws what they send.

    process: the server's number, for its memory.
    """

    def __init__(self, port: int, process: int, report: SoakReport) -> None:
        self._client = open_client(port)
        self._process = process
        self._report = report
        self._rounds = 0
        self._expected: list[tuple[Body, Choices]] = []

    def run(self, name: str) -> None:
        """Run clients of both kinds at the same time, then check the server.

        name: of the round, from which what they send is drawn. Before the first round its bodies are asked alone.
        """
        if not self._expected:
            bodies = draw_bodies(random.Random(f"{self._report.seed}/http"), _BODIES)
            self._expected = [(body, answer_of(self._client, body, stream=False)) for body in bodies]
        draw = random.Random(f"{self._report.seed}/http/{name}")
        clients = [self._honest] * _HONEST_CLIENTS + [self._hostile] * _HOSTILE_CLIENTS
        problems: list[str] = []
        with ThreadPoolExecutor(len(clients)) as pool:
            tasks = [pool.submit(client, random.Random(draw.random())) for client in clients]
            while not all(task.done() for task in tasks):
                problems += _tried(self._health)
                time.sleep(0.05)
            for task in tasks:
                problems += task.result()
        problems += _tried(self._come_to_rest)
        self._rounds += 1
        if self._rounds > WARM_ROUNDS and not problems:
            self._report.server.append(resident_bytes(self._process) or 0)
        self._report.problems += [
            f"{self._report.seed}/{name}, HTTP: {problem}" for problem in dict.fromkeys(problems)
        ]

    def _honest(self, draw: random.Random) -> list[str]:
        problems = []
        for _ in range(_ASKED):
            body, expected = draw.choice(self._expected)
            stream = draw.random() < 0.5
            what = f"an honest client, {body}, stream {stream}"
            try:
                found = answer_of(self._client, body, stream=stream)
            except Exception as error:
                problems.append(f"{what}: {type(error).__name__}: {error}")
                continue
            self._report.counts["HTTP answers compared"] += 1
            if found != expected:
                problems.append(f"{what}: not as alone: {found}")
        return problems

    def _hostile(self, draw: random.Random) -> list[str]:
        problems = []
        for _ in range(_HORRORS):
            horror = draw.choice(HORRORS)
            try:
                status = horror(self._client, draw)
            except (OSError, httpx.TransportError):  # closed, as it should be
                status = None
            self._report.hostile[status] += 1
            if status is not None and status >= 500:
                problems.append(f"a client that {horror.__name__.replace('_', ' ')} is answered {status}")
        return problems

    def _health(self) -> None:
        began = time.monotonic()
        self._client.get("/health").raise_for_status()
        self._report.slowest_health_s = max(self._report.slowest_health_s, time.monotonic() - began)

    def _come_to_rest(self) -> None:
        """Wait until the server is idle. Raises RuntimeError if it does not become idle."""
        until = time.monotonic() + _IDLE_S
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            raise RuntimeError(f"after its clients the server is left with {left}")

    def _left(self) -> dict[str, Any]:
        found = self._client.get("/v1/requests").raise_for_status().json()
        left = {"slots": sum(slot["request"] is not None for slot in found["slots"])}
        left |= {
            "waiting": found["num_waiting"],
            **{name: found["server"][name] for name in ("live", "batches")},
        }
        return {name: count for name, count in left.items() if count}


def _tried(work: Callable[[], None]) -> list[str]:
    try:
        work()
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


@contextlib.contextmanager
def serving(model: str | None, options: Mapping[str, Any], report: SoakReport) -> Iterator[HttpRounds]:
    """`xla-engine serve` in a process of its own, and rounds of its clients.

    options: of the engine, by the names of `EngineConfig`. Raises ConfigError where it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        template, keys, log = (Path(folder, name) for name in ("template", "keys", "log"))
        template.write_text(TEMPLATE)
        keys.write_text(f"{HONEST}\n{HOSTILE}\n")
        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        words = _LIMITS | {"--host": HOST, "--port": str(port), "--batch-dir": str(Path(folder, "batches"))}
        words |= {"--chat-template": str(template), "--api-key-file": str(keys)}
        words |= {f"--{name.replace('_', '-')}": str(value) for name, value in options.items() if value}
        words |= {} if model is None else {"--model": model}
        command = [sys.executable, "-m", "xla_engine", "serve", "--no-access-log", *sum(words.items(), ())]
        with open(log, "wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            until = time.monotonic() + _START_S
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() > until:
                    raise ConfigError(f"the server of the soak did not start: {_end_of(log)}")
                time.sleep(0.1)
            yield HttpRounds(port, process.pid, report)
            if process.poll() is not None:
                report.problems.append(f"the server has ended: {_end_of(log)}")
        finally:
            process.kill()
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        return open_client(port).get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]
