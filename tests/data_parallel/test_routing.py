"""How requests are routed, how engines share the machine, and what they report."""

from __future__ import annotations

import doctest
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_engine import FakeEngine
from xla_engine.config import EngineConfig
from xla_engine.data_parallel import fleet, totals
from xla_engine.data_parallel.fleet import config_of_engine, shares
from xla_engine.data_parallel.routing import PrefixRouter
from xla_engine.data_parallel.wire import (
    Received,
    SentOutput,
    config_of,
    decode,
    encode,
    news_of,
)
from xla_engine.observability.distributions import Histograms
from xla_engine.observability.phases import PhaseTimes
from xla_engine.observability.stats import EngineStats
from xla_engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler.snapshot import Times


def test_a_prompt_goes_where_its_prefix_is() -> None:
    router = PrefixRouter(block_size=4, slack=3)
    first = list(range(12))
    assert router.choose(first, "", {0: 5, 1: 2}) == 1
    assert router.choose([*first[:8], 99, 98], "", {0: 0, 1: 2}) == 1
    assert router.choose([*first[:8], 99, 98], "", {0: 0, 1: 4}) == 0  # too busy
    assert router.choose(first[:4], "", {0: 0, 1: 2}) == 0  # its only block would be computed anyhow
    assert router.choose(first, "tenant", {0: 0, 1: 2}) == 0
    assert router.choose([50, 51, 52, 53, 54], "", {0: 1, 1: 1}) == 0
    router.forget(1)
    assert router.choose([*first, 1], "", {0: 3, 1: 3}) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 9)), max_size=30))
def test_an_engine_is_chosen_from_those_that_take_requests(prompts: list[tuple[list[int], int]]) -> None:
    router = PrefixRouter(block_size=2, slack=2)
    for tokens, load in prompts:
        loads = {1: load, 4: 3}
        chosen = router.choose(tokens, "", loads)
        assert chosen in loads and loads[chosen] <= min(loads.values()) + 2


def test_the_machine_is_divided() -> None:
    assert doctest.testmod(fleet).failed == 0
    assert [each.cores for each in shares(4, cores=[0, 1], gpus=[])] == [()] * 4  # too few to divide


@given(st.integers(1, 8), st.floats(0.05, 1.0))
def test_engines_take_equal_parts_of_the_memory_that_is_allowed(engines: int, utilization: float) -> None:
    """When engines start one after the other, or one of them restarts while the others run."""
    config, parts = EngineConfig(memory_utilization=utilization), shares(engines, cores=range(8), gpus=[])
    each = utilization / engines
    for running in range(engines):
        left = 1 - running * each
        own = config_of_engine(config, parts, 0, running).memory_utilization
        assert own <= 1 and math.isclose(own * left, each, rel_tol=1e-6)


def test_engines_with_a_gpu_each_take_all_that_is_allowed_of_it() -> None:
    parts = shares(4, cores=[0, 1], gpus=["3", "5"])
    assert [each.gpu for each in parts] == ["3", "5", "3", "5"] and parts[0].cores == ()
    alone = shares(2, cores=[0, 1], gpus=["0", "1"])
    assert config_of_engine(EngineConfig(), alone, 1, 0).memory_utilization == 0.9


def output(tokens: int, *, finished: bool, n: int = 1) -> RequestOutput:
    tops = tuple(
        {token: Logprob(-0.1 * token, 1, "t"), 9: Logprob(-math.inf, 2, None)} for token in range(tokens)
    )
    text = "abcdefgh"[:tokens]
    return RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=(1, 2),
        outputs=tuple(
            CompletionOutput(
                index=index,
                text=text,
                token_ids=tuple(range(tokens)),
                cumulative_logprob=-0.1 * tokens / 3,
                logprobs=tuple(-0.1 * token / 3 for token in range(tokens)),
                top_logprobs=tops,
                finish_reason="stop" if finished else None,
                stop_reason="h" if finished else None,
            )
            for index in range(n)
        ),
        finished=finished,
        metrics=RequestMetrics(
            arrival_time=1.5,
            admitted_time=2.0,
            first_token_time=2.5 if tokens else None,
            finished_time=9.0 if finished else None,
            token_times=tuple(2.5 + token for token in range(tokens)),
        ),
        prompt_logprobs=(None, {2: Logprob(-1.0, 1, "x")}),
        num_cached_tokens=1,
    )


