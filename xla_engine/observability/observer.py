"""Callbacks for events of an engine while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xla_engine.scheduler import Events, FinishReason, Plan, Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observer:
    """Callbacks of an engine. They run with its lock held, so they should be short. None disables one.

    queued: called with each sequence that is queued.
    started: called with each plan when its step is started.
    read: called with the plan and the events of each step that was read.
    ended: called with the id and the finish reason of each sequence that ends.
    """

    queued: Callable[[Request], object] | None = None
    started: Callable[[Plan], object] | None = None
    read: Callable[[Plan, Events], object] | None = None
    ended: Callable[[str, FinishReason], object] | None = None


class Observers:
    """The observers of one engine, called in the order in which they were added."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, observer: Observer) -> None:
        self._all = (*self._all, observer)

    def remove(self, observer: Observer) -> None:
        self._all = tuple(each for each in self._all if each is not observer)

    @contextmanager
    def having(self, observer: Observer) -> Iterator[None]:
        """Add an observer within the context."""
        self.add(observer)
        try:
            yield
        finally:
            self.remove(observer)

    def queued(self, request: Request) -> None:
        for each in self._all:
            if each.queued is not None:
                each.queued(request)

    def started(self, plan: Plan) -> None:
        for each in self._all:
            if each.started is not None:
                each.started(plan)

    def read(self, plan: Plan, events: Events) -> None:
        for each in self._all:
            if each.read is not None:
                each.read(plan, events)

    def ended(self, name: str, reason: FinishReason) -> None:
        for each in self._all:
            if each.ended is not None:
                each.ended(name, reason)
