"""What the parts of an engine share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, Event
from typing import Any, NamedTuple

from xla_engine.engine.requests.masks import MaskMaker
from xla_engine.engine.requests.pending import PendingRequest
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation.speculator import Speculator
from xla_engine.engine.turn import Turn, Wait
from xla_engine.engine.waiter import Pending, StepRunner, Waiter
from xla_engine.observability.observer import Observers
from xla_engine.observability.phases import PhaseTimer
from xla_engine.observability.stats import WorkCounters
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import Request, Scheduler
from xla_engine.scheduler.fast_forward import next_deadline
from xla_engine.scheduler.pipeline import StepPipeline

NO_THREAD = 0  # drives the turn: its driver has returned while the step was under way


class SavedSequence(NamedTuple):
    """A sequence as it was saved, what the device was told about it, and what the scheduler was."""

    part: LiveSequence
    row: RowSettings
    request: Request | None


@dataclass(slots=True)
class UnderWay:
    """A turn that waits for its step. pending: another thread's wait for it, None where the driver itself waits."""

    turn: Turn
    wait: Wait
    pending: Pending[Any] | None


@dataclass(slots=True)
class TurnState:
    """Where the turns of an engine stand.

    running: a turn has begun and not ended. thread: drives it. under_way: it waits for a step.
    ended: turns so far.
    torn: a turn has begun and was not completed, so nobody knows what was done: all requests run again.
    """

    running: bool = False
    thread: int = NO_THREAD
    under_way: UnderWay | None = None
    ended: int = 0
    torn: bool = False

    @property
    def is_left(self) -> bool:
        """Whether a step is under way that nobody waits for."""
        return self.running and self.thread == NO_THREAD


@dataclass(slots=True, kw_only=True, eq=False)
class EngineState:
    """Read and changed with `lock` held; parts assume that their caller holds it.

    table: what requests have so far. pending: those that are not in it yet, by id. saved: by name.
    masks: makes those of constrained rows. speculator: None where rows sample one token a step.
    lock: told of the end of each turn.
    clock: seconds, for deadlines and the times of tokens.
    step_timeout_s: seconds that a step may take to be started, and to be read, before the device is given up; None for
        no limit.
    waiter: the thread that waits for steps which have a time limit.
    watches: requests with deadlines may come from other threads while a step is under way, so the waiter's thread
        always waits for it; by default it does while a request has a deadline.
    ready: since the last turn began something was made in the background, or a request came or ended.
    idle: the last turn had nothing to do.
    expired: requests that ran out of time.
    last_answer: when the device answered last, or had nothing to do.
    closed: why nothing is taken any more. draining: nothing new is.
    device_lost: the device does not answer any more.
    """

    pipeline: StepPipeline[InFlight]
    runner: StepRunner
    table: RequestTable
    speculator: Speculator | None = None
    shadow: ShadowProbe | None = None
    timer: PhaseTimer | None = None
    masks: MaskMaker = field(default_factory=MaskMaker)
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    saved: dict[str, tuple[SavedSequence, ...]] = field(default_factory=dict)
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
        """The pipeline's; another one after a restart."""
        return self.pipeline.scheduler

    @property
    def has_work(self) -> bool:
        """Whether a turn has something to do, or will have. Steps whose requests were all ended by a deadline do not
        count."""
        return bool(self.table or self.pending) or (bool(self.pipeline.in_flight) and not self.turn.is_left)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot."""
        return self.scheduler.num_waiting + sum(one.sequences for one in self.pending.values())

    def next_deadline(self) -> float:
        """When the next request runs out of time; infinity for never."""
        first = next_deadline(self.pipeline.scheduler)
        for one in self.pending.values():
            if one.expires:
                first = min(first, one.expires[0][0])
        return first

    def time_left(self, began: float) -> float:
        """Seconds until a step that is waited for since `began` has had its time, or a request; 0 for the step."""
        now = self.clock()
        until = math.inf if self.step_timeout_s is None else began + self.step_timeout_s
        return 0 if now >= until else max(min(until, self.next_deadline()) - now, 1e-3)

    def note_expired(self) -> None:
        """A request ran out of time: whoever waits for a step hears of it."""
        self.expired += 1
        self.waiter.wake.set()

    @property
    def awaits_background(self) -> bool:
        """Whether a turn would have nothing to do until something is ready that is made in the background."""
        return self.idle and bool(self.pending or self.masks.making) and not self.ready.is_set()

    def adapter_slots(self) -> set[int]:
        """Those that sequences have which run, wait, or may go on."""
        saved = [each.row for parts in self.saved.values() for each in parts]
        kept = [] if self.table.kept is None else self.table.kept.every_setting()
        rows = (*self.table.settings.values(), *saved, *kept)
        return {row.adapter for row in rows} | {one.adapter for one in self.pending.values()}
