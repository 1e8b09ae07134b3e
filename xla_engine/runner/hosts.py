"""One model over the devices of several hosts: a process on each, joined by `jax.distributed` (one SPMD program).

The first host's process is the engine. It alone schedules, and sends each plan to the others, which start the same
programs in the same order on their devices. So nothing that a host decides by itself, such as by its clock, can make
their programs differ, and a host that has no plan waits for no collective.

Plans travel over a TCP connection to each host, as one JSON object a line. A connection that ends tells that a process
has ended, also while its peer waits for a collective. There is neither encryption nor a password, as in
`jax.distributed` itself: use a private network.
"""

import contextlib
import importlib.metadata
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Self

import jax

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError

Message = dict[str, Any]
JOIN_S = 300.0  # how long hosts wait for each other at the start
LOST_STATUS = 1  # of a process whose first host has ended
_END_S = 20.0  # how long the first host waits for the others' ends
_leaving = threading.Lock()  # taken for good
_NOTICE_S = 3.0  # a failed collective may be seen before the end of the connection
_ALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
}  # a host without power is noticed after 20 s


class Hosts:
    """The connections of this process with the other hosts' processes.

    rank: this host's, from 0. count: of all hosts. lost: why another host is gone; None while all are there.
    on_lost: called in a background thread when one is.
    """

    def __init__(self, rank: int, count: int, peers: Mapping[int, socket.socket]) -> None:
        """peers: connections by the rank at their other end: all others for the first host, else only rank 0."""
        self.rank, self.count = rank, count
        self.lost: str | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self._peers = peers
        self._closed = False
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._has_lost = threading.Event()
        self._listeners = [
            threading.Thread(target=self._listen, args=each, daemon=True) for each in peers.items()
        ]
        for each in self._listeners:
            each.start()

    @classmethod
    def lead(cls, coordinator: str, count: int, config: EngineConfig, model: str | None) -> Self:
        """Wait for the other hosts at `coordinator` (HOST:PORT; jax takes the next port), and join their devices.

        model: its name, which hosts open if they are given none. Raises ConfigError.
        """
        check_config(config, count)
        host, port = address_of(coordinator)
        peers: dict[int, socket.socket] = {}
        try:
            listener = socket.create_server((host, port), reuse_port=False)
        except OSError as error:
            raise ConfigError(
                f"coordinator {coordinator}: this host cannot listen there ({error.strerror or error}); give an "
                "address of this host and a free port"
            ) from error
        until = time.monotonic() + JOIN_S
        with listener:
            while len(peers) < count - 1:
                listener.settimeout(max(until - time.monotonic(), 0.01))
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    missing = ", ".join(str(rank) for rank in range(1, count) if rank not in peers)
                    raise ConfigError(
                        f"after {JOIN_S:g} s, no process has joined as host {missing}: run `xla-engine join "
                        f"{coordinator} --host-rank N` on each of the other hosts"
                    ) from None
                rank, why = _introduced(peer, count, peers)
                if why is not None:
                    with contextlib.suppress(OSError):
                        peer.sendall(_line({"refused": why}))
                    peer.close()
                else:
                    peers[rank] = _watched(peer)
        hosts = cls(0, count, peers)
        hosts.send({"hosts": count, "model": model, "config": asdict(config)})
        hosts._begin(f"{host}:{port + 1}")
        return hosts

    @classmethod
    def join(cls, coordinator: str, rank: int) -> tuple[Self, Message]:
        """Join the first host as host `rank`; also returns its "config" and "model". Raises ConfigError."""
        host, port = address_of(coordinator)
        peer = _connected(coordinator, (host, port))
        peer.sendall(_line({"rank": rank, "versions": _versions()}))
        hosts = cls(rank, 0, {0: peer})
        told = hosts._receive()
        if "refused" in told:
            raise ConfigError(told["refused"])
        hosts.count = told["hosts"]
        hosts._begin(f"{host}:{port + 1}")
        return hosts, told

    def _begin(self, service: str) -> None:
        """Join the devices of all hosts. service: the address of jax's own coordinator."""
        with contextlib.suppress(AttributeError):  # without it, jax ends a process when another has ended
            jax.config.update("jax_enable_recoverability", True)
        try:
            jax.distributed.initialize(
                service, self.count, self.rank, initialization_timeout=int(JOIN_S), shutdown_timeout_seconds=5
            )
        except RuntimeError as error:
            raise ConfigError(
                f"this process cannot join other hosts: {error}. Open the engine before anything else uses jax, and "
                "only one over several hosts in a process"
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this process is the engine."""
        return self.rank == 0

    def send(self, message: Message) -> None:
        """Send to all other hosts; one that is gone is noticed elsewhere."""
        line = _line(message)
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.sendall(line)

    def agree(self, config: EngineConfig) -> EngineConfig:
        """The first host's configuration, on all of them: memory and processors may differ. config: this host's."""
        if self.is_first:
            self.send({"resolved": asdict(config)})
            return config
        return config_of(self._receive()["resolved"])

    def check_same(self, what: str, mine: str) -> None:
        """Raise ConfigError unless this host has the same as the first one. what: it is, in the error's words."""
        if self.is_first:
            self.send({"same": mine})
        elif mine != (first := self._receive()["same"]):
            raise ConfigError(f"host {self.rank} has another {what} than host 0: {mine}, not {first}")

    def meet(self) -> None:
        """Wait until all hosts are here, so that none waits for another in a collective for as long as it compiles."""
        if self.is_first:
            for _ in self._peers:
                self._receive()
            self.send({"go": True})
        else:
            self.send({"here": True})
            self._receive()

    def messages(self) -> Iterator[Message]:
        """What the first host sends, until it closes."""
        while "close" not in (message := self._receive()):
            yield message

    def why_lost(self) -> str | None:
        """`lost`, also if the end of a connection is about to be seen, for errors that it may be the cause of."""
        self._has_lost.wait(_NOTICE_S)
        return self.lost

    def close(self) -> None:
        """End the connections, the first host's after the others', which need jax's coordinator until then."""
        if self.is_first and not self._closed:
            self._closed = True
            self.send({"close": True})
            for each in self._listeners:
                each.join(_END_S)
        if self.lost is None:
            jax.distributed.shutdown()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def fail(self, message: str) -> None:
        """Tell the first host why this one ends."""
        self._closed = True
        self.send({"failed": message})

    def _receive(self) -> Message:
        message = self._received.get()
        if "lost" in message:
            raise ConfigError(message["lost"])
        return message

    def _listen(self, rank: int, peer: socket.socket) -> None:
        """Receive a host's messages, in a thread, until its connection ends."""
        why = f"host {rank} has ended, or its network has; start all hosts again"
        with contextlib.suppress(OSError, ValueError):
            for line in peer.makefile("rb"):
                message = json.loads(line)
                if "failed" in message:
                    why = f"host {rank} has failed: {message['failed']}"
                elif "close" in message:
                    self._closed = True
                    self._received.put(message)
                else:
                    self._received.put(message)
        if not self._closed and self.lost is None:
            self.lost = why
            self._has_lost.set()
            self._received.put({"lost": why})
            self.on_lost()


def leave(why: str) -> None:
    """End this process, which may wait for a collective that never comes. Of several threads, one says why."""
    _leaving.acquire()
    print(f"Error: {why}", file=sys.stderr, flush=True)
    os._exit(LOST_STATUS)


def check_config(config: EngineConfig, count: int) -> None:
    """Raise ConfigError if an engine over `count` hosts cannot have these options."""
    if config.tensor_parallel_size % count or config.tensor_parallel_size < count:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, which {count} hosts cannot share evenly: give "
            f"the number of devices of all hosts together, a multiple of {count}"
        )
    refused = {
        "speculative_config": config.speculative_config is not None,
        "enable_lora": config.enable_lora,
        "shadow_rate": config.shadow_rate > 0,
        "runner 'pooling'": config.pools,
    }
    if names := [name for name, given in refused.items() if given]:
        raise ConfigError(f"over several hosts, there is no {names[0]} yet: leave it out, or use one host")


