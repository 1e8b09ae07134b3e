"""The fixed set of slots, and which tenancy each is in."""

from __future__ import annotations

import heapq

from scheduler.plan import Slot


class StaleSlotError(ValueError):
    """A slot was released under a tenancy that is over."""


class Slots:
    """`count` slots, handed out lowest index first.

    The epoch of an index grows by one at each release, so a `Slot` names one tenancy and no later one.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} slots; at least 1 is needed")
        self._epochs = [0] * count
        self._held = [False] * count
        self._free = list(range(count))  # a heap

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> Slot:
        """Take the free slot of lowest index. Raises IndexError when none is free."""
        index = heapq.heappop(self._free)
        self._held[index] = True
        return self.current(index)

    def release(self, slot: Slot) -> None:
        """End a tenancy. Raises StaleSlotError, changing nothing, when it has ended before."""
        if not self.holds(slot):
            raise StaleSlotError(
                f"slot {slot.index} is not held in epoch {slot.epoch} (it is in epoch "
                f"{self._epochs[slot.index]}); release a tenancy once"
            )
        self._epochs[slot.index] += 1
        self._held[slot.index] = False
        heapq.heappush(self._free, slot.index)

    def holds(self, slot: Slot) -> bool:
        """Whether the tenancy goes on."""
        return self._held[slot.index] and self._epochs[slot.index] == slot.epoch

    def current(self, index: int) -> Slot:
        """The present tenancy of an index, or the next one if it is free."""
        return Slot(index=index, epoch=self._epochs[index])

    def check(self) -> None:
        """Raise AssertionError unless every slot is either held or, once, in the heap of free ones."""
        free = [index for index, held in enumerate(self._held) if not held]
        if sorted(self._free) != free:
            raise AssertionError(f"free slots are {free} but the heap has {sorted(self._free)}")
