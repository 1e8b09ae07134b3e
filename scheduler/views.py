"""What can be asked of a scheduler."""

from __future__ import annotations

from collections.abc import Callable

from xla_engine.scheduler import snapshot
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.kv.preemption import Preemption
from xla_engine.scheduler.queue.waiting import WaitingQueue
from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.snapshot import Counters, Snapshot, Times
from xla_engine.scheduler.steps.commit import Committer
from xla_engine.scheduler.steps.decode import Decoding
from xla_engine.scheduler.steps.running import Running


class SchedulerViews:
    """Where a scheduler stands. Nothing here changes what it does."""

    config: SchedulerConfig
    _states: dict[str, RequestState]
    _kv: KVAllocator
    _waiting: WaitingQueue
    _committer: Committer
    _decoding: Decoding
    _running: Running
    _preemption: Preemption
    _cached_tokens: int
    _next_step: int
    _submitted: int
    _finished: dict[FinishReason, int]

    def _settle(self) -> None:
        for state in self._states.values():
            state.settle(self._committer.steps)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states)

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return self._kv.slots.num_free

    @property
    def blocks_used(self) -> int | None:
        """KV blocks that requests hold; None where slots have memory of their own."""
        return None if self._kv.blocks is None else self._kv.blocks.pool.num_used

    @property
    def positions_used(self) -> int:
        """KV entries that the plans made so far write for the requests that hold a slot."""
        return sum(state.position(self._next_step) for state in self._running.holders())

    @property
    def num_waiting(self) -> int:
        """Requests without a slot that have tokens to be planned: new ones, and those that lost it."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests past the queue: in a slot, or with all tokens planned and some in flight."""
        return len(self._states) - len(self._waiting)

    @property
    def decoding(self) -> list[str]:
        """The requests that decode in the next plan, unless they lose their slots in it."""
        running = self._running
        parts = (self._decoding, running.speculating, running.host_gated)
        return [state.request_id for part in parts for state in part]

    def snapshot(self, times: Callable[[str], Times | None] = lambda request_id: None) -> Snapshot:
        """Slots, queue and counters, with the reason of each live request's last decision, and its times."""
        self._settle()
        admitted = [
            state for state in self._states.values() if state.status not in (Status.WAITING, Status.PARKED)
        ]
        turns = self.config.scheduling_policy == "round_robin"
        return snapshot.take(
            self._kv.slots, self._waiting, admitted, self.counters(), times, takes_turns=turns
        )

    def counters(self) -> Counters:
        """Totals since the start."""
        return Counters(
            steps_planned=self._next_step,
            steps_committed=self._committer.steps,
            submitted=self._submitted,
            finished=dict(self._finished),
            tokens_credited=self._committer.credited,
            tokens_dropped=self._committer.dropped,
            preemptions=self._preemption.count,
            cached_tokens=self._cached_tokens,
        )
