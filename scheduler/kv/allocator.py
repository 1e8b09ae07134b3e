"""What requests hold on the device: slots, what slots still hold of others, and pages."""

from __future__ import annotations

from collections.abc import Iterable

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.block_manager import Pages
from xla_engine.scheduler.kv.slot_prefix_cache import SlotPrefixCache
from xla_engine.scheduler.kv.slots import Slots
from xla_engine.scheduler.plan import Slot, Swap
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState


class Room:
    """Slots for requests, and pages where slots have none of their own.

    cache: what finds the content that requests leave behind, in slots or in pages; None where nothing is to be found.
    Times are steps: content that was used in a later one is overwritten later.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.slots = Slots(config.max_num_seqs)
        self.pages = None if config.num_blocks is None else Pages(config)
        self._held: SlotPrefixCache | None = None  # by slots
        self.cache: SlotPrefixCache | Pages | None = None
        if config.enable_prefix_caching:
            if self.pages is None:
                self._held = SlotPrefixCache(config.max_num_seqs, config.block_size, config.cache_key)
            self.cache = self.pages or self._held

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have pages enough, with the arithmetic; None if it can."""
        return None if self.pages is None else self.pages.never_fits(prompt_tokens, max_tokens)

    def missing(self, state: RequestState) -> str | None:
        """What a request needs and there is not enough of, in words; None: it can `enter`."""
        if not self.slots.num_free:
            return f"no free slot: {len(self.slots)} of {len(self.slots)} busy"
        return None if self.pages is None else self.pages.missing(state)

    def suffices_without(self, others: Iterable[RequestState], state: RequestState) -> bool:
        """Whether there would be pages enough for a request if all of `others` gave theirs up."""
        return self.pages is None or self.pages.suffices_without(others, state)

    def enter(self, state: RequestState) -> None:
        """Give a request a slot, and its pages where slots have none of their own."""
        state.tenancy, state.holds_slot = self._choose_slot(state), True
        if self.pages is not None:
            self.pages.enter(state)

    def resume(self, state: RequestState, length: int) -> Swap:
        """What comes back from the host to a request that has entered."""
        if self.pages is not None:
            return self.pages.resume(state, length)
        if self._held is not None:
            self._held.begin(state, state.context_tokens)
        return Swap(slot=state.slot, request_id=state.request_id, length=length)

    def park(self, state: RequestState, length: int) -> Swap:
        """What goes to the host of a request that is about to leave."""
        blocks = () if self.pages is None else state.blocks[: self.pages.pool.blocks_for(length)]
        return Swap(slot=state.slot, request_id=state.request_id, length=length, blocks=blocks)

    def leave(self, state: RequestState, step: int) -> None:
        """Take back what a request holds."""
        kept = self._held is not None and self._held.length(state.slot.index) > 0
        self.slots.release(state.slot, _use(step) if kept else 0)
        if self.pages is not None:
            self.pages.leave(state)
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
        if self._held is not None:
            self.slots.revalue(index, _use(step))

    def forget(self) -> None:
        """Nothing that requests have left is found again."""
        if self.pages is not None:
            self.pages.pool.forget_all()
        if self._held is not None:
            self._held.clear()
            for index in range(len(self.slots)):
                self.slots.revalue(index, 0)

    def check(self, states: Iterable[RequestState], step: int) -> None:
        """Raise AssertionError on any broken invariant."""
        self.slots.check()
        if self._held is not None:
            self._held.check()
        if self.pages is not None:
            self.pages.check(states, step)

    def _choose_slot(self, state: RequestState) -> Slot:
        """The slot that holds most of the request's context, if it is free and not worth more to others; else any."""
        if self._held is not None and state.status is Status.WAITING and state.request.reads_prefix_cache:
            index, held = self._held.match(state)
            spare = self.slots.num_free > 1 and policy.worth_keeping(held, self._held.length(index))
            if held and self.slots.is_free(index) and not spare:
                return self.slots.acquire(index)
        return self.slots.acquire()


def _use(step: int) -> int:
    """What content is worth that is used in a step: the longest unused goes first."""
    return step + 1