def config_of(values: Message) -> EngineConfig:
    """The inverse of `asdict` and JSON."""
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return EngineConfig(**{**values, **tuples})


def address_of(coordinator: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise ConfigError(f"coordinator must be HOST:PORT with a port below 65535, not {coordinator!r}")
    return host.strip("[]"), int(port)


def _connected(coordinator: str, address: tuple[str, int]) -> socket.socket:
    """A connection with the first host, which may start later. Raises ConfigError."""
    until = time.monotonic() + JOIN_S
    while True:
        try:
            found = socket.create_connection(address, timeout=10)
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"after {JOIN_S:g} s, no engine answers at {coordinator} ({error.strerror or error}): start it "
                    "on the first host with --num-hosts and the same --coordinator"
                ) from error
            time.sleep(0.2)
        else:
            return _watched(found)


def _watched(peer: socket.socket) -> socket.socket:
    """A connection that also ends if its other end vanishes."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if (known := getattr(socket, name, None)) is not None:
            peer.setsockopt(socket.IPPROTO_TCP, known, value)
    return peer


def _introduced(
    peer: socket.socket, count: int, known: Mapping[int, socket.socket]
) -> tuple[int, str | None]:
    """The rank with which a process introduces itself, and why it is refused; None if it is not."""
    peer.settimeout(10)
    try:
        with peer.makefile("rb") as lines:
            told = json.loads(lines.readline(4096))
        rank, versions = told["rank"], told["versions"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, "this is the port of an engine over several hosts; use `xla-engine join`"
    if not isinstance(rank, int) or not 0 < rank < count:
        return 0, f"host rank {rank} is not between 1 and {count - 1}: the engine has --num-hosts {count}"
    if rank in known:
        return 0, f"another process has joined as host {rank}: give each host a rank of its own"
    if versions != (own := _versions()):
        return 0, f"this host has {versions}, the first one {own}: install the same versions on all hosts"
    return rank, None


def _versions() -> str:
    return f"xla-engine {importlib.metadata.version('xla-engine')}, jax {jax.__version__}"


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
