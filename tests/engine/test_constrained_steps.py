"""Constrained rows decode in every step while most rows are constrained; other rows do not wait for a few of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.masks import MaskMaker
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": ["positive", "negative", "mixed"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "reason": {"type": "string", "maxLength": 6},
    },
    "required": ["sentiment", "stars", "reason"],
    "additionalProperties": False,
}
CONSTRAINTS: tuple[Mapping[str, Any], ...] = (
    {"json": SCHEMA},
    {"regex": "(left|right) hand side[0-9]{2}, and no more"},
    {"choice": ["a first choice", "a second choice", "another one"]},
    {"json_object": True},
)
OTHERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 0},
    {"temperature": 0.8, "bad_words": ["e", "first choice"], "logit_bias": {"5": 3.0}},
    {"min_tokens": 3, "temperature": 0.7},
    {"stop": ["sti", "ond"], "logprobs": 1},
    {"n": 2, "temperature": 1.0},
)
JSON = SamplingParams(temperature=0, max_tokens=32, structured_outputs={"json": SCHEMA})
FREE = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def drawn(seed: int, constrained: float, count: int = 12) -> list[SamplingParams]:
    """Parameters of requests, of which a share has a constraint."""
    draw, found = random.Random(seed), []
    for at in range(count):
        fields = {
            "max_tokens": draw.choice([3, 24, 40]),
            "seed": at,
            "temperature": 0.0,
            **draw.choice(OTHERS),
        }
        if draw.random() < constrained:
            fields["structured_outputs"] = draw.choice(CONSTRAINTS)
        found.append(SamplingParams.from_mapping(fields))
    return found


def run(
    engine: XlaBatchEngine, requests: Sequence[SamplingParams], seed: int, ways: Sequence[str] = ()
) -> dict[str, Any]:
    """The results, with requests that come at drawn turns and, with `ways`, lose their slots now and then."""
    draw, found = random.Random(seed), dict[str, RequestOutput]()
    for at, params in enumerate(requests):
        engine.submit("x = ", params, request_id=str(at))
        for _ in range(draw.randrange(3)):
            found |= {each.request_id: each for each in engine.step() if each.finished}
            engine.scheduler.check()
            if ways and draw.random() < 0.4:
                engine.preempt(str(draw.randrange(at + 1)), how=draw.choice(ways))
    found |= {each.request_id: each for each in engine.drain()}
    assert len(found) == len(requests)
    return {name: output.outputs for name, output in found.items()}


@pytest.mark.parametrize("constrained", default([1.0, 0.5, 0.2], 2))
def test_the_share_of_constrained_rows_changes_no_bit(embedded: XlaBatchEngine, constrained: float) -> None:
    """While rows come and go, steps are read at once or later. A request's result is that which it has alone."""
    requests = drawn(int(10 * constrained), constrained)
    embedded.lag = 0
    alone = {}
    for at, params in enumerate(requests):
        embedded.submit("x = ", params, request_id=str(at))
        [output] = embedded.drain()
        alone[str(at)] = output.outputs
    for lag in (0, 1, 2):
        embedded.lag = lag
        assert run(embedded, requests, lag, embedded.ways_to_preempt if lag else ()) == alone


def test_a_mask_of_an_earlier_token_is_found(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above detects rows that decode before their mask is made."""
    requests = drawn(3, 1.0, count=4)
    right = run(embedded, requests, 0)

    def skip(maker: MaskMaker, *, overlaps: bool = True) -> frozenset[str]:
        maker._rows.clear()
        return frozenset()

    monkeypatch.setattr(MaskMaker, "make", skip)
    assert run(embedded, requests, 0) != right


def steps_of(engine: XlaBatchEngine, requests: Sequence[SamplingParams]) -> tuple[int, int]:
    """How many steps they take together, and the most unread steps meanwhile."""
    before, ahead = engine.stats().steps, 0
    for params in requests:
        engine.submit("x = ", params)
    while engine.has_unfinished:
        engine.step()
        ahead = max(ahead, len(engine.state.pipeline.in_flight))
    return engine.stats().steps - before, ahead


def test_constrained_rows_decode_in_every_step(embedded: XlaBatchEngine) -> None:
    embedded.lag = 0
    expected, _ = steps_of(embedded, [JSON] * 4)
    embedded.lag = 1
    steps, _ = steps_of(embedded, [JSON] * 4)
    assert steps <= expected + 1


def test_a_few_constrained_rows_keep_no_step_from_starting_early(embedded: XlaBatchEngine) -> None:
    embedded.lag = 1
    alone, ahead = steps_of(embedded, [FREE] * 3)
    assert ahead == 1
    steps, ahead = steps_of(embedded, [FREE] * 3 + [SamplingParams(max_tokens=4, bad_words=["e e"])])
    assert (steps, ahead) == (alone, 1)
