"""Start the processes of several engines, receive their messages, and restart those that end."""

import logging
import selectors
from dataclasses import dataclass, field, replace
from typing import Any

from xla_engine.config import EngineConfig
from xla_engine.data_parallel.process import EngineProcess
from xla_engine.data_parallel.request import RemoteRequest
from xla_engine.data_parallel.shares import config_of_engine, shares
from xla_engine.data_parallel.wire import Message, config_of, config_to_json, identity_of
from xla_engine.engine.identity import EngineIdentity
from xla_engine.errors import ConfigError, XlaEngineError
from xla_engine.utils.startup import StartupProgress, StartupStep, silent

DEATHS_IN_A_ROW = 5  # an engine that ends this often without finishing a request is not restarted
# options in which engines differ; they change no bit
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
        import json

        values = json.loads(json.dumps(self.config.bit_options()))
        return replace(identity_of(self.facts["identity"]), config=values)

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
        member.process = EngineProcess(self._model, config_to_json(config), self._shares[member.index])
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
        first, this = identity_of(self.facts["identity"]), identity_of(message["identity"])
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
