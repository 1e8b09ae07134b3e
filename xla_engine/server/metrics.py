"""`/metrics`, under vLLM's names where vLLM has one.

Nothing here is done once a token: a scrape reads counters that the engine keeps anyway, and histograms take a
request's times when it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from xla_engine import __version__
from xla_engine.outputs import RequestOutput

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.server.service import Service

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 600.0)
_RECENT = 0.1  # weight of the last request in `recent_seconds`


class Histogram:
    """Counts of values by upper bounds. bounds: ascending."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, values: Iterable[float]) -> None:
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus has them."""
        names = (*map(str, self.bounds), "+Inf")
        seen, found = 0, []
        for name, count in zip(names, self.counts, strict=True):
            seen += count
            found.append((name, float(seen)))
        return found

    def quantile(self, share: float) -> float | None:
        """The upper bound of the bucket in which this share of values ends; None without values."""
        total, seen = sum(self.counts), 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if total and seen >= share * total:
                return bound
        return self.bounds[-1] if total else None


class RequestTimes:
    """Times of requests that have ended.

    recent_seconds: how long recent requests took. refused: requests that found the queue full.
    """

    def __init__(self) -> None:
        self.first_token = Histogram(_SHORT)
        self.inter_token = Histogram(_SHORT)
        self.queue = Histogram(_LONG)
        self.whole = Histogram(_LONG)
        self.recent_seconds = 1.0
        self.refused = 0
        self.prompt_tokens = 0
        self.responses: Counter[tuple[str, str]] = Counter()  # by path and status

    def count(self, output: RequestOutput) -> None:
        """Take the times of a request that has ended."""
        metrics = output.metrics
        if metrics is None:
            return
        self.prompt_tokens += len(output.prompt_token_ids)
        if metrics.ttft is not None:
            self.first_token.add([metrics.ttft])
        if len(output.outputs) == 1:
            self.inter_token.add(metrics.inter_token_latencies)
        if metrics.admitted_time is not None:
            self.queue.add([metrics.admitted_time - metrics.arrival_time])
        if metrics.finished_time is not None:
            seconds = metrics.finished_time - metrics.arrival_time
            self.whole.add([seconds])
            self.recent_seconds += _RECENT * (seconds - self.recent_seconds)


class EngineCollector:
    """Reads an engine and its server when it is scraped."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # so that registering does not scrape

    def collect(self) -> Iterator[Metric]:
        """Every metric, with the label vLLM has on each: the model's name."""
        engine, times = self._service.engine, self._service.times
        labels, model = ["model_name"], [self._service.settings.model_names[0]]
        stats, used = engine.stats(), kv_usage(engine)
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that hold a slot.", engine.num_running),
            ("vllm:num_requests_waiting", "Sequences in the queue.", engine.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", used),
            ("xla_engine_interactive_live", "Sequences of HTTP requests let in.", self._service.live),
            (
                "xla_engine_draining",
                "1 while the server is about to end.",
                float(self._service.draining),
            ),
            ("xla_engine_slot_occupancy", "Share of decode row-steps that were used.", stats.occupancy),
        ):
            yield _gauge(name, text, labels, model, value)
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens sampled.", stats.generation_tokens),
            ("vllm:num_preemptions", "Slots taken away from a request.", stats.preemptions),
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up.",
                stats.prompt_tokens + stats.cached_tokens,
            ),
            ("vllm:prefix_cache_hits", "Prompt tokens that were found.", stats.cached_tokens),
            ("xla_engine_steps", "Turns that dispatched device work.", stats.steps),
            ("xla_engine_recoveries", "Faults after which requests ran again.", stats.recoveries),
            ("xla_engine_refused", "Requests that found the queue full.", times.refused),
            (
                "xla_engine_compiles_after_warmup",
                "XLA compilations since the engine was ready.",
                stats.compiles_after_warmup,
            ),
        ):
            yield _counter(name, text, labels, model, value)
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", times.first_token),
            ("vllm:inter_token_latency_seconds", "Between consecutive tokens.", times.inter_token),
            ("vllm:request_queue_time_seconds", "From arrival to a slot.", times.queue),
            ("vllm:e2e_request_latency_seconds", "From arrival to the end.", times.whole),
        ):
            family = HistogramMetricFamily(name, text, labels=labels)
            family.add_metric(model, histogram.buckets(), histogram.total)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences that ended, by reason.", labels=[*labels, "finished_reason"]
        )
        for reason, count in stats.finished.items():
            success.add_metric([*model, reason], count)
        yield success
        answers = CounterMetricFamily(
            "xla_engine_http_responses", "Answers by path and status.", labels=["path", "status"]
        )
        for (path, status), count in times.responses.items():
            answers.add_metric([path, status], count)
        yield answers
        about = InfoMetricFamily("xla_engine", "What this server is.")
        about.add_metric([], {"version": __version__, "fingerprint": self._service.fingerprint})
        yield about
        yield _cache_config(engine)


def _cache_config(engine: XlaBatchEngine) -> Metric:
    config = engine.config
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Sizes of the KV cache.",
        labels=["block_size", "num_gpu_blocks", "enable_prefix_caching"],
    )
    blocks = config.num_blocks or config.num_slots * -(-engine.max_model_len // config.block_size)
    cache.add_metric([str(config.block_size), str(blocks), str(config.enable_prefix_caching)], 1)
    return cache


def kv_usage(engine: XlaBatchEngine) -> float:
    """Share of the positions of all slots, or of the blocks they borrow from, that requests hold."""
    slots = engine.snapshot().slots
    config = engine.config
    if config.num_blocks:
        return len({block for slot in slots for block in slot.blocks}) / config.num_blocks
    held = sum(slot.position for slot in slots if slot.request is not None)
    return held / (len(slots) * engine.max_model_len)


def _gauge(name: str, text: str, labels: list[str], values: list[str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: list[str], values: list[str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    family.add_metric(values, value)
    return family
