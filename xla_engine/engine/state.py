"""The state that the parts of an engine share."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import Any

from xla_engine.engine.requests.masks import MaskMaker
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation.speculator import Speculator
from xla_engine.engine.stored_prefixes import StoredPrefixes
from xla_engine.engine.turn import Turn, Wait
from xla_engine.engine.waiter import Waiter
from xla_engine.observability.observer import Observers
from xla_engine.observability.phases import PhaseTimer
from xla_engine.observability.stats import WorkCounters
from xla_engine.runner.encoder_runner import EncoderRunner
from xla_engine.runner.hosts import Hosts
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.runner import Runner
from xla_engine.scheduler import Scheduler
from xla_engine.scheduler.pipeline import StepPipeline
from xla_engine.utils.call_thread import Pending

NO_THREAD = 0  # the value of `TurnState.thread` once the driver has returned before its step was read


@dataclass(slots=True)
class UnderWay:
    """A turn that waits for its step.

    pending: the call with which the waiter's thread waits; None if the driver itself waits.
    """

    turn: Turn
    wait: Wait
    pending: Pending[Any] | None


@dataclass(slots=True)
class TurnState:
    """The progress of an engine's turns.

    running: a turn has begun and not ended. thread: the id of the thread that drives it.
    under_way: the turn, while it waits for a step.
    ended: how many turns have ended.
    incomplete: a turn began and was not completed. The state is unknown then, so all requests must run again.
    """

    running: bool = False
    thread: int = NO_THREAD
    under_way: UnderWay | None = None
    ended: int = 0
    incomplete: bool = False

    @property
    def is_left(self) -> bool:
        """Whether a turn waits for a step but no thread drives it."""
        return self.running and self.thread == NO_THREAD


@dataclass(slots=True, kw_only=True, eq=False)
class EngineState:
    """Read and changed only with `lock` held; the parts assume that their caller holds it.

    table: the live requests, and those that are kept.
    masks: computes the masks of constrained rows. speculator: None without speculation.
    prefixes: prefixes in files; None without `prefix_cache_dir`.
    lock: notified at the end of each turn.
    clock: seconds, for deadlines and token times.
    step_timeout_s: seconds that the start of a step, and then its result, may take before the device counts as lost;
        None for no limit.
    waiter: the thread that waits for steps if there is a time limit.
    watches: other threads may submit requests with deadlines while a turn waits, so the waiter's thread waits for
        every step. By default it does so only while a request has a deadline.
    ready: set when background work is done or a request arrives or ends; cleared when a turn begins.
    idle: the last turn had nothing to do.
    hosts: other hosts that share the model; None: there are none.
    expired: how many requests have passed their deadlines.
    last_answer: when the device last answered, or was last without work.
    closed: why the engine was closed. draining: no new requests are accepted.
    device_lost: the device does not answer any more.
    """

    pipeline: StepPipeline[InFlight]
    runner: Runner | EncoderRunner
    table: RequestTable
    speculator: Speculator | None = None
    prefixes: StoredPrefixes | None = None
    shadow: ShadowProbe | None = None
    hosts: Hosts | None = None
    timer: PhaseTimer | None = None
    masks: MaskMaker = field(default_factory=MaskMaker)
    observers: Observers = field(default_factory=Observers)
    work: WorkCounters = field(default_factory=WorkCounters)
    lock: Condition = field(default_factory=Condition)
    clock: Callable[[], float] = time.monotonic
    step_timeout_s: float | None = None
    waiter: Waiter = field(default_factory=Waiter)
    watches: bool = False
    turn: TurnState = field(default_factory=TurnState)
    ready: Event = field(default_factory=Event)
    idle: bool = False
    expired: int = 0
    last_answer: float = 0.0
    closed: str | None = None
    draining: bool = False
    device_lost: bool = False

    @property
    def scheduler(self) -> Scheduler:
        """The pipeline's scheduler; a restart replaces it."""
        return self.pipeline.scheduler

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or steps to read. Steps whose requests have all passed their deadlines do not
        count."""
        return bool(self.table or self.table.pending) or (
            bool(self.pipeline.in_flight) and not self.turn.is_left
        )

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self.scheduler.num_waiting + sum(one.sequences for one in self.table.pending.values())

    def next_deadline(self) -> float:
        """The earliest deadline of all requests; infinity if there is none."""
        first = self.scheduler.deadlines.next_time
        for one in self.table.pending.values():
            if one.expires:
                first = min(first, one.expires[0][0])
        return first if self.prefixes is None else min(first, self.prefixes.until)

    @property
    def reads(self) -> bool:
        """Whether a prefix is being read from files."""
        return self.prefixes is not None and self.prefixes.reading is not None

    def time_left(self, began: float) -> float:
        """Seconds until the next deadline or until a step, waited for since `began`, times out; 0 if it has, or if
        another host is gone."""
        if self.hosts is not None and self.hosts.lost is not None:
            return 0
        now = self.clock()
        until = math.inf if self.step_timeout_s is None else began + self.step_timeout_s
        return 0 if now >= until else max(min(until, self.next_deadline()) - now, 1e-3)

    def note_expired(self) -> None:
        """Count a request that has passed its deadline, and wake the thread that waits for a step."""
        self.expired += 1
        self.waiter.wake.set()

    @property
    def awaits_background(self) -> bool:
        """Whether the next turn can do nothing until background work is done."""
        reads = self.prefixes is not None and self.clock() < self.prefixes.until < math.inf
        work = bool(self.table.pending or self.masks.making) or reads
        return self.idle and work and not self.ready.is_set()

    def adapter_slots(self) -> set[int]:
        """The adapter slots of all sequences that are live, pending, kept or saved."""
        rows = (*self.table.settings.values(), *(part.settings for part in self.table.kept.sequences()))
        return {row.adapter for row in rows} | {one.adapter for one in self.table.pending.values()}
