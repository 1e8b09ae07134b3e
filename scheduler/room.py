"""What requests hold on the device: slots, what slots still hold of others, and pages."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler import policy
from scheduler.block_pool import BlockPool
from scheduler.config import SchedulerConfig
from scheduler.plan import BlockTable, Slot
from scheduler.prefix_cache import PrefixCache
from scheduler.request import Status
from scheduler.slots import Slots
from scheduler.state import RequestState


class Room:
    """Slots for requests; where configured, the content they leave behind (`cache`), and pages that slots borrow.

    Times are steps: content that was used in a later one is overwritten later.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.slots = Slots(config.max_num_seqs)
        self.cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            self.cache = PrefixCache(config.max_num_seqs, config.block_size, config.cache_key)
        self._pool: BlockPool | None = None
        if config.num_blocks is not None:
            self._pool = BlockPool(config.num_blocks, config.block_size)

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have pages enough, with the arithmetic; None if it can."""
        return None if self._pool is None else self._pool.never_fits(prompt_tokens + max_tokens - 1)

    def missing(self, state: RequestState) -> str | None:
        """What a request needs and there is not enough of, in words; None: it can `enter`."""
        if not self.slots.num_free:
            return f"no free slot: {len(self.slots)} of {len(self.slots)} busy"
        if self._pool is None or self._pool.can_admit(self._blocks_for(state)):
            return None
        return f"needs {self._blocks_for(state)} blocks; {self._pool.num_free} of {self._pool.num_blocks} are free"

    def suffices_without(self, others: Iterable[RequestState], state: RequestState) -> bool:
        """Whether there would be pages enough for a request if all of `others` gave theirs up."""
        if self._pool is None:
            return True
        gained = sum(len(other.blocks) for other in others)
        return self._blocks_for(state) <= self._pool.num_free + gained

    def enter(self, state: RequestState) -> BlockTable | None:
        """Give a request a slot, and its pages where slots have none of their own."""
        state.tenancy, state.holds_slot = self._choose_slot(state), True
        if self._pool is None:
            return None
        state.blocks = tuple(self._pool.allocate(self._blocks_for(state)))
        return BlockTable(slot=state.tenancy, request_id=state.request_id, blocks=state.blocks)

    def leave(self, state: RequestState, step: int) -> None:
        """Take back what a request holds."""
        kept = self.cache is not None and self.cache.length(state.slot.index) > 0
        self.slots.release(state.slot, _use(step) if kept else 0)
        if self._pool is not None:
            self._pool.release(reversed(state.blocks))
            state.blocks = ()
        state.holds_slot = False

    def retain(self, state: RequestState) -> None:
        """Enter what a request has left in its slot, if it had one."""
        if self.cache is not None and state.tenancy is not None:
            self.cache.end(state)

    def discard(self, state: RequestState) -> None:
        """Enter that what a request has left in its slot may be no numbers."""
        if self.cache is not None and state.tenancy is not None:
            self.cache.discard(state)

    def used(self, index: int, step: int) -> None:
        """The content of a slot was copied from."""
        self.slots.revalue(index, _use(step))

    def forget(self) -> None:
        """Nothing that slots hold is found again."""
        if self.cache is not None:
            self.cache.clear()
            for index in range(len(self.slots)):
                self.slots.revalue(index, 0)

    def check(self, states: Iterable[RequestState]) -> None:
        """Raise AssertionError on any broken invariant."""
        self.slots.check()
        if self.cache is not None:
            self.cache.check()
        if self._pool is not None:
            self._pool.check(state.blocks for state in states)

    def _choose_slot(self, state: RequestState) -> Slot:
        """The slot that holds most of the request's context, if it is free and not worth more to others; else any."""
        if self.cache is not None and state.status is Status.WAITING and state.request.reads_prefix_cache:
            index, held = self.cache.match(state)
            spare = self.slots.num_free > 1 and policy.worth_keeping(held, self.cache.length(index))
            if held and self.slots.is_free(index) and not spare:
                return self.slots.acquire(index)
        return self.slots.acquire()

    def _blocks_for(self, state: RequestState) -> int:
        """Pages for all a request may ever write: nobody runs out of them on the way."""
        assert self._pool is not None
        return self._pool.blocks_for(len(state.request.prompt_token_ids) + state.request.max_tokens - 1)


def _use(step: int) -> int:
    """What content is worth that is used in a step: the longest unused goes first."""
    return step + 1
