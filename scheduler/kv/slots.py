"""The fixed set of slots, and which occupancy each is in."""

from __future__ import annotations

import heapq

from xla_engine.scheduler.plan import Slot


class StaleSlotError(ValueError):
    """A slot was released under an occupancy that is over."""


class Slots:
    """`count` slots, of which the one of least use is handed out first, and among these that of lowest index.

    Where use says when the content of a slot was last wanted, the least recently used goes first. Slots are equal in
    size, and one is overwritten as a whole: by slots is by bytes.

    The epoch of an index grows by one at each release, so a `Slot` names one occupancy and no later one.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} slots; at least 1 is needed")
        self._epochs = [0] * count
        self._free = dict.fromkeys(range(count), 0)  # index to use
        self._heap = [(0, index) for index in range(count)]  # (use, index) of each free slot, and of the past

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, index: int) -> bool:
        return index in self._free

    def acquire(self, index: int | None = None) -> Slot:
        """Take the free slot of least use, or the one of this index. Raises IndexError when none is free."""
        if index is None:
            use, index = heapq.heappop(self._heap)
            while self._free.get(index) != use:
                use, index = heapq.heappop(self._heap)
        del self._free[index]
        return self.current(index)

    def release(self, slot: Slot, use: int = 0) -> None:
        """End an occupancy. Raises StaleSlotError, changing nothing, when it has ended before.

        use: what the slot's content is worth beside that of other free slots.
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
        """Give a free slot's content another use; of a slot that is held, nothing changes."""
        if self._free.get(index, use) != use:
            self._free[index] = use
            self._push(index)

    def _push(self, index: int) -> None:
        heapq.heappush(self._heap, (self._free[index], index))
        if len(self._heap) > 4 * len(self) + 64:
            self._heap = [(use, index) for index, use in self._free.items()]
            heapq.heapify(self._heap)

    def holds(self, slot: Slot) -> bool:
        """Whether the occupancy goes on."""
        return slot.index not in self._free and self._epochs[slot.index] == slot.epoch

    def current(self, index: int) -> Slot:
        """The present occupancy of an index, or the next one if it is free."""
        return Slot(index=index, epoch=self._epochs[index])

    def check(self) -> None:
        """Raise AssertionError unless every free slot is found by its use."""
        missing = set(self._free.items()) - {(index, use) for use, index in self._heap}
        if missing:
            raise AssertionError(f"free slots and their use {missing} are not in the heap {self._heap}")