@pytest.mark.parametrize("n", [1, 3])
def test_outputs_come_through_in_pieces(n: int) -> None:
    sent, received = SentOutput(), Received()
    for tokens in (0, 1, 4, 4, 8):
        whole = output(tokens, finished=tokens == 8, n=n)
        line = encode(news_of(whole, sent))
        received.add(decode(line))
        assert received.output("r", "p", (1, 2), 1.5) == whole
        assert line.count(b"\n") == 1 and len(line) < 1200 * n


def test_a_run_is_behind_an_earlier_one_until_it_has_its_tokens() -> None:
    earlier, later, sent = Received(), Received(), SentOutput()
    earlier.add(decode(encode(news_of(output(4, finished=False), SentOutput()))))
    for tokens, behind in ((1, True), (3, True), (4, False), (6, False)):
        later.add(decode(encode(news_of(output(tokens, finished=False), sent))))
        assert later.is_behind(earlier) is behind
    assert later.continues(earlier)
    earlier.sequences[0].tokens[2] = 77
    assert not later.continues(earlier)


def test_options_come_through() -> None:
    config = EngineConfig(key_buckets=(256, 512), speculative_config={"method": "suffix"}, seed=-5)
    assert config_of(decode(encode(asdict(config)))) == config
    params = SamplingParams(
        logit_bias={5: 1.5},
        stop=["a"],
        structured_outputs={"choice": ["x", "y"]},
        seed=2**64 - 1,
        max_tokens=None,
    )
    assert SamplingParams.from_mapping(decode(encode(params.to_mapping()))) == params


def test_counters_and_distributions_are_added_up() -> None:
    """Of engines that are there, and of processes that have ended; what is now is of the former only."""
    histograms = Histograms()
    histograms.decode_rows.add(3, 2)
    one = EngineStats(
        steps=5,
        generation_tokens=7,
        load_seconds=2.0,
        waiting=1,
        slots=4,
        kv_usage=0.5,
        recoveries=1,
        phases=PhaseTimes(turns=2, plan=10),
        distributions=histograms.now(),
    )
    told = [decode(encode(asdict(one))), decode(encode(asdict(one))), {}]  # the third starts again
    found = totals.stats(told, told[:1], finished={"stop": 9}, recoveries=2, submitted=11)
    assert (found.steps, found.generation_tokens, found.load_seconds) == (15, 21, 2.0)
    assert (found.waiting, found.slots, found.kv_usage) == (2, 8, 0.5)
    assert (found.recoveries, found.submitted, found.finished) == (5, 11, {"stop": 9})
    assert found.phases == PhaseTimes(turns=6, plan=30)
    assert found.distributions.decode_rows.count == 6 and found.distributions.decode_rows.mean == 3.0
    assert totals.stats([{}], [], finished={}, recoveries=0, submitted=0) == EngineStats()


def test_snapshots_come_through_and_are_numbered_through() -> None:
    engine = FakeEngine()
    for prompt in ("a", "b", "c", "d"):
        engine.submit(prompt)
    whole = engine.snapshot()
    timed = replace(whole.waiting[0], times=Times(age=1.5, queued=1.5, first_token=None))
    whole = replace(whole, waiting=(timed,))
    told = decode(encode(asdict(whole)))
    assert totals.snapshot([told], blocks=0) == whole
    both = totals.snapshot([told, told], blocks=0)
    assert [view.slot.index for view in both.slots] == list(range(6)) and both.waiting == (timed, timed)
    assert both.counters.submitted == 8
