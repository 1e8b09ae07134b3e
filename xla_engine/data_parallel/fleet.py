"""The processes of several engines: divide the machine among them, start them, receive their messages, and restart
those that end."""

import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.data_parallel.request import RemoteRequest
from xla_engine.data_parallel.wire import Message, config_of, decode, encode
from xla_engine.engine.identity import EngineIdentity
from xla_engine.environment import visible_gpus
from xla_engine.errors import ConfigError, XlaEngineError
from xla_engine.text.worker_process import why_ended
from xla_engine.utils.startup import StartupProgress, StartupStep, silent


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's share. cores: CPU cores; empty for all. gpu: comma-separated NVIDIA devices; None without any."""

    cores: tuple[int, ...] = ()
    gpu: str | None = None


def shares(
    engines: int,
    cores: Sequence[int] | None = None,
    gpus: Sequence[str] | None = None,
    *,
    devices_each: int = 1,
) -> list[Share]:
    """Divide the machine: one GPU each, shared round-robin if there are too few; without GPUs, the cores evenly.

    devices_each: GPUs of one engine, with tensor parallelism. Raises ConfigError if there are too few GPUs.

    >>> [share.cores for share in shares(2, cores=[0, 1, 2, 3, 4], gpus=[])]
    [(0, 1), (2, 3, 4)]
    >>> [share.gpu for share in shares(3, cores=[0], gpus=["0", "1"])]
    ['0', '1', '0']
    >>> [share.gpu for share in shares(2, cores=[0], gpus=["0", "1", "2", "3"], devices_each=2)]
    ['0,1', '2,3']
    """
    if cores is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    if gpus is None:
        gpus = visible_gpus()
    if gpus:
        starts = range(0, len(gpus) - devices_each + 1, devices_each)
        gpus = [",".join(gpus[start : start + devices_each]) for start in starts]
        if not gpus:
            raise ConfigError(f"tensor_parallel_size {devices_each} needs as many GPUs, but there are fewer")
        return [Share(gpu=gpus[index % len(gpus)]) for index in range(engines)]
    if len(cores) < engines:
        return [Share()] * engines
    cuts = [index * len(cores) // engines for index in range(engines + 1)]
    return [Share(cores=tuple(cores[cuts[index] : cuts[index + 1]])) for index in range(engines)]


def config_of_engine(
    config: EngineConfig, all_shares: Sequence[Share], index: int, running: int
) -> EngineConfig:
    """The options of engine `index` if `running` other engines on its device have already allocated their memory.

    Engines size themselves by the memory that is available when they start. If n engines on a device may use a
    fraction u of it, the first takes u/n. One that starts after k others finds 1 - k*u/n of the memory available,
    and takes u/(n - k*u) of that.
    """
    mine = all_shares[index].gpu
    together = sum(share.gpu == mine for share in all_shares)
    utilization = config.memory_utilization
    return replace(
        config,
        memory_utilization=min(utilization / (together - running * utilization), 1.0),
        swap_space=config.swap_space / len(all_shares),
        max_waiting=None,  # requests wait in the parent
    )


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


DEATHS_IN_A_ROW = 5  # an engine that ends this often without finishing a request is not restarted
# Options that are divided among the engines; no bit depends on them.
OWN_SHARE = ("memory_utilization", "swap_space", "max_waiting")

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One engine.

    process: None if it is no longer restarted. ready: whether it takes requests. live: its requests, by run number.
    deaths: how often it ended since it last finished a request. running: number of requests in slots, last received.
    stats, snapshot: last received. lost: counters of its earlier processes.
    adapters: ids of its adapters, including those being loaded; the most recently used is last.
    """

    index: int
    process: EngineProcess | None = None
    ready: bool = False
    live: dict[int, RemoteRequest] = field(default_factory=dict)
    deaths: int = 0
    running: int = 0
    stats: Message = field(default_factory=dict)
    snapshot: Message = field(default_factory=dict)
    lost: list[Message] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def tell(self, message: Message) -> None:
        """Send a message to its process, if it has one."""
        if self.process is not None:
            self.process.tell(message)


class Fleet:
    """Engines of one model and one configuration.

    config: the configuration with all sizes resolved. facts: what the first engine reported about itself.
    """

    def __init__(
        self, model: str | None, config: EngineConfig, engines: int, progress: StartupProgress = silent
    ) -> None:
        """Start the first engine, which determines sizes, then the others with these sizes. Raises their start-up
        errors."""
        self._model = model
        self._shares = shares(engines, devices_each=config.tensor_parallel_size)
        self.members = [Member(index) for index in range(engines)]
        self._selector = selectors.DefaultSelector()
        try:
            self.config = config
            progress(StartupStep("starting engine 1"))
            self._start(self.members[0], running=0)
            self.facts = self._until_ready(self.members[0])
            own = {name: getattr(config, name) for name in OWN_SHARE}
            self.config = replace(config_of(self.facts["config"]), **own)
            mates = [member for member in self.members[1:] if self._together(member, self.members[0])]
            for member in self.members[1:]:
                self._start(member, running=1 if member in mates else 0)
            for member in self.members[1:]:
                progress(StartupStep(f"starting engines 2 to {engines}"))
                self._until_ready(member)
        except BaseException:
            self.close()
            raise

    def identity(self) -> EngineIdentity:
        """The identity of one engine that has the whole machine, because the number of engines changes no bit."""
        values = json.loads(json.dumps(self.config.bit_options()))
        return EngineIdentity(**{**self.facts["identity"], "config": values})

    def wait(self, timeout_s: float | None) -> list[tuple[int, Message | None]]:
        """Wait for messages. Returns them with the index of their engine; None means that its process has ended."""
        found: list[tuple[int, Message | None]] = []
        for key, _ in self._selector.select(timeout_s):
            member: Member = key.data
            if member.process is not None:
                found += ((member.index, message) for message in member.process.receive())
        return found

    def take_ready(self, member: Member, message: Message) -> None:
        """Mark an engine as ready. Raises ConfigError if it differs from the first one."""
        if (others := self._differences(message)) != []:
            raise ConfigError(f"the engines of this machine differ: {'; '.join(others)}")
        member.ready = True
        member.stats, member.snapshot = message["stats"], message["snapshot"]

    def ended(self, member: Member) -> str:
        """Handle the end of an engine's process: restart it unless it ends too often. Returns why it ended."""
        process = member.process
        assert process is not None
        why = process.why_ended()
        self._selector.unregister(process.results)
        process.stop()
        member.process, member.ready, member.running = None, False, 0
        if member.stats:
            member.lost.append(member.stats)
            member.stats = {}
        member.deaths += 1
        if member.deaths < DEATHS_IN_A_ROW:
            running = sum(
                self._together(other, member) for other in self.members if other.process is not None
            )
            self._start(member, running=running)
            log.warning("engine %d %s; it is restarted", member.index, why)
        else:
            log.error("engine %d %s; it is not restarted", member.index, why)
        return why

    def close(self) -> None:
        """End all processes."""
        self._selector.close()
        for member in self.members:
            process, member.process = member.process, None
            member.ready = False
            if process is not None:
                process.close()

    def _together(self, one: Member, other: Member) -> bool:
        """Whether two engines share a device."""
        return self._shares[one.index].gpu == self._shares[other.index].gpu

    def _start(self, member: Member, *, running: int) -> None:
        config = config_of_engine(self.config, self._shares, member.index, running)
        member.process = EngineProcess(self._model, asdict(config), self._shares[member.index])
        self._selector.register(member.process.results, selectors.EVENT_READ, member)

    def _until_ready(self, member: Member) -> Message:
        process = member.process
        assert process is not None
        while True:
            for message in process.receive():
                if message is None:
                    raise XlaEngineError(f"engine {member.index} {process.why_ended()} while it started")
                if message["op"] == "failed":
                    raise start_error(message)
                if message["op"] == "ready":
                    if member.index == 0:
                        self.facts = message
                    self.take_ready(member, message)
                    return message

    def _differences(self, message: Message) -> list[str]:
        first, this = (EngineIdentity(**told["identity"]) for told in (self.facts, message))
        own = dict.fromkeys(OWN_SHARE)
        return replace(first, config={**first.config, **own}).differences(
            replace(this, config={**this.config, **own})
        )


def start_error(message: Message) -> Exception:
    """The start-up error of an engine, rebuilt from its code."""

    def kinds(base: type[XlaEngineError]) -> list[type[XlaEngineError]]:
        return [base, *(each for child in base.__subclasses__() for each in kinds(child))]

    found: dict[Any, type[XlaEngineError]] = {kind.code: kind for kind in reversed(kinds(XlaEngineError))}
    kind = found.get(message["code"])
    text = message["message"].partition(": ")[2] or message["message"]
    return RuntimeError(message["message"]) if kind is None else kind(text)
