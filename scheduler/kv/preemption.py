"""Preemption: which request loses its slot, and whether it is parked, recomputed or replayed."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import replace

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.moves import Swap
from xla_engine.scheduler.plan import Decision
from xla_engine.scheduler.queue import RoundRobin, WaitingQueue
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState


class Preemption:
    """Takes slots and blocks from requests, and collects the resulting moves for the next plan.

    A request's place in line does not change by itself, and no request loses its slot to one behind it. So the first
    of all live requests is never preempted, and an arrival preempts no more than it needs.

    holders: returns every request that holds a slot.
    detach: called with a request and the way it is preempted; must stop planning for it.
    parked_tokens: KV entries on the host, or on their way there.
    count: preemptions since start-up.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVAllocator,
        waiting: WaitingQueue,
        *,
        holders: Callable[[], Iterable[RequestState]],
        detach: Callable[[RequestState, str], None],
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._holders = holders
        self._detach = detach
        self._parks: list[tuple[RequestState, Swap]] = []  # since the last plan
        self._replays: list[RequestState] = []  # since the last plan that was not empty
        # The head of the queue, if no request behind it holds a slot.
        self._without_victim: RequestState | None = None
        # A heap of slot holders, last in line first; some entries are stale.
        self._last: list[tuple[float, int, int, RequestState]] = []
        self._entered = 0
        self.parked_tokens = 0
        self.count = 0

    def __bool__(self) -> bool:
        """Whether the next plan parks a request."""
        return bool(self._parks)

    def preempt(
        self, state: RequestState, step: int, *, how: str | None = None, to_back: bool = False
    ) -> Decision:
        """Preempt a request that holds a slot, before `step` is planned; see `Scheduler.preempt`."""
        length = state.position(step)
        how = self._way(state, length, how)
        decision = state.decide(how, f"slot {state.slot.index} was preempted")
        self._detach(state, how)
        self._kv.retain(state)
        if how == "park":
            self._parks.append((state, self._kv.park(state, length)))
            state.parked = length
            self.parked_tokens += length
        self._kv.leave(state, step)
        state.planned_before, state.last_step, state.reached = state.planned(step), None, length
        if how == "replay":
            self.replay(state)
        state.status = Status.PARKED if how == "park" else Status.WAITING
        state.request = replace(state.request, queue_deadline=None)  # it has had a slot in time
        if to_back:
            state.turn = next(self._waiting.turns)
        self._waiting.put_back(state, to_back=to_back)
        self.count += 1
        return decision

    def _way(self, state: RequestState, length: int, how: str | None) -> str:
        """How to preempt a request of `length` KV entries. Raises ValueError if it cannot be done as asked."""
        if state.status is Status.PREFILLING:
            return "recompute"
        if how == "recompute" and not self._config.keeps_tokens:
            raise ValueError(
                "no generated tokens are kept to recompute: set prefill_equals_decode and preemption, park or replay"
            )
        return how or policy.way_to_preempt(
            length,
            self.parked_tokens,
            swap_tokens=self._config.swap_tokens,
            recompute_tokens=self._config.recompute_tokens,
            prefill_equals_decode=self._config.keeps_tokens,
        )

    def replay(self, state: RequestState) -> None:
        """Make a waiting request start over, because its tokens were not kept."""
        state.start_over()
        self._replays.append(state)

    def make_room(self, head: RequestState, step: int) -> Decision | None:
        """Preempt the last in line of the slot holders, if `head` is before it and would then have enough blocks."""
        if not self._config.preemption or head is self._without_victim:
            return None
        place = self._waiting.place
        if not self._is_before_some(head):
            self._without_victim = head
            return None
        later = [state for state in self._holders() if place(state) > place(head)]
        if not self._kv.suffices_without(later, head):
            return None  # preempting all of them would not be enough
        return self.preempt(max(later, key=place), step)

    def _is_before_some(self, head: RequestState) -> bool:
        """Whether some slot holder has a later place than `head`; amortised logarithmic time."""
        while self._last:
            turn, tie, _, state = self._last[0]
            if state.holds_slot and self._waiting.place(state) == (-turn, -tie):
                return (-turn, -tie) > self._waiting.place(head)
            heapq.heappop(self._last)
        return False

    def admitted(self, state: RequestState) -> None:
        """Note that the head of the queue got a slot."""
        self._without_victim = None
        if not self._config.preemption:
            return
        turn, tie = self._waiting.place(state)
        self._entered += 1
        heapq.heappush(self._last, (-turn, -tie, self._entered, state))
        if len(self._last) > 4 * self._config.max_num_seqs + 64:
            self._last = [entry for entry in self._last if entry[3].holds_slot]
            heapq.heapify(self._last)

    def is_in_vain(self, head: RequestState) -> bool:
        """Whether `make_room` has found that no slot holder is behind the head of the queue."""
        return head is self._without_victim

    def grow(self, others: Iterable[RequestState], step: int) -> list[Decision]:
        """Give rows the blocks that they write to in `step`, first in line first; preempt the last in line if needed.

        others: constrained and speculating requests that decode in `step`. `scheduler.kv.block_manager` bounds the
            waiting time.
        """
        blocks, taken = self._kv.blocks, []
        assert blocks is not None
        short = blocks.due(step)
        short += (state for state in others if blocks.is_short(state, step))
        if len(short) > blocks.pool.num_free:
            short.sort(key=self._waiting.rank)
        for state in short:
            while state.holds_slot and not blocks.grow(state, step):
                taken.append(self.preempt(max(self._holders(), key=self._waiting.rank), step))
        return taken

    def park_expired(self, round_robin: RoundRobin, step: int) -> list[Decision]:
        """Park requests whose quantum is over, the longest over first.

        Parks one for each waiting request that has no free slot, and as many as the next in line needs for its blocks.
        """
        taken: list[Decision] = []
        short = len(self._waiting) - self._kv.slots.num_free
        while (state := round_robin.expired(step)) is not None and self._waiting:
            if short <= 0 and self._kv.missing(self._waiting.head) is None:
                break
            if self.parked_tokens + state.position(step) > self._config.swap_tokens:
                break
            short -= 1
            taken.append(self.preempt(state, step, how="park", to_back=True))
        return taken

    def release(self, state: RequestState) -> None:
        """Free the host memory of a request that resumes or has ended."""
        self.parked_tokens -= state.parked
        state.parked = 0

    def take_parks(self) -> tuple[Swap, ...]:
        """Remove and return the parks for the plan being made, without requests that have ended since."""
        if not self._parks:
            return ()
        parks = tuple(swap for state, swap in self._parks if state.status is not Status.FINISHED)
        self._parks.clear()
        return parks

    def take_replays(self) -> tuple[str, ...]:
        """Remove and return the requests that start over, without those that have ended since."""
        if not self._replays:
            return ()
        replays = tuple(state.request_id for state in self._replays if state.status is not Status.FINISHED)
        self._replays.clear()
        return replays
