"""Figures of the card, computed in the same way for every engine from the times of its tokens."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from xla_engine.tools.bench.workloads import Workload

Answer = Mapping[str, Any]  # of a worker's `run`


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of one figure in all rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def record(self) -> list[float]:
        """[median, least, most], four digits each."""
        return [float(f"{value:.4g}") for value in (self.median, min(self.values), max(self.values))]


def spread_of(rounds: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """The values of all rounds for each figure; figures that are missing in a round are left out."""
    shared = [name for name in rounds[0] if all(name in each for each in rounds)]
    return {name: Spread(tuple(each[name] for each in rounds)) for name in shared}


def ratios(ours: Spread, theirs: Spread) -> Spread:
    """Ours over theirs, round by round, so that noise affects both in the same way."""
    return Spread(tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True)))


def figures(workload: Workload, answer: Answer) -> dict[str, float]:
    """Rates, per second, and latencies, in milliseconds, of one run.

    seconds: time of the job.
    requests_s, tok_s: requests, and new tokens, over these seconds.
    prefill_tok_s: prompt tokens over the seconds until each request had its first token; for jobs of one new token.
    decode_tok_s: tokens sampled while all requests were decoding, over that time, if there is such a time.
    ttft_p50_ms, ttft_p99_ms: from arrival to the first token.
    itl_p50_ms, itl_p99_ms: between tokens.
    """
    seconds, times = answer["seconds"], answer["times"]
    first = [each[0] for each in times]
    ttft = [1e3 * (at - arrival) for at, arrival in zip(first, workload.arrivals, strict=True)]
    gaps = [1e3 * (b - a) for each in times for a, b in pairwise(each)]
    found = {
        "seconds": seconds,
        "requests_s": len(times) / seconds,
        "tok_s": workload.new_tokens / seconds,
        "ttft_p50_ms": _percentile(ttft, 0.5),
        "ttft_p99_ms": _percentile(ttft, 0.99),
        "itl_p50_ms": _percentile(gaps, 0.5),
        "itl_p99_ms": _percentile(gaps, 0.99),
    }
    if max(workload.max_tokens) == 1:
        found["prefill_tok_s"] = workload.prompt_tokens / max(first)
    begin, end = max(first), min(each[-1] for each in times)
    if end > begin and max(workload.max_tokens) > 1:
        found["decode_tok_s"] = sum(begin < at <= end for each in times for at in each) / (end - begin)
    return {name: value for name, value in found.items() if value is not None}


def complaints(workload: Workload, answer: Answer) -> str | None:
    """What is wrong with an answer: missing or too many requests or tokens. None if nothing is."""
    wanted = list(workload.max_tokens)
    for name in ("streams", "times"):
        counts = [len(each) for each in answer[name]]
        if counts != wanted:
            wrong = sum(a != b for a, b in zip(counts, wanted, strict=False)) + abs(len(counts) - len(wanted))
            return f"{wrong} of {len(wanted)} requests have the wrong number of {name.replace('streams', 'tokens')}"
    return None


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile, `share` in [0, 1]; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
