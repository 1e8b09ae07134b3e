"""The latest steps in columns, for requests that take their tokens many at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from xla_engine.scheduler import Decoded

if TYPE_CHECKING:
    from xla_engine.engine.output_collector import OutputCollector
    from xla_engine.engine.sequence import LiveSequence

FLUSH_STEPS = 192  # steps in which everybody has taken what there was


class Taken(NamedTuple):
    """Steps in which a request decoded in `slot`, and when they were read."""

    slot: int
    steps: Sequence[Decoded]
    times: Sequence[float]


@dataclass(slots=True)
class _Occupancy:
    """A request decodes in `slot` in the steps from `step` on, which it has not taken, to before `until`."""

    slot: int
    step: int
    until: int | None

    def waiting(self, next_step: int) -> int:
        """Tokens that the steps before `next_step` have for it."""
        return max((next_step if self.until is None else min(next_step, self.until)) - self.step, 0)

    def covers(self, step: int) -> bool:
        return self.step <= step and (self.until is None or step < self.until)


class TokenBuffer:
    """What steps decoded and when they were read, and in which of them each request has tokens.

    A request that is eager takes each token as it comes. The others take what has gathered when they end or are
    read, and a few of them in every step, so that no step does the work of many and steps that nobody needs any more
    can be forgotten: about two laps of them are there, however long a request is.

    added: tokens that requests were given, and have taken from here.
    """

    def __init__(self) -> None:
        self.added = 0
        self._first = 0  # the step of the oldest column
        self._columns: list[Decoded] = []
        self._times: list[float] = []
        self._occupancies: dict[LiveSequence, _Occupancy] = {}  # who took longest ago first
        self._eager: dict[LiveSequence, None] = {}  # of these
        self._lazy: dict[
            OutputCollector, dict[LiveSequence, _Occupancy]
        ] = {}  # the others, by who reads them

    @property
    def next_step(self) -> int:
        """The step that is read next."""
        return self._first + len(self._columns)

    def append(self, step: int, decoded: Decoded, now: float) -> None:
        """A step was read. They come in order."""
        if not self._occupancies:
            return
        if not self._columns:
            self._first = step
        assert step == self.next_step, f"step {step} was read when {self.next_step} was due"
        self._columns.append(decoded)
        self._times.append(now)
        if len(self._columns) % FLUSH_STEPS == 0:
            stale = min((span.step for span in self._occupancies.values()), default=step + 1) - self._first
            del self._columns[:stale], self._times[:stale]
            self._first += stale

    def clear(self) -> None:
        """Forget everything that was not taken. The next step may be any."""
        for part in (self._columns, self._times, self._occupancies, self._eager, self._lazy):
            part.clear()
        self._first = 0

    # -- who decodes ------------------------------------------------------------------------------------------

    def begin(self, request: LiveSequence, slot: int, step: int, until: int | None = None) -> None:
        """A request decodes in a slot from `step` on; what it had in another it has taken."""
        self.end(request)
        self._occupancies[request] = span = _Occupancy(slot, step, until)
        if request.eager:
            self._eager[request] = None
        else:
            self._lazy.setdefault(request.collector, {})[request] = span

    def bound(self, request: LiveSequence, step: int) -> None:
        """A request does not decode from `step` on."""
        if (span := self._occupancies.get(request)) is not None:
            span.until = step if span.until is None else min(span.until, step)
            if span.step >= span.until:
                self.end(request)

    def end(self, request: LiveSequence) -> None:
        """Nothing more of a request is to be taken."""
        if self._occupancies.pop(request, None) is None:
            return
        if request in self._eager:
            del self._eager[request]
        else:
            lazy = self._lazy[request.collector]
            del lazy[request]
            if not lazy:
                del self._lazy[request.collector]
        if not self._occupancies:
            self.clear()

    def take(self, request: LiveSequence) -> Taken | None:
        """What there is for a request and it has not taken."""
        span = self._occupancies.pop(request, None)
        if span is None:
            return None
        self._occupancies[request] = span  # now the last
        begin, count = span.step - self._first, span.waiting(self.next_step)
        if not count:
            return None
        assert begin >= 0, "a step was forgotten before it was taken"
        there = slice(begin, begin + count)
        taken = Taken(span.slot, self._columns[there], self._times[there])
        span.step += count
        if span.step == span.until:
            self.end(request)
        return taken

    # -- whose turn it is -------------------------------------------------------------------------------------

    def eager(self) -> list[LiveSequence]:
        """Those that take each token as it comes."""
        return list(self._eager)

    def make_lazy(self, request: LiveSequence) -> None:
        """An eager request need not be any more."""
        if request in self._eager:
            del self._eager[request]
            self._lazy.setdefault(request.collector, {})[request] = self._occupancies[request]

    def next_to_flush(self) -> list[LiveSequence]:
        """Those whose turn it is to take what has gathered: few in every step."""
        foremost = islice(self._occupancies.items(), -(-len(self._occupancies) // FLUSH_STEPS))
        return [request for request, span in foremost if span.waiting(self.next_step) >= FLUSH_STEPS // 2]

    def streamed(self) -> Iterator[LiveSequence]:
        """The lazy ones that have a token in the latest step and a reader who wants to hear of each."""
        step = self.next_step - 1
        for collector, requests in self._lazy.items():
            if collector.every_token:
                yield from (request for request, span in requests.items() if span.covers(step))

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests so far, whether they have been taken or not."""
        spans = (span for requests in self._lazy.values() for span in requests.values())
        return self.added + sum(span.waiting(self.next_step) for span in spans)
