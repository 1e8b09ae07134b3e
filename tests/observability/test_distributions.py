"""What an engine counts of its requests is what their outputs say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.models import TINY_ENGINE
from xla_engine import LLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.observability.distributions import Distributions
from xla_engine.observability.histogram import Distribution
from xla_engine.observability.metrics import CACHE_CONFIG, METRICS
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams


def more(before: Distribution, after: Distribution) -> tuple[int, float]:
    return after.count - before.count, after.total - before.total


def lives(outputs: list[RequestOutput]) -> list[tuple[float, ...]]:
    """Token times of each sequence."""
    found = []
    for output in outputs:
        assert output.metrics is not None
        found += output.metrics.sequence_token_times or [output.metrics.token_times]
    return found


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_times_between_tokens_are_those_of_each_sequence(tiny: XlaBatchEngine, lag: int) -> None:
    """Whatever takes the tokens, with slots lost and requests aborted: none is counted twice, none is left out."""
    tiny.lag = lag
    before, outputs = tiny.stats().distributions, []
    for number in range(30):
        params = SamplingParams(
            temperature=0.5,
            max_tokens=1 + number % 23,
            ignore_eos=True,
            n=1 + (number % 5 == 0),
            logit_bias={1: -3.0} if number % 4 else None,
            stop_token_ids=range(20) if number % 7 == 0 else (),  # more than the device knows
        )
        tiny.submit([number + 1] * (1 + number * 3), params, request_id=f"r{number}")
    for turn in range(400):
        if turn % 6 == 2:
            tiny.preempt(f"r{turn % 30}", how=tiny.ways_to_preempt[turn % len(tiny.ways_to_preempt)])
        if turn in (9, 14):
            tiny.abort(f"r{turn}")
        outputs += [output for output in tiny.step(only_finished=turn % 3 > 0) if output.finished]
        if not tiny.has_unfinished:
            break
    assert len(outputs) == 30 and not tiny.has_unfinished
    times, after = [each for each in lives(outputs) if each], tiny.stats().distributions
    count, total = more(before.inter_token_seconds, after.inter_token_seconds)
    assert count == sum(len(each) - 1 for each in times)
    assert math.isclose(total, sum(each[-1] - each[0] for each in times), abs_tol=1e-6)
    assert more(before.first_token_seconds, after.first_token_seconds)[0] == len(times)
    count, total = more(before.output_tokens, after.output_tokens)
    assert (count, total) == (36, sum(map(len, times)))
    assert more(before.request_seconds, after.request_seconds)[0] == 36
    assert more(before.queue_seconds, after.queue_seconds)[0] <= 36
    assert more(before.preemptions, after.preemptions)[1] > 0


def test_the_sequences_of_a_request_have_times_of_their_own(tiny: XlaBatchEngine) -> None:
    """If merged, their tokens are read at the same times, and the time between them seems to be zero."""
    tiny.submit([1, 2, 3], SamplingParams(max_tokens=12, n=3, ignore_eos=True))
    (output,) = tiny.drain()
    metrics = output.metrics
    assert metrics is not None and len(metrics.token_times) == 36
    assert [len(times) for times in metrics.sequence_token_times] == [12, 12, 12]
    gaps = metrics.inter_token_latencies
    # 0 between the two tokens of the first step
    assert len(gaps) == 33 and sum(gap > 0 for gap in gaps) >= 30
    assert sorted(gaps) == sorted(b - a for times in metrics.sequence_token_times for a, b in pairwise(times))


def test_steps_prefill_calls_and_blocks_are_counted(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine(replace(TINY_ENGINE, block_size=32, num_blocks=20, max_model_len=96))
    assert engine.stats().distributions.prefill_padding.count == 0, "the self-check is no request's"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    shared = list(range(1, 65))
    for number in range(12):
        engine.submit([*shared, number + 1], params, request_id=str(number))
    outputs, stats = engine.drain(), engine.stats()
    spread = stats.distributions
    assert spread.decode_rows.total == stats.slot_steps_busy
    assert (
        spread.blocks_used.count == spread.decode_rows.count
        and 0 < (spread.blocks_used.quantile(1) or 0) <= 64
    )
    assert spread.prefill_padding.count == stats.prefill_calls and 0 < (spread.prefill_padding.mean or 0) < 1
    assert (
        spread.prefix_hit_tokens.total
        == stats.cached_tokens
        == sum(each.num_cached_tokens for each in outputs)
    )
    assert stats.cached_tokens > 0 and stats.kv_usage == 0.0 and stats.slots_used == 0


def test_units_are_told_apart(tiny: XlaBatchEngine) -> None:
    """A request of n is n sequences; a sequence may run without a slot, while its last tokens are on the way."""
    before = tiny.stats()
    params = SamplingParams(max_tokens=6, n=3, ignore_eos=True)
    for number in range(4):
        tiny.submit([number + 1], params)
    seen = []
    while tiny.has_unfinished:
        tiny.step()
        stats = tiny.stats()
        seen.append(stats)
        assert stats.slots_used <= min(stats.running, stats.slots) and 0 <= stats.kv_usage <= 1
        assert stats.running + stats.waiting == len(tiny.state.table)
    after = tiny.stats()
    assert after.submitted - before.submitted == 4
    assert sum(after.finished.values()) - sum(before.finished.values()) == 12
    assert any(stats.running > stats.slots_used for stats in seen)


def test_every_metric_has_a_value_that_prometheus_reads(tiny: XlaBatchEngine) -> None:
    tiny.submit([1, 2, 3], SamplingParams(max_tokens=3))
    tiny.drain()
    families = {
        each.name: each for each in text_string_to_metric_families(LLM.from_engine(tiny).metrics_text())
    }
    names = {metric.name.removesuffix("_total") for metric in METRICS} | {CACHE_CONFIG}
    assert set(families) == names
    stats = tiny.stats()
    (tokens,) = families["vllm:generation_tokens"].samples
    assert tokens.value == stats.generation_tokens and tokens.labels == {"model_name": "random"}
    ends = {each.labels["finished_reason"]: each.value for each in families["vllm:request_success"].samples}
    assert ends == stats.finished
    for metric in METRICS:
        if metric.kind == "histogram":
            (count,) = [
                each.value for each in families[metric.name].samples if each.name == f"{metric.name}_count"
            ]
            value = metric.read(stats)
            assert isinstance(value, Distribution) and count == value.count


def test_every_distribution_is_a_metric(tiny: XlaBatchEngine) -> None:
    marked = {
        each.name: Distribution(bounds=(1.0,), counts=(at, 0), total=0.0)
        for at, each in enumerate(fields(Distributions), 1)
    }
    stats = replace(tiny.stats(), distributions=Distributions(**marked))
    read = [metric.read(stats) for metric in METRICS if metric.kind == "histogram"]
    assert sorted(each.count for each in read if isinstance(each, Distribution)) == list(
        range(1, len(marked) + 1)
    )


def test_a_notebook_shows_the_spread(tiny: XlaBatchEngine) -> None:
    tiny.submit([1], SamplingParams(max_tokens=4, ignore_eos=True))
    tiny.drain()
    shown = tiny.stats()._repr_html_()
    assert "inter_token_seconds" in shown and "mean" in shown and "Distribution" not in shown
