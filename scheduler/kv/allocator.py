"""Allocates slots and KV blocks to requests, and finds what earlier requests have left there."""

import heapq
from collections.abc import Iterable

from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.block_manager import BlockManager
from xla_engine.scheduler.kv.features import Features
from xla_engine.scheduler.kv.prefix_cache import BlockHashes, SlotPrefixCache
from xla_engine.scheduler.kv.prefix_states import PrefixStates
from xla_engine.scheduler.moves import Continuation, Slot, Swap
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState


class StaleSlotError(ValueError):
    """A slot was released by an occupancy that has ended."""


class Slots:
    """`count` slots. The free slot with the lowest `use` is taken first; of equal ones, the lowest index.

    If `use` is the time at which the content was last used, this is least recently used first. Slots have equal size
    and are overwritten as a whole, so counting slots is counting bytes.

    The epoch of an index grows by one at each release, so a `Slot` names exactly one occupancy.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} slots; at least 1 is needed")
        self._epochs = [0] * count
        self._free = dict.fromkeys(range(count), 0)  # use by index
        # (use, index) of free slots; some entries are stale.
        self._heap = [(0, index) for index in range(count)]

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, index: int) -> bool:
        return index in self._free

    def acquire(self, index: int | None = None) -> Slot:
        """Take the free slot with the lowest use, or the one of this index. Raises IndexError if none is free."""
        if index is None:
            use, index = heapq.heappop(self._heap)
            while self._free.get(index) != use:
                use, index = heapq.heappop(self._heap)
        del self._free[index]
        return self.current(index)

    def lowest(self) -> int:
        """The index that `acquire` would take. Raises ValueError if none is free."""
        return min((use, index) for index, use in self._free.items())[1]

    def release(self, slot: Slot, use: int = 0) -> None:
        """End an occupancy. Raises StaleSlotError, changing nothing, if it has ended already.

        use: the value of the slot's content compared with that of other free slots.
        """
        if not self.holds(slot):
            raise StaleSlotError(
                f"slot {slot.index} is not held in epoch {slot.epoch} (it is in epoch "
                f"{self._epochs[slot.index]}); release an occupancy once"
            )
        self._epochs[slot.index] += 1
        self._free[slot.index] = use
        self._push(slot.index)

    def revalue(self, index: int, use: int) -> None:
        """Change the use of a free slot; does nothing if the slot is held."""
        if self._free.get(index, use) != use:
            self._free[index] = use
            self._push(index)

    def _push(self, index: int) -> None:
        heapq.heappush(self._heap, (self._free[index], index))
        if len(self._heap) > 4 * len(self) + 64:
            self._heap = [(use, index) for index, use in self._free.items()]
            heapq.heapify(self._heap)

    def holds(self, slot: Slot) -> bool:
        """Whether the occupancy has not ended."""
        return slot.index not in self._free and self._epochs[slot.index] == slot.epoch

    def current(self, index: int) -> Slot:
        """The current occupancy of an index, or the next one if it is free."""
        return Slot(index=index, epoch=self._epochs[index])

    def check(self) -> None:
        """Raise AssertionError unless every free slot is found by its use."""
        missing = set(self._free.items()) - {(index, use) for use, index in self._heap}
        if missing:
            raise AssertionError(f"free slots and their use {missing} are not in the heap {self._heap}")


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
        self.blocks: BlockManager | None = None
        self._slot_cache: SlotPrefixCache | None = None  # of what is in slots; None with a block pool
        self.states: PrefixStates | None = None
        self.features = Features(config) if config.feature_places else None
        pooled, caches = config.num_blocks is not None, config.enable_prefix_caching
        hashes = BlockHashes(config.block_size, config.cache_key, tails=pooled)
        if caches and config.mamba_block_size is not None:
            self.states = PrefixStates(config.mamba_cache_states, config.mamba_block_size, hashes)
        if pooled:
            self.blocks = BlockManager(config, hashes, self.states)
        elif caches:
            self._slot_cache = SlotPrefixCache(config.max_num_seqs, hashes)
        self.cache = (self.blocks or self._slot_cache) if caches else None

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
        state.occupancy, state.holds_slot = self.slots.acquire(self._reused_slot(state)), True
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
        elif self._slot_cache is not None:
            self._slot_cache.begin(state, state.context_tokens)
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
        if self._slot_cache is not None:
            self._slot_cache.begin(state, state.context_tokens)
        return Swap(slot=state.slot, request_id=state.request_id, length=length)

    def park(self, state: RequestState, length: int) -> Swap:
        """The move of a request's state from its slot to the host; the request is about to leave."""
        blocks = () if self.blocks is None else state.blocks[: self.blocks.pool.blocks_for(length)]
        return Swap(slot=state.slot, request_id=state.request_id, length=length, blocks=blocks)

    def leave(self, state: RequestState, step: int) -> None:
        """Release the slot and blocks of a request."""
        kept = self._slot_cache is not None and self._slot_cache.length(state.slot.index) > 0
        self.slots.release(state.slot, _use(step) if kept else 0)
        if self.blocks is not None:
            self.blocks.leave(state)
        if self.states is not None:
            self.states.release(state)
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
        if self._slot_cache is not None:
            self.slots.revalue(index, _use(step))

    def forget(self) -> None:
        """Forget all cached prefixes."""
        if self.blocks is not None:
            self.blocks.pool.forget_all()
        if self.states is not None:
            self.states.pool.forget_all()
        if self._slot_cache is not None:
            self._slot_cache.clear()
            for index in range(len(self.slots)):
                self.slots.revalue(index, 0)

    def cached_tokens(self, state: RequestState) -> int:
        """How many tokens of a request's context are in the prefix cache."""
        length = 0 if self.cache is None else self.cache.match(state)[1]
        return length if self.states is None else self.states.usable(state, length)

    def check(self, states: Iterable[RequestState], step: int) -> None:
        """Raise AssertionError on any broken invariant."""
        states = list(states)
        self.slots.check()
        if self.features is not None:
            self.features.check()
        if self._slot_cache is not None:
            self._slot_cache.check()
        if self.states is not None:
            self.states.check(states)
        if self.blocks is not None:
            self.blocks.check(states, step)

    def next_slot(self, state: RequestState) -> int | None:
        """The index of the slot that a waiting request would `enter` now; None if there is none."""
        if not self.slots.num_free:
            return None
        reused = self._reused_slot(state)
        return self.slots.lowest() if reused is None else reused

    def _reused_slot(self, state: RequestState) -> int | None:
        """The slot with the longest prefix of the request's context, if it is free and not worth keeping."""
        if (
            self._slot_cache is None
            or state.status is not Status.WAITING
            or state.request.max_cached_tokens == 0
        ):
            return None
        index, length = self._slot_cache.match(state)
        # What is less than half of the prefix there is copied to another slot, so that the rest stays cached.
        copies = self.slots.num_free > 1 and 2 * length < self._slot_cache.length(index)
        return index if length and self.slots.is_free(index) and not copies else None


def _use(step: int) -> int:
    """The `use` of content that was used in a step; the lowest is overwritten first, and 0 is no content."""
    return step + 1
