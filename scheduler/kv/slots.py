"""The fixed set of slots and their occupancies."""

import heapq

from xla_engine.scheduler.plan import Slot


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
