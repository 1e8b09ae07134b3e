"""The queue of requests that have no slot: those that never had one, and those that lost it."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from operator import itemgetter

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.policy import Facts, Place
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.user_policy import PolicyError, find_policy

_LATER = 1 << 62
COMPARED = 32  # requests of which the one with the longest cached prefix goes next


class QueueFullError(RuntimeError):
    """The waiting queue is at its bound; the request was not taken and nothing changed."""

    code = "queue_full"


class WaitingQueue:
    """The order of a scheduling policy, with push, pop and removal in logarithmic time.

    Under a policy that bounds no wait by itself, the request that waits longest is the head after `priority_aging`
    others were taken before it: one with k in the queue that came before it gets its turn within
    (k + 1) * (priority_aging + 1) requests taken.

    max_waiting: most requests to take at the back beyond the free slots, None for no bound.
    strict: whether a request for which a caller's policy fails is not taken.
    turns: numbers for requests that come, or go to the back.
    only: ids that may get a slot, None for all. The others are held back: in the queue, and never next.
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
        self._passed = 0  # requests taken while the one that waits longest was passed over
        self._pushed = 0
        self._heap: list[
            tuple[Place, int, RequestState]
        ] = []  # and of the past, in the order pushed where places tie
        # Of the requests that wait, by id, the longest first. An OrderedDict, because finding the first key of a dict
        # scans all that were deleted before it.
        self._places: OrderedDict[str, tuple[Place, RequestState]] = OrderedDict()
        self._only = only
        self._held: dict[str, RequestState] = {}  # held back, oldest first

    def __deepcopy__(self, memo: dict[int, object]) -> WaitingQueue:
        """A queue with the same requests, copied as `memo` says. Who comes to it next has a number behind all."""
        twin = copy.copy(self)
        twin.turns = itertools.count(_LATER)
        twin._heap = [(place, pushed, copy.deepcopy(state, memo)) for place, pushed, state in self._heap]
        twin._places = OrderedDict(
            (name, (place, copy.deepcopy(state, memo))) for name, (place, state) in self._places.items()
        )
        twin._held = {name: copy.deepcopy(state, memo) for name, state in self._held.items()}
        return twin

    def __len__(self) -> int:
        return len(self._places) + len(self._held)

    def __bool__(self) -> bool:
        """Whether there is a next in line."""
        return bool(self._places)

    def __iter__(self) -> Iterator[RequestState]:
        yield from (state for _, state in sorted(self._places.values(), key=itemgetter(0)))
        yield from self._held.values()

    def place(self, state: RequestState) -> Place:
        """A request's place in line; the lowest goes first. It is the same whether the request waits or runs."""
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
        """A request's rank when blocks are too few: the highest loses its own. It does not change while it runs."""
        return self.place(state) if self._fixed else (state.arrival, state.arrival)

    def _waits(self, entry: tuple[Place, int, RequestState]) -> bool:
        place, _, state = entry
        known = self._places.get(state.request_id)
        return known is not None and known == (place, state)

    @property
    def oldest(self) -> RequestState:
        """The request that waits longest. Raises StopIteration when empty."""
        return next(iter(self._places.values()))[1]

    def longest_waiting(self, count: int) -> list[RequestState]:
        """The `count` requests that wait longest, or all; the oldest alone if enough others have gone before it."""
        count = 1 if self._overdue else count
        return [state for _, state in islice(self._places.values(), count)]

    def next_in_line(self, cached: Callable[[RequestState], int]) -> RequestState:
        """The request that gets the next slot. cached: how many tokens of a request's context are cached."""
        if not self._by_cache:
            return self.head
        line = self.longest_waiting(COMPARED)
        return line[policy.most_cached([cached(state) for state in line])]

    @property
    def _overdue(self) -> bool:
        return self._unbounded and self._passed >= self._aging

    @property
    def head(self) -> RequestState:
        """The request that goes next. Raises IndexError when empty."""
        if self._overdue and self._places:
            return self.oldest
        while not self._waits(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def push(self, state: RequestState, free: int = 0) -> None:
        """Put a new request in its place. Raises QueueFullError, and PolicyError.

        free: slots that as many requests of the queue will get, and so do not count as waiting.
        """
        if self.max_waiting is not None and len(self) - free >= self.max_waiting:
            raise QueueFullError(
                f"request {state.request_id!r} was not taken: {max(len(self) - free, 0)} wait and max_waiting is "
                f"{self.max_waiting}; submit it again after a step, abort one that waits, or raise the bound"
            )
        self._put(state, self.place(state) if self.strict else self._place_again(state), to_back=True)

    def put_back(self, state: RequestState, *, to_back: bool) -> None:
        """Put a request in its place, whatever the bound: it was taken once. to_back: it is the latest to come."""
        self._put(state, self._place_again(state), to_back=to_back)

    def _place_again(self, state: RequestState) -> Place:
        """The place of a request that was taken once; the last where a caller's policy fails now."""
        try:
            return self.place(state)
        except PolicyError:
            return math.inf, state.turn

    def _put(self, state: RequestState, place: Place, *, to_back: bool) -> None:
        assert state.request_id not in self._places, f"request {state.request_id!r} waits already"
        if self._only is not None and state.request_id not in self._only:
            self._held[state.request_id] = state
            return
        self._places[state.request_id] = place, state
        if not to_back:
            self._places.move_to_end(state.request_id, last=False)
        self._pushed += 1
        heapq.heappush(self._heap, (place, self._pushed, state))

    def take(self, state: RequestState) -> None:
        """Take out a request that gets a slot. Raises KeyError when it does not wait."""
        passes = state is not self.oldest
        self.remove(state)
        self._passed = self._passed + 1 if passes else 0

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands. Raises KeyError when it does not wait."""
        if self._held.pop(state.request_id, None) is not None:
            return
        if state is self.oldest:
            self._passed = 0
        del self._places[state.request_id]
        if len(self._heap) > 4 * len(self._places) + 64:
            self._heap = [entry for entry in self._heap if self._waits(entry)]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Raise AssertionError unless everything in here waits, in its place."""
        waiting = {entry[2].request_id: entry[::2] for entry in self._heap if self._waits(entry)}
        if waiting != self._places or waiting.keys() & self._held.keys():
            raise AssertionError(f"the heap has {waiting}, not {self._places}")
        for state in self:
            if state.status not in (Status.WAITING, Status.PARKED):
                raise AssertionError(f"in the queue, but does not wait: {state}")
