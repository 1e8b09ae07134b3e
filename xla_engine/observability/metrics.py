"""The metrics of an engine: one list, for files, for `LLM.metrics_text` and for the server.

Names are vLLM's if it has the same metric, so that its dashboards work. docs/operators.md documents each metric; a
test compares the two.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from xla_engine.observability.histogram import Distribution
from xla_engine.observability.phases import PHASES
from xla_engine.observability.prometheus import Family, Sample
from xla_engine.observability.stats import EngineStats

Value = float | Distribution
ByLabel = dict[str, Value]


class Metric(NamedTuple):
    """A metric: its name, its description, and its field of `EngineStats`.

    label: the label that distinguishes its values; None for a single value.
    """

    name: str
    kind: str
    about: str
    read: Callable[[EngineStats], Value | ByLabel]
    label: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Constants of an engine. num_blocks: if slots have their own memory, counted as blocks."""

    model_name: str
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool


METRICS = (
    Metric(
        "vllm:num_requests_running",
        "gauge",
        "Sequences in a slot, or with the last of their tokens in flight.",
        lambda stats: stats.running,
    ),
    Metric("vllm:num_requests_waiting", "gauge", "Sequences in the queue.", lambda stats: stats.waiting),
    Metric(
        "vllm:kv_cache_usage_perc",
        "gauge",
        "Share of the KV cache in use, 0 to 1.",
        lambda stats: stats.kv_usage,
    ),
    Metric("xla_engine_slots", "gauge", "Slots there are.", lambda stats: stats.slots),
    Metric("xla_engine_slots_used", "gauge", "Sequences that hold a slot.", lambda stats: stats.slots_used),
    Metric(
        "xla_engine_slot_occupancy",
        "gauge",
        "Share of decode row-steps that were used, since the start.",
        lambda stats: stats.occupancy,
    ),
    Metric(
        "xla_engine_last_step_age_seconds",
        "gauge",
        "How long the engine, with requests, has waited for the device.",
        lambda stats: stats.last_step_age_s,
    ),
    Metric("xla_engine_load_seconds", "gauge", "Time to load the weights.", lambda stats: stats.load_seconds),
    Metric("xla_engine_compile_seconds", "gauge", "Time to compile.", lambda stats: stats.compile_seconds),
    Metric("xla_engine_requests_total", "counter", "Accepted requests.", lambda stats: stats.submitted),
    Metric(
        "vllm:request_success_total",
        "counter",
        "Sequences that ended, by reason; failures are included.",
        lambda stats: dict(stats.finished),
        "finished_reason",
    ),
    Metric(
        "vllm:prompt_tokens_total",
        "counter",
        "Prompt tokens, computed or cached.",
        lambda stats: stats.prompt_tokens + stats.cached_tokens,
    ),
    Metric(
        "vllm:generation_tokens_total", "counter", "Tokens sampled.", lambda stats: stats.generation_tokens
    ),
    Metric(
        "vllm:prefix_cache_queries_total",
        "counter",
        "Prompt tokens looked up.",
        lambda stats: stats.prompt_tokens + stats.cached_tokens,
    ),
    Metric(
        "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found.", lambda stats: stats.cached_tokens
    ),
    Metric(
        "xla_engine_loaded_blocks_total",
        "counter",
        "KV blocks read from files.",
        lambda stats: stats.loaded_blocks,
    ),
    Metric(
        "xla_engine_stored_blocks_total",
        "counter",
        "KV blocks written to files.",
        lambda stats: stats.stored_blocks,
    ),
    Metric(
        "xla_engine_failed_blocks_total",
        "counter",
        "KV blocks whose file was damaged, or not readable or writable.",
        lambda stats: stats.failed_blocks,
    ),
    Metric("vllm:num_preemptions_total", "counter", "Slots taken away.", lambda stats: stats.preemptions),
    Metric(
        "vllm:spec_decode_num_draft_tokens_total",
        "counter",
        "Drafts checked.",
        lambda stats: stats.drafted_tokens,
    ),
    Metric(
        "vllm:spec_decode_num_accepted_tokens_total",
        "counter",
        "Accepted draft tokens.",
        lambda stats: stats.accepted_tokens,
    ),
    Metric("xla_engine_steps_total", "counter", "Steps started on the device.", lambda stats: stats.steps),
    Metric(
        "xla_engine_prefill_calls_total",
        "counter",
        "Prefill programs run.",
        lambda stats: stats.prefill_calls,
    ),
    Metric(
        "xla_engine_recoveries_total",
        "counter",
        "Failed steps after which sequences ran again.",
        lambda stats: stats.recoveries,
    ),
    Metric(
        "xla_engine_shadow_requests_total",
        "counter",
        "Requests that the shadow probe ran a second time, alone and by plain decode.",
        lambda stats: stats.shadow_requests,
    ),
    Metric(
        "xla_engine_shadow_mismatches_total",
        "counter",
        "Shadow requests that did not get the same bits.",
        lambda stats: stats.shadow_mismatches,
    ),
    Metric(
        "xla_engine_compiles_after_warmup_total",
        "counter",
        "XLA compilations of the process since the engine was ready.",
        lambda stats: stats.compiles_after_warmup,
    ),
    Metric(
        "xla_engine_phase_seconds_total",
        "counter",
        "Wall time of turns by phase, with phase_timers.",
        lambda stats: _phases(stats),
        "phase",
    ),
    Metric(
        "vllm:request_queue_time_seconds",
        "histogram",
        "Of a sequence, from arrival to its first slot.",
        lambda stats: stats.distributions.queue_seconds,
    ),
    Metric(
        "vllm:time_to_first_token_seconds",
        "histogram",
        "Of a sequence, from arrival to its first token.",
        lambda stats: stats.distributions.first_token_seconds,
    ),
    Metric(
        "vllm:inter_token_latency_seconds",
        "histogram",
        "Between consecutive tokens of a sequence.",
        lambda stats: stats.distributions.inter_token_seconds,
    ),
    Metric(
        "vllm:e2e_request_latency_seconds",
        "histogram",
        "Of a sequence, from arrival to end.",
        lambda stats: stats.distributions.request_seconds,
    ),
    Metric(
        "vllm:request_generation_tokens",
        "histogram",
        "Tokens of a sequence that ended.",
        lambda stats: stats.distributions.output_tokens,
    ),
    Metric(
        "xla_engine_sequence_tokens_per_second",
        "histogram",
        "Rate of a sequence between its first and its last token.",
        lambda stats: stats.distributions.tokens_per_second,
    ),
    Metric(
        "xla_engine_sequence_preemptions",
        "histogram",
        "Preemptions of a sequence that ended.",
        lambda stats: stats.distributions.preemptions,
    ),
    Metric(
        "xla_engine_sequence_failed_steps",
        "histogram",
        "Failed steps of a sequence that ended.",
        lambda stats: stats.distributions.failed_steps,
    ),
    Metric(
        "xla_engine_prefix_hit_tokens",
        "histogram",
        "Cached tokens at the beginning of a prompt, if any.",
        lambda stats: stats.distributions.prefix_hit_tokens,
    ),
    Metric(
        "xla_engine_prefill_padding_ratio",
        "histogram",
        "Share of the positions of a prefill call without a prompt token.",
        lambda stats: stats.distributions.prefill_padding,
    ),
    Metric(
        "xla_engine_decode_rows",
        "histogram",
        "Rows of a decode step.",
        lambda stats: stats.distributions.decode_rows,
    ),
    Metric(
        "xla_engine_blocks_used",
        "histogram",
        "KV blocks in use in a decode step.",
        lambda stats: stats.distributions.blocks_used,
    ),
    Metric(
        "xla_engine_accepted_drafts",
        "histogram",
        "Accepted draft tokens of a row in a verify step.",
        lambda stats: stats.distributions.accepted_drafts,
    ),
)
CACHE_CONFIG = "vllm:cache_config_info"


