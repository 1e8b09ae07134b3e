"""What others are told of an engine while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xla_engine.scheduler import Events, FinishReason, Plan, Request


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observer:
    """Functions that an engine calls with its lock held, so they should be short; None is not called.

    queued: with each sequence as it is queued.
    started: with each plan as its step is started.
    read: with the plan of each step that was read, and what came of it.
    ended: with the id of each sequence that ends, and why.
    """

    queued: Callable[[Request], object] | None = None
    started: Callable[[Plan], object] | None = None
    read: Callable[[Plan, Events], object] | None = None
    ended: Callable[[str, FinishReason], object] | None = None


class Observers:
    """Those of one engine, told in the order in which they came."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, observer: Observer) -> None:
        """Tell it from now on."""
        self._all = (*self._all, observer)

    def remove(self, observer: Observer) -> None:
        """Tell it no more."""
        self._all = tuple(each for each in self._all if each is not observer)

    @contextmanager
    def having(self, observer: Observer) -> Iterator[None]:
        """Tell it what happens inside the block."""
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
