"""What spikes share: forms timed in interleaved rounds, tables, the machine in words."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import jax

from xla_engine.tools.bench.card import markdown_table as markdown_table
from xla_engine.tools.bench.limits import describe_machine as machine_words


@dataclass(frozen=True, slots=True)
class Times:
    """Wall seconds of one form, one value for each round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def milliseconds(self, digits: int = 1) -> str:
        """`median (least-most)` in milliseconds."""
        low, middle, high = (1e3 * value for value in (min(self.seconds), self.median, max(self.seconds)))
        return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def interleave(forms: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int = 1) -> dict[str, Times]:
    """Time every form once a round, after `warm_up` rounds that do not count.

    A form blocks until its work is done (`jax.block_until_ready`). Every other round runs backwards, so that no form always
    follows the same neighbour.
    """
    for _ in range(warm_up):
        for run in forms.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    names = list(forms)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            began = time.perf_counter()
            forms[name]()
            seconds[name].append(time.perf_counter() - began)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def describe_machine() -> str:
    """What a finding's Setting says: cores, CPU features, Python, jax version, devices."""
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    return f"{machine_words()}, jax {jax.__version__}, jaxlib {version('jaxlib')}, device {devices}"
