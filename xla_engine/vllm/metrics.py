"""`LLM.get_metrics()`: the engine's metrics under vLLM's names; and small utilities that scripts call."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass

from xla_engine.observability.histogram import Distribution
from xla_engine.open_engine import EngineClient


@dataclass(frozen=True, slots=True)
class Metric:
    """A named value. labels: names and values."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Counts of values. buckets: by upper bound, values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Several numbers that only grow."""

    values: list[int]


def metrics(engine: EngineClient) -> list[Metric]:
    """The engine's metrics that vLLM also has."""
    found: list[Metric] = []
    for family in engine.metrics():
        name = family.name.removesuffix("_total")
        for value, given in family.samples if name.startswith("vllm:") else ():
            labels = {"engine": "0"} | {label: text for label, text in given.items() if label != "model_name"}
            if isinstance(value, Distribution):
                buckets = {str(bound): below for bound, below in value.cumulative()} | {"+Inf": value.count}
                found.append(Histogram(name, labels, value.count, value.total, buckets))
            elif family.kind == "counter":
                found.append(Counter(name, labels, int(value)))
            else:
                found.append(Gauge(name, labels, value))
    drafts = engine.stats().distributions.accepted_drafts
    if drafts.count:
        # Of five positions: the buckets up to 4 hold one number each.
        above = [drafts.count - below for bound, below in drafts.cumulative() if bound <= 4]
        found.append(Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {"engine": "0"}, above))
    return found


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and its length."""
    shown = ", ".join(map(str, embeds[:4]))
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 4 else ''}] (size={len(embeds)})")


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Free memory of discarded engines. There is no process group to leave, and Ray is left alone."""
    gc.collect()
