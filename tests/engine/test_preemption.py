"""A request may lose its slot at any step, in any way, and returns the bits it returns alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.device import num_parked
from tests.support.models import TINY_ENGINE
from tests.support.requests import PARAMS, PROMPTS, answers, submit_all
from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.turn import answer_turn
from xla_engine.equivalence.verify import verify
from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT

MakeEngine = Callable[..., XlaBatchEngine]


@pytest.mark.parametrize("lag", default([1, 0, 3]))
def test_slots_lost_at_random_steps_change_no_bit(tiny: XlaBatchEngine, lag: int) -> None:
    """Half of the live requests are preempted in some step, in every way; streams never repeat a token."""
    ways = tiny.ways_to_preempt
    exact = tiny.runner.has_one_row_code  # else nobody knows that a recompute is exact
    assert ways == (WAYS_TO_PREEMPT if exact else ("park", "replay"))
    expected: dict[str, object] = {}
    for at, prompt in enumerate(PROMPTS):
        for kind, params in enumerate(PARAMS):
            tiny.reset_prefix_cache()
            tiny.submit(prompt, params, request_id=f"{at}/{kind}")
            expected.update(answers(tiny.drain()))
    tiny.lag = lag
    draw = random.Random(lag)
    live = set(submit_all(tiny))
    seen = dict.fromkeys(live, 0)
    done: list[RequestOutput] = []
    before = tiny.stats().preemptions
    while tiny.has_unfinished:
        for output in tiny.step():
            count = len(output.outputs[0].token_ids)
            assert count >= seen[output.request_id], "a token was taken back"
            seen[output.request_id] = count
            if output.finished:
                done.append(output)
                live.remove(output.request_id)
        for name in sorted(live):
            if draw.random() < 0.15:
                tiny.preempt(name, how=draw.choice((None, *ways)), to_back=draw.random() < 0.3)
        tiny.scheduler.check()
    assert answers(done) == expected
    assert tiny.stats().preemptions - before > 30
    assert num_parked(tiny.runner) == 0


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_slot_lost_while_a_step_is_read_changes_no_bit(tiny: XlaBatchEngine, lag: int) -> None:
    """This can happen with `AsyncLLM`, while the first token, the second or later ones are in flight."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompt = list(range(3, 30))  # two chunks, in one step
    tiny.submit(prompt, params, request_id="it")
    expected = answers(tiny.drain())
    tiny.lag = lag
    for way in tiny.ways_to_preempt:
        for turns in range(5):
            tiny.reset_prefix_cache()
            tiny.submit(prompt, params, request_id="it")
            for _ in range(turns):
                tiny.step()
            wait = next(turn := tiny.turn(), None)
            assert tiny.preempt("it", how=way), (way, turns)
            if wait is not None:
                answer_turn(turn, wait.call())
            assert answers(tiny.drain()) == expected, (way, turns)


@pytest.mark.full
def test_with_the_cpp_operations_a_recompute_is_exact(embedded: XlaBatchEngine) -> None:
    if not embedded.runner.has_one_row_code:
        pytest.skip("this machine has no C++ products")
    assert embedded.ways_to_preempt == WAYS_TO_PREEMPT
    report = verify(embedded, requests=60, schedules=3, seed=23, lags=(0, 1, 2))
    assert not report.divergences and report.preempted > 10, "\n".join(report.lines())


@pytest.mark.full
def test_by_the_attention_that_stale_values_harm(make_engine: MakeEngine) -> None:
    """Cold, cached and preempted requests have the same bits, also if slots are cleared after restored positions."""
    config = replace(
        TINY_ENGINE, attention_backend="xla", prefill_lanes=(8,), key_buckets=(512,), max_num_seqs=4
    )
    engine = make_engine(config)
    report = verify(engine, requests=40, schedules=2, seed=21, lags=(0, 2))
    assert report.ok and report.preempted > 5, "\n".join(report.lines())


def test_a_more_urgent_request_takes_the_slot_of_the_last_in_line(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(TINY_ENGINE, max_num_seqs=1, prefill_lanes=(8,), priority_aging=4))
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, logprobs=0, ignore_eos=True)
    engine.submit(PROMPTS[3], params, request_id="patient")
    (alone,) = engine.drain()
    engine.reset_prefix_cache()
    engine.submit(PROMPTS[3], params, request_id="patient")
    for _ in range(6):
        engine.step()
    engine.submit(PROMPTS[1], replace(params, max_tokens=3), request_id="urgent", priority=-5)
    ended = engine.drain()
    assert [output.request_id for output in ended] == ["urgent", "patient"]
    assert answers(ended)["patient"] == answers([alone])["patient"]
    assert engine.stats().preemptions == 1


def test_where_the_host_has_no_room_requests_run_again(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(TINY_ENGINE, swap_space=0.0, self_check=False, prefill_lanes=(8,)))
    names = submit_all(engine)
    ended = [output for _ in range(6) for output in engine.step(only_finished=True)]
    for name in names[:8]:
        engine.preempt(name)
    assert num_parked(engine.runner) == 0
    found = answers([*ended, *engine.drain()])
    assert engine.stats().preemptions > 0
    engine.reset_prefix_cache()
    submit_all(engine)
    assert found == answers(engine.drain())
    with pytest.raises(InvalidRequestError, match="preempts by park, replay, not 'recompute'"):
        engine.preempt("x", how="recompute")


@pytest.mark.parametrize("lag", [0, 1])
def test_what_a_text_must_match_begins_anew_with_a_request_that_runs_again(
    embedded: XlaBatchEngine, lag: int
) -> None:
    """Once, a request that got a slot again in the same step was prefilled with the mask of a later token."""
    pytest.importorskip("llguidance")
    params = SamplingParams(seed=4, max_tokens=40, logprobs=0, structured_outputs={"regex": "([a-z] ){9}"})  # type: ignore[arg-type]
    embedded.lag = lag
    embedded.submit("def ", params, request_id="word")
    (alone,) = embedded.drain()
    for steps in (2, 3, 6):
        embedded.submit("def ", params, request_id="word")
        ended = [output for _ in range(steps) for output in embedded.step(only_finished=True)]
        assert not ended and embedded.preempt("word", how="replay")
        (again,) = embedded.drain()
        assert (again.error, answers([again])) == (None, answers([alone]))


def test_a_request_that_ends_while_it_is_parked_leaves_nothing(tiny: XlaBatchEngine) -> None:
    tiny.submit(PROMPTS[3], PARAMS[0], request_id="a")
    for _ in range(5):
        tiny.step()
    assert tiny.preempt("a", how="park")
    assert not tiny.preempt("a"), "it has no slot to lose"
    for _ in range(8):  # others take the slots, so that it stays where it is
        tiny.submit(PROMPTS[2], PARAMS[0], priority=-10)
    tiny.step()
    assert num_parked(tiny.runner) == 1
    assert tiny.abort("a")
    assert num_parked(tiny.runner) == 0
    tiny.drain()
