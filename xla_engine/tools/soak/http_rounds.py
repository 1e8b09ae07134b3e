"""Rounds of honest and hostile clients of one server, what must hold after each, and the server.

It runs in a separate process for a whole soak, so that its memory is measured over all of it.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.tools.soak import memory
from xla_engine.tools.soak.http_clients import (
    HONEST,
    HORRORS,
    HOST,
    HOSTILE,
    TEMPLATE,
    Address,
    Body,
    Choices,
    answer_of,
    draw_bodies,
)

ALLOWED_RATIO = 1.2  # of the server's resident memory, to what it was after the warm-up
WARM_ROUNDS = 3  # whose memory is not looked at
LEAST_LOOKS = 3  # at the memory after the first one, without which nothing is said of it
_BODIES = 24
_HONEST_CLIENTS, _HOSTILE_CLIENTS = 4, 12
_ASKED, _HORRORS = 4, 4  # of each client in a round
_IDLE_S = 60.0
ROUNDS = 2  # of clients, after each engine's life
_START_S = 300.0
_LIMITS = {
    "--send-timeout": "2",
    "--max-body-bytes": str(1 << 20),
    "--max-stored-bytes": str(16 << 20),
    "--max-connections": "256",
}


@dataclass(slots=True)
class HttpTally:
    """What happened over HTTP.

    compared: answers of honest clients. hostile: what hostile clients were answered, by status; None where nothing.
    slowest_health_s: of an answer of /health. resident: bytes of memory of the idle server after each round, the
    warm-up left out.
    """

    rounds: int = 0
    compared: int = 0
    hostile: Counter[int | None] = field(default_factory=Counter)
    slowest_health_s: float = 0.0
    resident: list[int] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """The most memory after a round, in terms of the first; None for too few rounds to say."""
        if len(self.resident) <= LEAST_LOOKS:
            return None
        return max(self.resident) / self.resident[0]

    @property
    def grows(self) -> bool:
        return self.ratio is not None and self.ratio > ALLOWED_RATIO

    def lines(self) -> list[str]:
        """As text."""
        statuses = ", ".join(
            f"{'none' if status is None else status} {count}"
            for status, count in sorted(self.hostile.items(), key=lambda item: item[0] or 0)
        )
        return [
            f"HTTP, honest clients        {self.compared} answers compared in {self.rounds} rounds; "
            f"/health within {1e3 * self.slowest_health_s:.0f} ms",
            f"HTTP, hostile clients       {self.hostile.total()}  (answered: {statuses})",
            f"HTTP, memory of the server  {self.memory_line()}",
        ]

    def memory_line(self) -> str:
        """The server's memory as text."""
        if self.ratio is None:
            need = WARM_ROUNDS + LEAST_LOOKS + 1
            return f"not measured: {self.rounds} rounds, and {need} are needed; run for longer"
        mib = 1 << 20
        return (
            f"{self.resident[0] / mib:.0f} MiB after the warm-up, at most {max(self.resident) / mib:.0f} MiB in "
            f"{len(self.resident) - 1} rounds: {self.ratio:.2f} times as much, allowed {ALLOWED_RATIO}"
        )


class HttpRounds:
    """Clients of a server of this machine.

    process: the server's number, for its memory. seed: draws what clients send.
    """

    def __init__(self, address: Address, process: int, seed: int) -> None:
        self.tally = HttpTally()
        self._address = address
        self._process = process
        self._seed = seed
        self._expected: list[tuple[Body, Choices]] = []

    def run(self, name: str) -> list[str]:
        """Run clients of both kinds at the same time, then check the server; returns what broke, in words.

        name: of the round, from which what they send is drawn. Before the first round its bodies are asked alone.
        """
        if not self._expected:
            bodies = draw_bodies(random.Random(f"{self._seed}/http"), _BODIES)
            self._expected = [(body, answer_of(self._address, body, stream=False)) for body in bodies]
        draw = random.Random(f"{self._seed}/http/{name}")
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
        self.tally.rounds += 1
        if self.tally.rounds > WARM_ROUNDS and not problems:
            self.tally.resident.append(memory.resident_bytes(self._process))
        return list(dict.fromkeys(problems))

    def _honest(self, draw: random.Random) -> list[str]:
        problems = []
        for _ in range(_ASKED):
            body, expected = draw.choice(self._expected)
            stream = draw.random() < 0.5
            what = f"an honest client, {body}, stream {stream}"
            try:
                found = answer_of(self._address, body, stream=stream)
            except Exception as error:
                problems.append(f"{what}: {type(error).__name__}: {error}")
                continue
            self.tally.compared += 1
            if found != expected:
                problems.append(f"{what}: not as alone: {found}")
        return problems

    def _hostile(self, draw: random.Random) -> list[str]:
        problems = []
        for _ in range(_HORRORS):
            horror = draw.choice(HORRORS)
            try:
                status = horror(self._address, draw)
            except OSError:  # closed, as it should be
                status = None
            self.tally.hostile[status] += 1
            if status is not None and status >= 500:
                problems.append(f"a client that {horror.__name__.replace('_', ' ')} is answered {status}")
        return problems

    def _health(self) -> None:
        began = time.monotonic()
        self._address.get("/health")
        self.tally.slowest_health_s = max(self.tally.slowest_health_s, time.monotonic() - began)

    def _come_to_rest(self) -> None:
        """Wait until the server is idle. Raises RuntimeError if it does not become idle."""
        until = time.monotonic() + _IDLE_S
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.05)
        if left:
            raise RuntimeError(f"after its clients the server is left with {left}")

    def _left(self) -> dict[str, Any]:
        found = self._address.get("/v1/requests")
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


class HttpServer:
    """`xla-engine serve` and rounds of its clients, from `with` on.

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