def engine_metrics(stats: EngineStats, facts: EngineFacts) -> list[Family]:
    """All metrics with their values: those of `METRICS` and the sizes of the KV cache."""
    labels = {"model_name": facts.model_name}
    found = []
    for name, kind, about, read, label in METRICS:
        value = read(stats)
        if isinstance(value, dict):
            samples = tuple(Sample(each, {**labels, str(label): key}) for key, each in value.items())
        else:
            samples = (Sample(value, labels),)
        found.append(Family(name=name, kind=kind, about=about, samples=samples))
    cache = {
        **labels,
        "block_size": str(facts.block_size),
        "num_gpu_blocks": str(facts.num_blocks),
        "enable_prefix_caching": str(facts.enable_prefix_caching),
    }
    return [*found, gauge(CACHE_CONFIG, "Sizes of the KV cache.", [(1, cache)])]


def gauge(name: str, about: str, values: Iterable[tuple[float, dict[str, str]]]) -> Family:
    """A metric that can go up and down."""
    return Family(name=name, kind="gauge", about=about, samples=tuple(Sample(*each) for each in values))


def counter(name: str, about: str, values: Iterable[tuple[float, dict[str, str]]]) -> Family:
    """A metric that only goes up."""
    return Family(name=name, kind="counter", about=about, samples=tuple(Sample(*each) for each in values))


def _phases(stats: EngineStats) -> ByLabel:
    times = stats.phases
    return {} if times is None else {name: getattr(times, name) / 1e9 for name in (*PHASES, "between")}
