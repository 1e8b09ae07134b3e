"""A compact hash map for facts about lines: 16 to 48 bytes a line."""

from array import array

_MULTIPLIER = 0x9E3779B97F4A7C15  # Fibonacci hashing: 2**64 divided by the golden ratio


class LineIndex:
    """A hash map from 64-bit keys above 0 to 64-bit values: open addressing in two flat arrays.

    A million entries take 32 MB; in a dict they take more than 100 MB.
    """

    def __init__(self) -> None:
        self._bits = 10
        self._count = 0
        self._keys = array("Q", bytes(8 << self._bits))  # 0: free
        self._values = array("Q", bytes(8 << self._bits))

    def __len__(self) -> int:
        return self._count

    def get(self, key: int) -> int | None:
        place = self._place(key)
        return self._values[place] if self._keys[place] else None

    def setdefault(self, key: int, value: int) -> int:
        """The value of `key`; sets it to `value` first if the key is missing."""
        place = self._place(key)
        if self._keys[place]:
            return self._values[place]
        self._keys[place], self._values[place] = key, value
        self._count += 1
        if 3 * self._count > 2 << self._bits:
            self._grow()
        return value

    def _place(self, key: int) -> int:
        mask = (1 << self._bits) - 1
        place = (key * _MULTIPLIER & (1 << 64) - 1) >> 64 - self._bits
        while self._keys[place] not in (0, key):
            place = place + 1 & mask
        return place

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._bits += 1
        self._keys = array("Q", bytes(8 << self._bits))
        self._values = array("Q", bytes(8 << self._bits))
        for key, value in zip(keys, values, strict=True):
            if key:
                place = self._place(key)
                self._keys[place], self._values[place] = key, value
