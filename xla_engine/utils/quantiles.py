"""Quantiles of any number of values in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

WIDTH = 0.01  # relative width of a bucket: the resolution of quantiles
_SCALE = 1 / math.log1p(WIDTH)
_FLOOR = 1e-9  # smaller values count as zero


class Quantiles:
    """Counts values >= 0 in buckets with a relative width of 1%. Total and largest value are exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times. All values must have the same unit."""
        self.count += times
        self.total += value * times
        if value > self.largest:
            self.largest = value
        bucket = int(math.log(value) * _SCALE // 1) if value > _FLOOR else -1 << 30
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    def merge(self, other: Quantiles) -> None:
        """Add all values of `other`."""
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        for bucket, times in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    @property
    def mean(self) -> float:
        """The mean; zero without values."""
        return self.total / self.count if self.count else 0.0

    def at(self, share: float) -> float:
        """The quantile `share` in [0, 1], to within a bucket; zero without values."""
        wanted = min(int(share * self.count), self.count - 1)
        for value, below in self.steps():
            if below > wanted:
                return value
        return 0.0

    def steps(self) -> Iterator[tuple[float, int]]:
        """The cumulative distribution: (middle of a bucket, number of values up to its end), ascending."""
        below = 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            middle = 0.0 if bucket == -1 << 30 else math.exp((bucket + 0.5) / _SCALE)
            yield min(middle, self.largest), below
