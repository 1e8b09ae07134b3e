"""Buffers the tokens of the latest steps, so that requests can take many at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.observability.distributions import Histograms
from xla_engine.observability.histogram import Histogram
from xla_engine.scheduler import Decoded

FLUSH_STEPS = 192  # every buffered request takes its tokens at least once in this many steps


class BufferedRequest(Protocol):
    """A request that takes its tokens from the buffer.

    immediate: it must process each token as it arrives. collector: receives its output.
    last_token_time: that of the latest token it has taken; None without any.
    """

    @property
    def immediate(self) -> bool: ...
    @property
    def collector(self) -> OutputCollector: ...
    @property
    def last_token_time(self) -> float | None: ...


T = TypeVar("T", bound=BufferedRequest)


class TokenGaps(Generic[T]):
    """Inter-token times of buffered rows, which decode in every step: added for all of them at once, once a step.

    Counts how many rows have a token in each step, from the steps in which rows begin and end.

    The inter-token time of a row is the time since the previous step if it had a token in that, too. Only rows that
    begin are looked at one by one.
    """

    def __init__(self, histogram: Histogram) -> None:
        """histogram: of the seconds between tokens."""
        self._histogram = histogram
        self._rows = 0  # rows with a token in the latest step
        self._last = 0.0  # when that step was read
        self._begin: dict[int, dict[T, None]] = {}  # by future step: rows whose first token is in it
        self._ends: dict[int, int] = {}  # by future step: how many rows have no token from it on

    def read(self, step: int, now: float) -> None:
        """Add a step that was read; while there are rows, every step must come, in order."""
        self._rows -= self._ends.pop(step, 0)
        if self._rows:
            self._histogram.add(now - self._last, self._rows)
        if (new := self._begin.pop(step, None)) is not None:
            self._rows += len(new)
            for request in new:
                if (before := request.last_token_time) is not None:
                    self._histogram.add(now - before)
        self._last = now

    def join(self, request: T, step: int, until: int | None) -> None:
        """Note that a row has tokens from the future `step` on, to before `until`; None: without end."""
        self._begin.setdefault(step, {})[request] = None
        if until is not None:
            self._ends[until] = self._ends.get(until, 0) + 1

    def bound(self, until: int | None, earlier: int) -> None:
        """Note that a row ends sooner, before the future step `earlier`. until: its end so far."""
        if until is not None:
            self._ends[until] -= 1
        self._ends[earlier] = self._ends.get(earlier, 0) + 1

    def leave(self, request: T, step: int, until: int | None, next_step: int) -> None:
        """Note that a row has no token from `next_step` on. step, until: as in `join`."""
        if until is not None and until < next_step:
            return  # it has ended already
        if until is not None:
            self._ends[until] -= 1
        if request in self._begin.get(step, ()):
            del self._begin[step][request]
        else:
            self._rows -= 1

    def clear(self) -> None:
        """Forget all rows."""
        self._rows = 0
        self._begin.clear()
        self._ends.clear()


class Taken(NamedTuple):
    """Steps in which a request decoded in `slot`, and when they were read.

    immediate: the request must process each token separately.
    """

    slot: int
    steps: Sequence[Decoded]
    times: Sequence[float]
    immediate: bool


@dataclass(slots=True)
class _Occupancy:
    """The steps in which a request decodes in `slot`: from `step`, the first that it has not taken, to before `until`.

    began: its first step, or the first since it became buffered.
    """

    slot: int
    step: int
    until: int | None
    began: int

    def waiting(self, next_step: int) -> int:
        """Tokens that the steps before `next_step` hold for the request."""
        return max((next_step if self.until is None else min(next_step, self.until)) - self.step, 0)

    def covers(self, step: int) -> bool:
        return self.step <= step and (self.until is None or step < self.until)


class TokenBuffer(Generic[T]):
    """The tokens of the latest steps and when they were read, and which steps and slot each request has decoded in.

    An immediate request takes each token as it arrives. A buffered request takes its tokens when it ends or is read.
    In addition, a few buffered requests take theirs in every step. This spreads the work over steps and bounds the
    buffer to about twice `FLUSH_STEPS` steps.

    added: tokens that requests have received, directly or from here.
    histograms: the time histograms; for buffered requests, inter-token times are added here, once a step.
    """

    def __init__(self) -> None:
        self.added = 0
        self.histograms = Histograms()
        self._gaps: TokenGaps[T] = TokenGaps(self.histograms.inter_token_seconds)
        self._first = 0  # the step of the oldest column
        self._columns: list[Decoded] = []
        self._times: list[float] = []
        self._occupancies: dict[T, _Occupancy] = {}  # least recent `take` first
        self._immediate: dict[T, None] = {}  # the immediate requests among them
        self._buffered: dict[OutputCollector, dict[T, _Occupancy]] = {}  # the others, by collector

    @property
    def next_step(self) -> int:
        """The number of the next step to be read."""
        return self._first + len(self._columns)

    def append(self, step: int, decoded: Decoded, now: float) -> None:
        """Add a step that was read, in order of steps."""
        if not self._occupancies:
            return
        if not self._columns:
            self._first = step
        assert step == self.next_step, f"step {step} was read when {self.next_step} was due"
        self._columns.append(decoded)
        self._times.append(now)
        self._gaps.read(step, now)
        if len(self._columns) % FLUSH_STEPS == 0:
            oldest = min(occupancy.step for occupancy in self._occupancies.values())
            stale = oldest - self._first
            del self._columns[:stale], self._times[:stale]
            self._first += stale

    def clear(self) -> None:
        """Forget everything; the next step may have any number."""
        for part in (self._columns, self._times, self._occupancies, self._immediate, self._buffered):
            part.clear()
        self._gaps.clear()
        self._first = 0

    def begin(self, request: T, slot: int, step: int, until: int | None = None) -> None:
        """Note that a request decodes in a slot from `step` on; it must have taken its tokens from other slots."""
        self.end(request)
        self._occupancies[request] = occupancy = _Occupancy(slot, step, until, step)
        if request.immediate:
            self._immediate[request] = None
        else:
            self._add_buffered(request, occupancy)

    def _add_buffered(self, request: T, occupancy: _Occupancy) -> None:
        self._buffered.setdefault(request.collector, {})[request] = occupancy
        self._gaps.join(request, occupancy.began, occupancy.until)

    def bound(self, request: T, step: int) -> None:
        """Note that a request does not decode from `step` on."""
        if (occupancy := self._occupancies.get(request)) is None:
            return
        if occupancy.until is None or step < occupancy.until:
            if request not in self._immediate:
                self._gaps.bound(occupancy.until, step)
            occupancy.until = step
        if occupancy.step >= occupancy.until:
            self.end(request)

    def end(self, request: T) -> None:
        """Forget a request and the tokens it has not taken."""
        if (occupancy := self._occupancies.pop(request, None)) is None:
            return
        if request in self._immediate:
            del self._immediate[request]
        else:
            self._gaps.leave(request, occupancy.began, occupancy.until, self.next_step)
            waiting = self._buffered[request.collector]
            del waiting[request]
            if not waiting:
                del self._buffered[request.collector]
        if not self._occupancies:
            self.clear()

    def take(self, request: T) -> Taken | None:
        """Take the tokens of a request; None if there are none."""
        occupancy = self._occupancies.pop(request, None)
        if occupancy is None:
            return None
        self._occupancies[request] = occupancy  # move to the end
        begin, count = occupancy.step - self._first, occupancy.waiting(self.next_step)
        if not count:
            return None
        assert begin >= 0, "a step was forgotten before it was taken"
        there = slice(begin, begin + count)
        taken = Taken(occupancy.slot, self._columns[there], self._times[there], request in self._immediate)
        occupancy.step += count
        if occupancy.step == occupancy.until:
            self.end(request)
        return taken

    def waiting(self, request: T, skip: int = 0) -> list[int]:
        """The tokens of a buffered request after the first `skip`, without taking them."""
        if (occupancy := self._occupancies.get(request)) is None or request in self._immediate:
            return []
        begin = occupancy.step - self._first
        there = slice(begin + max(skip, 0), begin + occupancy.waiting(self.next_step))
        return [column.tokens[occupancy.slot] for column in self._columns[there]]

    def immediate(self) -> list[T]:
        """The immediate requests."""
        return list(self._immediate)

    def make_buffered(self, request: T) -> None:
        """Turn an immediate request into a buffered one."""
        if request in self._immediate:
            del self._immediate[request]
            occupancy = self._occupancies[request]
            occupancy.began = max(occupancy.began, self.next_step)
            self._add_buffered(request, occupancy)

    def next_to_flush(self) -> list[T]:
        """The few requests that are due to take their tokens in this step."""
        oldest = islice(self._occupancies.items(), -(-len(self._occupancies) // FLUSH_STEPS))
        return [
            request for request, occupancy in oldest if occupancy.waiting(self.next_step) >= FLUSH_STEPS // 2
        ]

    def streamed(self) -> Iterator[T]:
        """Yield the buffered requests with a token in the latest step whose collectors want every token."""
        step = self.next_step - 1
        for collector, requests in self._buffered.items():
            if collector.every_token:
                yield from (request for request, occupancy in requests.items() if occupancy.covers(step))

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests so far, taken or not."""
        occupancies = (occupancy for requests in self._buffered.values() for occupancy in requests.values())
        return self.added + sum(occupancy.waiting(self.next_step) for occupancy in occupancies)
