"""Who waits and until when: the queue of requests without a slot, deadlines, and the quanta of round-robin."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from operator import itemgetter

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.policy import Facts, Place
from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.user_policy import PolicyError, find_policy

_LATER = 1 << 62
COMPARED = 32  # under "longest_prefix", how many of those that wait longest are compared


class QueueFullError(RuntimeError):
    """The waiting queue is full; the request was refused and nothing changed."""

    code = "queue_full"


class WaitingQueue:
    """The queue in the order of the scheduling policy; push, take and remove take logarithmic time.

    If the policy does not bound waiting times, the request that waits longest becomes the head after `priority_aging`
    others have passed it. A request with k earlier ones in the queue is then taken within
    (k + 1) * (priority_aging + 1) requests.

    max_waiting: the most requests that may wait, beyond those that fit into free slots; None: unbounded.
    strict: refuse a request for which a user's policy fails.
    turns: the next number for a request that arrives or goes to the back.
    only: ids of the requests that may get a slot, None for all. Others stay in the queue and are never next.
    """

    def __init__(self, config: SchedulerConfig, only: Collection[str] | None = None) -> None:
        self.max_waiting = config.max_waiting
        self.turns = itertools.count()
        self.strict = True
        self._place = find_policy(config.scheduling_policy)
        self._aging = config.priority_aging
        self._fixed = config.scheduling_policy in policy.PREEMPTIVE
        self._by_cache = config.scheduling_policy == "longest_prefix" and config.enable_prefix_caching
        self._unbounded = config.scheduling_policy not in policy.POLICIES.keys() - policy.UNBOUNDED
        self._passed = 0  # requests taken since the one that waits longest was first passed
        self._pushed = 0
        # (place, push count, request); some entries are stale. Equal places are in order of pushes.
        self._heap: list[tuple[Place, int, RequestState]] = []
        # The waiting requests by id, longest waiting first. An OrderedDict, because finding the first key of a dict
        # scans all keys deleted before it.
        self._places: OrderedDict[str, tuple[Place, RequestState]] = OrderedDict()
        self._only = only
        self._left_out: dict[str, RequestState] = {}  # not in `only`, oldest first

    def __deepcopy__(self, memo: dict[int, object]) -> WaitingQueue:
        """A queue with copies of the requests, except those that `memo` shares. New requests get later numbers."""
        twin = copy.copy(self)
        twin.turns = itertools.count(_LATER)
        twin._heap = [(place, pushed, copy.deepcopy(state, memo)) for place, pushed, state in self._heap]
        twin._places = OrderedDict(
            (name, (place, copy.deepcopy(state, memo))) for name, (place, state) in self._places.items()
        )
        twin._left_out = {name: copy.deepcopy(state, memo) for name, state in self._left_out.items()}
        return twin

    def __len__(self) -> int:
        return len(self._places) + len(self._left_out)

    def __bool__(self) -> bool:
        """Whether there is a next in line."""
        return bool(self._places)

    def __iter__(self) -> Iterator[RequestState]:
        yield from (state for _, state in sorted(self._places.values(), key=itemgetter(0)))
        yield from self._left_out.values()

    def near(self, most: int) -> Iterator[RequestState]:
        """The requests that the next plan may take: the first `most` in line, and those that have waited longest."""
        places = self._places.values()
        yield from (state for _, state in heapq.nsmallest(most, places, key=itemgetter(0)))
        yield from (state for _, state in islice(places, most + COMPARED))

    def place(self, state: RequestState) -> Place:
        """A request's place in line, the same whether it waits or runs; the lowest goes first."""
        request = state.request
        return self._place(
            Facts(
                state.turn,
                request.priority,
                state.prompt_tokens,
                request.deadline,
                self._aging,
                request.max_tokens,
                request.cache_salt,
            )
        )

    def rank(self, state: RequestState) -> Place:
        """A request's rank when blocks run out: the highest is preempted. It does not change while it runs."""
        return self.place(state) if self._fixed else (state.arrival, state.arrival)

    def _waits(self, entry: tuple[Place, int, RequestState]) -> bool:
        place, _, state = entry
        known = self._places.get(state.request_id)
        return known is not None and known == (place, state)

    @property
    def oldest(self) -> RequestState:
        """The request that waits longest. Raises StopIteration if the queue is empty."""
        return next(iter(self._places.values()))[1]

    def next_in_line(self, cached: Callable[[RequestState], int]) -> RequestState:
        """The request that gets the next slot. cached: returns how many tokens of a request's context are cached."""
        if not self._by_cache or self._overdue:
            return self.head
        line = islice(self._places.values(), COMPARED)
        return max((state for _, state in line), key=cached)  # of equal ones the one that waits longest

    @property
    def _overdue(self) -> bool:
        return self._unbounded and self._passed >= self._aging

    @property
    def head(self) -> RequestState:
        """The request that goes next. Raises IndexError if the queue is empty."""
        if self._overdue and self._places:
            return self.oldest
        while not self._waits(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def push(self, state: RequestState, free: int = 0) -> None:
        """Add a new request. Raises QueueFullError and PolicyError.

        free: the number of free slots; as many requests do not count as waiting.
        """
        if self.max_waiting is not None and len(self) - free >= self.max_waiting:
            raise QueueFullError(
                f"request {state.request_id!r} was not accepted: {max(len(self) - free, 0)} wait and max_waiting is "
                f"{self.max_waiting}; submit it again after a step, abort one that waits, or raise the bound"
            )
        self._put(state, self.place(state) if self.strict else self._place_again(state), to_back=True)

    def put_back(self, state: RequestState, *, to_back: bool) -> None:
        """Add a preempted request, ignoring `max_waiting`. to_back: it counts as the latest arrival."""
        self._put(state, self._place_again(state), to_back=to_back)

    def _place_again(self, state: RequestState) -> Place:
        """The place of a request that was accepted before; the last place if a user's policy fails this time."""
        try:
            return self.place(state)
        except PolicyError:
            return math.inf, state.turn

    def _put(self, state: RequestState, place: Place, *, to_back: bool) -> None:
        assert state.request_id not in self._places, f"request {state.request_id!r} waits already"
        if self._only is not None and state.request_id not in self._only:
            self._left_out[state.request_id] = state
            return
        self._places[state.request_id] = place, state
        if not to_back:
            self._places.move_to_end(state.request_id, last=False)
        self._pushed += 1
        heapq.heappush(self._heap, (place, self._pushed, state))

    def take(self, state: RequestState) -> None:
        """Remove a request that gets a slot. Raises KeyError if it does not wait."""
        passes = state is not self.oldest
        self.remove(state)
        self._passed = self._passed + 1 if passes else 0

    def remove(self, state: RequestState) -> None:
        """Remove a request from anywhere in the queue. Raises KeyError if it does not wait."""
        if self._left_out.pop(state.request_id, None) is not None:
            return
        if state is self.oldest:
            self._passed = 0
        del self._places[state.request_id]
        if len(self._heap) > 4 * len(self._places) + 64:
            self._heap = [entry for entry in self._heap if self._waits(entry)]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError unless heap and places agree and every request waits."""
        waiting = {entry[2].request_id: entry[::2] for entry in self._heap if self._waits(entry)}
        if waiting != self._places or waiting.keys() & self._left_out.keys():
            raise AssertionError(f"the heap has {waiting}, not {self._places}")
        for state in self:
            if state.status not in (Status.WAITING, Status.PARKED):
                raise AssertionError(f"in the queue, but does not wait: {state}")


class Deadlines:
    """A heap of deadlines, earliest first; those of finished requests are removed lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, FinishReason, RequestState]] = []

    def add(self, state: RequestState) -> None:
        """Add a request's deadlines, if it has any."""
        for time, reason in (
            (state.request.deadline, FinishReason.DEADLINE),
            (state.request.queue_deadline, FinishReason.QUEUE_TIMEOUT),
        ):
            if time is not None:
                heapq.heappush(self._heap, (time, state.arrival, reason, state))

    @property
    def next_time(self) -> float:
        """The earliest deadline, perhaps of a finished request; infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[tuple[RequestState, FinishReason]]:
        """Remove and yield the requests due at `now`, earliest first. The caller ends each before the next."""
        while self._heap and self._heap[0][0] <= now:
            _, _, reason, state = heapq.heappop(self._heap)
            if _counts(state, reason):
                yield state, reason

    def forget_ended(self, live: int) -> None:
        """Remove the deadlines of finished requests if they are many: memory stays proportional to `live`."""
        if len(self._heap) > 4 * live + 64:
            self._heap = [entry for entry in self._heap if _counts(entry[3], entry[2])]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)


def _counts(state: RequestState, reason: FinishReason) -> bool:
    if reason is FinishReason.QUEUE_TIMEOUT:
        return state.status is Status.WAITING and state.request.queue_deadline is not None
    return state.status is not Status.FINISHED


class RoundRobin:
    """The running requests, by the step in which their quantum ends; empty if `quantum` is None.

    With R live requests on B slots, a request runs again within ceil(R / B) * (quantum + lag + 1) steps, plus one step
    for each chunk of prompts that start meanwhile.
    """

    def __init__(self, quantum: int | None, slots: int) -> None:
        self._quantum = quantum
        self._slots = slots
        # (the step in which its quantum ends, request); some entries are stale.
        self._running: deque[tuple[int, RequestState]] = deque()

    def __bool__(self) -> bool:
        """Whether any request may have a quantum."""
        return bool(self._running)

    def begin(self, state: RequestState, step: int) -> None:
        """Begin the quantum of a request that runs from `step` on."""
        if self._quantum is None:
            return
        state.turn_ends = step + (state.request.quantum or self._quantum)
        self._running.append((state.turn_ends, state))
        if len(self._running) > 4 * self._slots + 64:
            self._running = deque(entry for entry in self._running if _has_turn(*entry))

    def expired(self, step: int) -> RequestState | None:
        """The request whose quantum ended first, at `step` or before; None if there is none."""
        ends = self.next_end()
        return None if ends is None or ends > step else self._running[0][1]

    def next_end(self) -> int | None:
        """The earliest end of a quantum, perhaps in the past; None if no request runs."""
        while self._running and not _has_turn(*self._running[0]):
            self._running.popleft()
        return self._running[0][0] if self._running else None


def _has_turn(ends: int, state: RequestState) -> bool:
    return state.holds_slot and state.turn_ends == ends
