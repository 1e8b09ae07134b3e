"""Quantiles of any number of values in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

WIDTH = 0.01  # a bucket's relative width, and so the resolution of a quantile
_SCALE = 1 / math.log1p(WIDTH)
_FLOOR = 1e-9  # what is smaller counts as nothing


class Quantiles:
    """Counts of values >= 0 in buckets of one hundredth of their size. Total and largest value are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, in seconds or whatever all of them are in."""
        self.count += times
        self.total += value * times
        if value > self.largest:
            self.largest = value
        bucket = int(math.log(value) * _SCALE // 1) if value > _FLOOR else -1 << 30
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    def merge(self, other: Quantiles) -> None:
        """Count all values of another."""
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        for bucket, times in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    @property
    def mean(self) -> float:
        """Zero without values."""
        return self.total / self.count if self.count else 0.0

    def at(self, share: float) -> float:
        """The value that `share` in [0, 1] of all do not exceed, to within a bucket; zero without values."""
        wanted = min(int(share * self.count), self.count - 1)
        for value, below in self.steps():
            if below > wanted:
                return value
        return 0.0

    def steps(self) -> Iterator[tuple[float, int]]:
        """(middle of a bucket, values up to its end), ascending: the cumulative distribution."""
        below = 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            middle = 0.0 if bucket == -1 << 30 else math.exp((bucket + 0.5) / _SCALE)
            yield min(middle, self.largest), below
