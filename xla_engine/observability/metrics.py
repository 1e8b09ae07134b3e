"""The metrics of an engine: one list, for files, for `LLM.metrics_text` and for the server.

Names are vLLM's if it has the same metric, so that its dashboards work. docs/operators.md documents each metric; a
test compares the two.

As text they are in Prometheus' text format, version 0.0.4.
Source: https://prometheus.io/docs/instrumenting/exposition_formats/. Written here so that metrics need no dependency;
tests read the result with prometheus-client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from xla_engine.observability.histogram import Distribution
from xla_engine.observability.phases import PHASES
from xla_engine.observability.stats import EngineStats

if TYPE_CHECKING:
    from xla_engine.config import EngineConfig

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = float | Distribution | Mapping[str, float]
Read = Callable[[EngineStats], Value]
# By name: a field of `EngineStats`, or a function that reads it; and a description.
Table = Mapping[str, tuple[str | Read, str]]


class EngineMetric(NamedTuple):
    """A metric: its name, its kind, its description, and how to read it."""

    name: str
    kind: str
    about: str
    read: Read


class MetricSample(NamedTuple):
    """One value of a metric with its labels."""

    value: float | Distribution
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """A metric with its values.

    name: a counter's ends in _total. kind: "counter", "gauge" or "histogram". about: a description of one line.
    """

    name: str
    kind: str
    about: str
    samples: tuple[MetricSample, ...]


def _looked_up(stats: EngineStats) -> int:
    return stats.prompt_tokens + stats.cached_tokens


def _phases(stats: EngineStats) -> Mapping[str, float]:
    times = stats.phases
    return {} if times is None else {name: getattr(times, name) / 1e9 for name in (*PHASES, "between")}


_GAUGES: Table = {
    "vllm:num_requests_running": (
        "running",
        "Sequences in a slot, or with the last of their tokens in flight.",
    ),
    "vllm:num_requests_waiting": ("waiting", "Sequences in the queue."),
    "vllm:kv_cache_usage_perc": ("kv_usage", "Share of the KV cache in use, 0 to 1."),
    "xla_engine_slots": ("slots", "Slots there are."),
    "xla_engine_slots_used": ("slots_used", "Sequences that hold a slot."),
    "xla_engine_slot_occupancy": ("occupancy", "Share of decode row-steps that were used, since the start."),
    "xla_engine_last_step_age_seconds": (
        "last_step_age_s",
        "How long the engine, with requests, has waited for the device.",
    ),
    "xla_engine_load_seconds": ("load_seconds", "Time to load the weights."),
    "xla_engine_compile_seconds": ("compile_seconds", "Time to compile."),
}
_COUNTERS: Table = {
    "xla_engine_requests_total": ("submitted", "Accepted requests."),
    "vllm:request_success_total": ("finished", "Sequences that ended, by reason; failures are included."),
    "vllm:prompt_tokens_total": (_looked_up, "Prompt tokens, computed or cached."),
    "vllm:generation_tokens_total": ("generation_tokens", "Tokens sampled."),
    "vllm:prefix_cache_queries_total": (_looked_up, "Prompt tokens looked up."),
    "vllm:prefix_cache_hits_total": ("cached_tokens", "Prompt tokens found."),
    "xla_engine_loaded_blocks_total": ("loaded_blocks", "KV blocks and saved states read from files."),
    "xla_engine_stored_blocks_total": ("stored_blocks", "KV blocks and saved states written to files."),
    "xla_engine_failed_blocks_total": (
        "failed_blocks",
        "KV blocks whose file was damaged, or not readable or writable.",
    ),
    "vllm:num_preemptions_total": ("preemptions", "Slots taken away."),
    "vllm:spec_decode_num_draft_tokens_total": ("drafted_tokens", "Drafts checked."),
    "vllm:spec_decode_num_accepted_tokens_total": ("accepted_tokens", "Accepted draft tokens."),
    "xla_engine_steps_total": ("steps", "Steps started on the device."),
    "xla_engine_prefill_calls_total": ("prefill_calls", "Prefill programs run."),
    "xla_engine_recoveries_total": ("recoveries", "Failed steps after which sequences ran again."),
    "xla_engine_shadow_requests_total": (
        "shadow_requests",
        "Requests that the shadow probe ran a second time, alone and by plain decode.",
    ),
    "xla_engine_shadow_mismatches_total": (
        "shadow_mismatches",
        "Shadow requests that did not get the same bits.",
    ),
    "xla_engine_compiles_after_warmup_total": (
        "compiles_after_warmup",
        "XLA compilations of the process since the engine was ready.",
    ),
    "xla_engine_phase_seconds_total": (_phases, "Wall time of turns by phase, with phase_timers."),
}
_HISTOGRAMS: Table = {  # of `EngineStats.distributions`
    "vllm:request_queue_time_seconds": ("queue_seconds", "Of a sequence, from arrival to its first slot."),
    "vllm:time_to_first_token_seconds": (
        "first_token_seconds",
        "Of a sequence, from arrival to its first token.",
    ),
    "vllm:inter_token_latency_seconds": ("inter_token_seconds", "Between consecutive tokens of a sequence."),
    "vllm:e2e_request_latency_seconds": ("request_seconds", "Of a sequence, from arrival to end."),
    "vllm:request_generation_tokens": ("output_tokens", "Tokens of a sequence that ended."),
    "xla_engine_sequence_tokens_per_second": (
        "tokens_per_second",
        "Rate of a sequence between its first and its last token.",
    ),
    "xla_engine_sequence_preemptions": ("preemptions", "Preemptions of a sequence that ended."),
    "xla_engine_sequence_failed_steps": ("failed_steps", "Failed steps of a sequence that ended."),
    "xla_engine_prefix_hit_tokens": (
        "prefix_hit_tokens",
        "Cached tokens at the beginning of a prompt, if any.",
    ),
    "xla_engine_prefill_padding_ratio": (
        "prefill_padding",
        "Share of the positions of a prefill call without a prompt token.",
    ),
    "xla_engine_decode_rows": ("decode_rows", "Rows of a decode step."),
    "xla_engine_blocks_used": ("blocks_used", "KV blocks in use in a decode step."),
    "xla_engine_accepted_drafts": ("accepted_drafts", "Accepted draft tokens of a row in a verify step."),
}
_LABELS = {"vllm:request_success_total": "finished_reason", "xla_engine_phase_seconds_total": "phase"}


def _metrics(kind: str, table: Table, within: str = "") -> Iterator[EngineMetric]:
    for name, (field, about) in table.items():
        yield EngineMetric(name, kind, about, attrgetter(within + field) if isinstance(field, str) else field)


METRICS = (
    *_metrics("gauge", _GAUGES),
    *_metrics("counter", _COUNTERS),
    *_metrics("histogram", _HISTOGRAMS, "distributions."),
)
CACHE_CONFIG = "vllm:cache_config_info"


def engine_metrics(
    stats: EngineStats, config: EngineConfig, model_name: str, *, max_model_len: int, engines: int = 1
) -> list[MetricFamily]:
    """All metrics with their values: those of `METRICS` and the sizes of the KV cache.

    config: of each engine, with all sizes resolved. engines: whose counters are in `stats`.
    """
    labels = {"model_name": model_name}
    found = []
    for name, kind, about, read in METRICS:
        value = read(stats)
        if isinstance(value, Mapping):
            samples = tuple(MetricSample(each, {**labels, _LABELS[name]: key}) for key, each in value.items())
        else:
            samples = (MetricSample(value, labels),)
        found.append(MetricFamily(name=name, kind=kind, about=about, samples=samples))
    of_a_slot = -(-max_model_len // config.block_size)  # if slots have their own memory, it counts as blocks
    cache = {
        **labels,
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(engines * (config.num_blocks or config.num_slots * of_a_slot)),
        "enable_prefix_caching": str(config.enable_prefix_caching),
    }
    return [*found, gauge(CACHE_CONFIG, "Sizes of the KV cache.", [(1, cache)])]


def gauge(name: str, about: str, values: Iterable[tuple[float, dict[str, str]]]) -> MetricFamily:
    """A metric that can go up and down."""
    return MetricFamily(
        name=name, kind="gauge", about=about, samples=tuple(MetricSample(*each) for each in values)
    )


def counter(name: str, about: str, values: Iterable[tuple[float, dict[str, str]]]) -> MetricFamily:
    """A metric that only goes up."""
    return MetricFamily(
        name=name, kind="counter", about=about, samples=tuple(MetricSample(*each) for each in values)
    )


def text_of(families: Iterable[MetricFamily]) -> str:
    """The metrics as text."""
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: MetricFamily) -> Iterator[str]:
    about = family.about.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP {family.name} {about}"
    yield f"# TYPE {family.name} {family.kind}"
    for value, labels in family.samples:
        if isinstance(value, Distribution):
            for bound, count in value.cumulative():
                yield _sample(f"{family.name}_bucket", {**labels, "le": str(bound)}, count)
            yield _sample(f"{family.name}_bucket", {**labels, "le": "+Inf"}, value.count)
            yield _sample(f"{family.name}_sum", labels, value.total)
            yield _sample(f"{family.name}_count", labels, value.count)
        else:
            yield _sample(family.name, labels, value)


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
