"""From the times at which tokens were known to the figures of the card: the same sums for every engine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xla_engine.bench.workloads import Workload
from xla_engine.engine.stats import percentile

Answer = Mapping[str, Any]  # of a worker's `run`


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over the rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def record(self) -> list[float]:
        """[median, least, most], four digits each."""
        return [float(f"{value:.4g}") for value in (self.median, min(self.values), max(self.values))]


def spread_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Per figure the values of all rounds; figures that some round lacks are left out."""
    shared = [name for name in rounds[0] if all(name in each for each in rounds)]
    return {name: Spread(tuple(each[name] for each in rounds)) for name in shared}


def ratios(ours: Spread, theirs: Spread) -> Spread:
    """Round by round, so that a noisy minute harms both alike."""
    return Spread(tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True)))


def figures(workload: Workload, answer: Answer) -> dict[str, float]:
    """Rates in 1/s and latencies in ms of one run.

    requests_s, tok_s: requests and new tokens of the whole job over its seconds.
    prefill_tok_s: prompt tokens over the seconds until the last first token; for jobs of one new token only.
    decode_tok_s: tokens that came while every request was decoding, over that time; for jobs whose requests all
        decode together at some time.
    ttft, itl: milliseconds from arrival to first token, and between tokens; 50th and 99th percentile.
    """
    seconds, times = answer["seconds"], answer["times"]
    first = [each[0] for each in times]
    ttft = [1e3 * (at - arrival) for at, arrival in zip(first, workload.arrivals, strict=True)]
    gaps = [1e3 * (b - a) for each in times for a, b in pairwise(each)]
    found = {
        "seconds": seconds,
        "requests_s": len(times) / seconds,
        "tok_s": workload.new_tokens / seconds,
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
    }
    if max(workload.max_tokens) == 1:
        found["prefill_tok_s"] = workload.prompt_tokens / max(first)
    begin, end = max(first), min(each[-1] for each in times)
    if end > begin and max(workload.max_tokens) > 1:
        found["decode_tok_s"] = sum(begin < at <= end for each in times for at in each) / (end - begin)
    return {name: value for name, value in found.items() if value is not None}


def complaints(workload: Workload, answer: Answer) -> str | None:
    """What is wrong with the form of an answer: requests or tokens missing or too many; None if nothing."""
    wanted = list(workload.max_tokens)
    for name in ("streams", "times"):
        counts = [len(each) for each in answer[name]]
        if counts != wanted:
            wrong = sum(a != b for a, b in zip(counts, wanted, strict=False)) + abs(len(counts) - len(wanted))
            return f"{wrong} of {len(wanted)} requests have the wrong number of {name.replace('streams', 'tokens')}"
    return None
