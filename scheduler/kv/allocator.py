"""Allocates slots and KV blocks to requests, and finds what earlier requests have left there."""

from collections.abc import Iterable

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.block_hashes import BlockHashes
from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.kv.features import Features
from xla_engine.scheduler.kv.prefix_states import PrefixStates
from xla_engine.scheduler.kv.slot_prefix_cache import SlotPrefixCache
from xla_engine.scheduler.kv.slots import Slots
from xla_engine.scheduler.plan import Continuation, Slot, Swap
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState


class KVAllocator:
    """Allocates slots and, with a block pool, blocks.

    blocks: None without a block pool, when every slot has its own memory.
    cache: finds cached prefixes in slots or blocks; None without prefix caching.
    states: the saved states of recurrent layers, which limit what can be reused of a prefix; None if there are none.
    features: the places of pictures' features; None without a vision tower.

    The least recently used content is overwritten first; time is measured in steps.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.slots = Slots(config.max_num_seqs)
        self.blocks = None if config.num_blocks is None else BlockManager(config)
        self._held: SlotPrefixCache | None = None  # what slots hold; None with a block pool
        self.cache: SlotPrefixCache | BlockManager | None = None
        self.states: PrefixStates | None = None
        self.features = Features(config) if config.feature_places else None
        if config.enable_prefix_caching:
            if self.blocks is None:
                hashes = BlockHashes(config.block_size, config.cache_key)
                self._held = SlotPrefixCache(config.max_num_seqs, hashes)
                if config.mamba_block_size is not None:
                    self.states = PrefixStates(config.mamba_cache_states, config.mamba_block_size, hashes)
            self.cache = self.blocks or self._held

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have enough blocks, with the arithmetic; None if it can."""
        return None if self.blocks is None else self.blocks.never_fits(prompt_tokens, max_tokens)

    def missing(self, state: RequestState) -> str | None:
        """Why a request cannot `enter` now; None if it can."""
        if not self.slots.num_free:
            return f"no free slot: {len(self.slots)} of {len(self.slots)} busy"
        return None if self.blocks is None else self.blocks.missing(state)

    def suffices_without(self, others: Iterable[RequestState], state: RequestState) -> bool:
        """Whether a request would have enough blocks if all of `others` gave up theirs."""
        return self.blocks is None or self.blocks.suffices_without(others, state)

    def enter(self, state: RequestState) -> None:
        """Give a request a slot and, with a block pool, its first blocks."""
        state.occupancy, state.holds_slot = self._choose_slot(state), True
        if self.blocks is not None:
            self.blocks.enter(state)

    def still_holds(self, state: RequestState) -> bool:
        """Whether the slot of a finished request is free and still holds its KV entries."""
        slot = state.slot
        free = self.slots.is_free(slot.index) and self.slots.current(slot.index).epoch == slot.epoch + 1
        return free and (self.blocks is None or self.blocks.left_by(state) is not None)

    def go_on(self, state: RequestState, step: int) -> Continuation:
        """Give a finished request its slot again, with the KV entries that it holds."""
        state.occupancy, state.holds_slot = self.slots.acquire(state.slot.index), True
        state.goes_on = False
        if self.blocks is not None:
            self.blocks.go_on(state)
        elif self._held is not None:
            self._held.begin(state, state.context_tokens)
        return Continuation(
            slot=state.slot,
            request_id=state.request_id,
            length=state.position(step),
            remaining=state.request.max_tokens - state.credited,
        )

    def resume(self, state: RequestState, length: int) -> Swap:
        """The move of a request's state from the host to its slot; the request has entered."""
        if self.blocks is not None:
            return self.blocks.resume(state, length)
        if self._held is not None:
            self._held.begin(state, state.context_tokens)
        return Swap(slot=state.slot, request_id=state.request_id, length=length)

    def park(self, state: RequestState, length: int) -> Swap:
        """The move of a request's state from its slot to the host; the request is about to leave."""
        blocks = () if self.blocks is None else state.blocks[: self.blocks.pool.blocks_for(length)]
        return Swap(slot=state.slot, request_id=state.request_id, length=length, blocks=blocks)

    def leave(self, state: RequestState, step: int) -> None:
        """Release the slot and blocks of a request."""
        kept = self._held is not None and self._held.length(state.slot.index) > 0
        self.slots.release(state.slot, _use(step) if kept else 0)
        if self.blocks is not None:
            self.blocks.leave(state)
        state.holds_slot = False

    def retain(self, state: RequestState) -> None:
        """Enter the KV entries of a request, if it had a slot, into the prefix cache."""
        if self.cache is not None and state.occupancy is not None:
            self.cache.end(state)

    def discard(self, state: RequestState) -> None:
        """Remove the KV entries of a failed request from the prefix cache: they may be NaN."""
        if self.cache is not None and state.occupancy is not None:
            self.cache.discard(state)
        if self.states is not None:
            self.states.discard(state)

    def used(self, index: int, step: int) -> None:
        """Note that the content of a slot was copied in `step`."""
        if self._held is not None:
            self.slots.revalue(index, _use(step))

    def forget(self) -> None:
        """Forget all cached prefixes."""
        if self.blocks is not None:
            self.blocks.pool.forget_all()
        if self.states is not None:
            self.states.clear()
        if self._held is not None:
            self._held.clear()
            for index in range(len(self.slots)):
                self.slots.revalue(index, 0)

    def forget_features(self) -> None:
        """Forget all features of pictures. No request may need some."""
        if self.features is not None:
            self.features.forget()

    def cached_tokens(self, state: RequestState) -> int:
        """How many tokens of a request's context are in the prefix cache."""
        found = 0 if self.cache is None else self.cache.match(state)[1]
        return found if self.states is None else self.states.usable(state, found)

    def check(self, states: Iterable[RequestState], step: int) -> None:
        """Raise AssertionError on any broken invariant."""
        self.slots.check()
        if self.features is not None:
            self.features.check()
        if self._held is not None:
            self._held.check()
        if self.states is not None:
            self.states.check()
        if self.blocks is not None:
            self.blocks.check(states, step)

    def _choose_slot(self, state: RequestState) -> Slot:
        """The slot with the longest prefix of the request's context, if it is free and not worth keeping; else any."""
        if self._held is not None and state.status is Status.WAITING and state.request.max_cached_tokens != 0:
            index, held = self._held.match(state)
            spare = self.slots.num_free > 1 and policy.worth_keeping(held, self._held.length(index))
            if held and self.slots.is_free(index) and not spare:
                return self.slots.acquire(index)
        return self.slots.acquire()


def _use(step: int) -> int:
    """The `use` of content that was used in a step; the lowest is overwritten first, and 0 is no content."""
    return step + 1
