"""Device times of a series of similar steps."""

import itertools
from collections.abc import Callable, Iterator

from xla_engine.scheduler.fast_forward import Steady
from xla_engine.tools.simulator.cost import CostModel, DeviceWork, Machine


def decode_seconds(cost: CostModel, rows: int, keys: Callable[[int], int]) -> Iterator[float]:
    """Of steps that decode the same rows. keys: read by a step so much later than the first, evenly more each."""
    growth = cost.key * (keys(1) - keys(0))
    return itertools.count(cost.device(DeviceWork(rows=rows, keys=keys(0))), growth)


def prefill_seconds(
    cost: CostModel,
    machine: Machine,
    prefill: Steady,
    chunk_size: int,
    calls: tuple[int, ...],
    keys: Callable[[int], int],
) -> Iterator[float]:
    """Of the steps of `prefill`, each in these calls; keys: read by rows that decode, as in `decode_seconds`."""
    rows, tokens = len(prefill.rows), prefill.chunks * chunk_size
    without_keys = cost.device(DeviceWork(calls=calls, rows=rows, prompt_tokens=tokens))
    for later in range(prefill.steps):
        start = prefill.start + later * tokens
        ends = range(start + chunk_size, start + tokens + 1, chunk_size)
        yield without_keys + cost.prefill_key * machine.prefill_keys(ends) + cost.key * keys(later)
