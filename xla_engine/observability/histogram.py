"""Histograms with fixed buckets, which operators' tools can sum over time and machines."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

# Upper bounds, ascending; the shorter times are vLLM's, so that its dashboards work.
SHORT_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
LONG_TIMES = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    600.0,
)
RATES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)
POWERS_OF_TWO = tuple(float(1 << power) for power in range(21))  # 1 to a million
FEW = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A snapshot of a histogram.

    bounds: upper bounds of the buckets, ascending; a value equal to one is in its bucket.
    counts: number of values in each bucket; the last entry counts values above the last bound.
    total: the sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean; None without values."""
        return self.total / self.count if self.count else None

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Yield (bound, number of values up to it) for each bound."""
        return zip(self.bounds, accumulate(self.counts), strict=False)

    def quantile(self, share: float) -> float | None:
        """The bound of the bucket that contains the quantile `share` in [0, 1]; None without values.

        For values above the last bound, the last bound.
        """
        count = self.count
        if not count:
            return None
        return next((bound for bound, below in self.cumulative() if below >= share * count), self.bounds[-1])


class Histogram:
    """Counts values as they come. bounds: as in `Distribution`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def now(self) -> Distribution:
        """What was counted so far."""
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), total=self._total)
