"""DRY and the window of penalties: agreement with plain Python, and the same bits in every program and schedule."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import TINY_ENGINE
from tests.support.requests import PROMPTS, comparable
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.row_state.limits import MAX_DRY_BREAKERS
from xla_engine.graphs.row_state.sampling_fields import Repetition, make_sampling_rows
from xla_engine.graphs.sampling.logits_processors import LONGEST, dry_penalties
from xla_engine.runner.compile_cache import compiles_of_this_thread
from xla_engine.sampling_params import SamplingParams

ROWS, VOCABULARY, POSITIONS = 4, 23, 90
EIGHT = replace(TINY_ENGINE, enable_dry=True)
DRY = replace(EIGHT, max_num_seqs=4)


def reference(
    tokens: list[int], multiplier: float, base: float, allowed: int, breakers: set[int]
) -> np.ndarray:
    """Compare backwards from every earlier occurrence of the last token, as text-generation-webui does."""
    lost = np.zeros(VOCABULARY, np.float32)
    longest: dict[int, int] = {}
    if tokens[-1] in breakers:
        return lost
    for at in range(len(tokens) - 1):
        following = tokens[at + 1]
        length = 0
        while (
            length < LONGEST
            and at - length >= 0
            and tokens[at - length] == tokens[-1 - length]
            and tokens[-1 - length] not in breakers
        ):
            length += 1
        if length and following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    for token, length in longest.items():
        if length >= allowed:
            lost[token] = min(multiplier * base ** (length - allowed), 1e30)
    return lost


@st.composite
def row(draw: st.DrawFn) -> tuple[list[int], float, float, int, set[int]]:
    few = st.integers(0, draw(st.integers(0, 4)))
    tokens = draw(st.lists(few, min_size=1, max_size=30))
    if draw(st.booleans()):  # text that repeats itself
        tokens = (tokens * 90)[: draw(st.integers(1, POSITIONS))]
    breakers = draw(st.sets(st.integers(0, 5), max_size=2))
    multiplier = draw(st.sampled_from([0.0, 0.8, 3.0]))
    return tokens, multiplier, draw(st.sampled_from([1.0, 1.75, 40.0])), draw(st.integers(1, 5)), breakers


device_penalties = jax.jit(dry_penalties, static_argnums=3)


@settings(max_examples=80, deadline=None)
@given(st.lists(row(), min_size=ROWS, max_size=ROWS), st.integers(0, 5))
def test_penalties_are_those_of_plain_python(rows: list[Any], stale: int) -> None:
    tokens = np.full((ROWS, POSITIONS), stale, np.int32)
    broken = np.full((ROWS, MAX_DRY_BREAKERS), -1, np.int32)
    for at, (own, _, _, _, breakers) in enumerate(rows):
        tokens[at, : len(own)] = own
        broken[at, : len(breakers)] = sorted(breakers)
    _, multiplier, base, allowed, _ = zip(*rows, strict=True)
    record = Repetition(
        dry_multiplier=jnp.asarray(multiplier, jnp.float32),
        dry_base=jnp.asarray(base, jnp.float32),
        dry_allowed_length=jnp.asarray(allowed, jnp.int32),
        dry_breakers=jnp.asarray(broken),
        penalty_last_n=jnp.full(ROWS, -1, jnp.int32),
    )
    length = jnp.asarray([len(own) for own, *_ in rows], jnp.int32)
    found = np.asarray(device_penalties(jnp.asarray(tokens), length, record, VOCABULARY))
    for at, each in enumerate(rows):
        np.testing.assert_allclose(found[:, at], reference(*each), rtol=1e-4)


def test_without_the_option_the_rows_have_no_such_part() -> None:
    """Therefore every program is lowered as it was before the option existed."""
    assert make_sampling_rows(2).repetition is None
    assert len(jax.tree.leaves(make_sampling_rows(2))) == 11
    assert "enable_dry" not in TINY_ENGINE.options() and "enable_dry" in DRY.bit_options()


def params(**fields: Any) -> SamplingParams:
    given = {"max_tokens": 40, "logprobs": 2, "ignore_eos": True, "dry_sequence_breakers": [3, 4], **fields}
    return SamplingParams.from_mapping(given)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0, "dry_multiplier": 5.0, "logit_bias": {5: 20.0}},
    {"temperature": 0.5, "seed": 1, "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 1},
    {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5, "penalty_last_n": 6},
    {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "penalty_last_n": 0},
    {"temperature": 0.7, "seed": 2, "repetition_penalty": 1.2},
    {"temperature": 0, "logit_bias": {5: 20.0}},
]
LOOPS = [[1, 2, 5, 1, 2, 5, 1, 2], [7] * 20, *PROMPTS[2:4]]
CASES = {
    f"{at}/{kind}": (prompt, KINDS[kind]) for at, prompt in enumerate(LOOPS) for kind in range(len(KINDS))
}


def alone(engine: XlaBatchEngine) -> dict[str, Any]:
    found = {}
    for name, (prompt, kind) in CASES.items():
        engine.reset_prefix_cache()
        engine.submit(prompt, params(**kind), request_id=name)
        found[name] = comparable(engine.drain()[0])
    return found


@pytest.mark.parametrize(
    "num_blocks", [pytest.param(None, marks=pytest.mark.full), 24], ids=["slots", "blocks"]
)
def test_bits_are_those_of_alone_whatever_happens_to_the_row(
    make_engine: Callable[..., XlaBatchEngine], num_blocks: int | None
) -> None:
    """The request is parked, recomputed, replayed or continued, and runs in the verify program if there is one."""
    config = replace(DRY, num_blocks=num_blocks, block_size=32, keep_finished=32)
    engine = make_engine(config)
    expected = alone(engine)
    assert expected["0/0"] != expected["0/5"] and expected["0/2"] != expected["0/3"]
    guesses = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}
    engines = [engine]
    if engine.runner.has_one_row_code:
        engines.append(make_engine(replace(config, **guesses)))
    for each in engines:
        draw, found, compiled = random.Random(8), {}, compiles_of_this_thread()
        for name, (prompt, kind) in CASES.items():
            each.submit(prompt, params(**kind, max_tokens=25), request_id=name)
        while each.has_unfinished:
            for output in each.step(only_finished=True):
                if len(output.outputs[0].token_ids) == 25:
                    each.extend(output.request_id, 15)
                else:
                    found[output.request_id] = comparable(output)
            for name in CASES:
                if draw.random() < 0.02:
                    each.preempt(name, how=draw.choice(each.ways_to_preempt))
        assert found == expected
        assert compiles_of_this_thread() == compiled
    assert len(engines) == 1 or engines[1].stats().accepted_tokens > 0


def test_dry_ends_a_loop_and_the_window_forgets(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine(EIGHT)
    bias = {5: 60.0, 6: 59.0, 7: 58.0}  # the model says 5 for ever

    def tokens(**fields: Any) -> tuple[int, ...]:
        engine.submit([1], params(temperature=0, max_tokens=12, logit_bias=bias, **fields))
        return engine.drain()[0].outputs[0].token_ids

    assert set(tokens()) == {5}
    ended = tokens(dry_multiplier=50.0, dry_allowed_length=2, dry_sequence_breakers=[])
    assert ended[:3] == (5, 5, 5) and ended[3] != 5
    assert set(tokens(dry_multiplier=50.0, dry_sequence_breakers=[5])) == {5}
    window = tokens(presence_penalty=2.0, penalty_last_n=1, repetition_penalty=1.0)
    assert window[:6] == (5, 6, 5, 6, 5, 6)
    assert set(tokens(presence_penalty=2.0, penalty_last_n=0)) == {5}


def test_an_engine_with_the_option_gives_other_requests_the_bits_they_have(
    tiny: XlaBatchEngine, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    engine = make_engine(EIGHT)
    assert verify(engine, requests=40, schedules=2, seed=5, lags=(0, 1)).ok
    plain = SamplingParams(temperature=0.8, seed=4, max_tokens=20, logprobs=1, repetition_penalty=1.2)
    results = []
    for each in (tiny, engine):
        each.submit(PROMPTS[3], plain, request_id="same")
        results.append(comparable(each.drain()[0]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dry_multiplier": -1}, "dry_multiplier"),
        ({"dry_multiplier": float("nan")}, "dry_multiplier"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_allowed_length": 0}, "dry_allowed_length"),
        ({"dry_allowed_length": 65}, "dry_allowed_length"),
        ({"penalty_last_n": -2}, "penalty_last_n"),
        ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [""]}, "breaker"),
        ({"dry_sequence_breakers": [1.5]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": [1] * 17}, "at most 16"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        SamplingParams(**fields)


def test_an_engine_without_the_option_says_what_to_set(tiny: XlaBatchEngine) -> None:
    for fields in ({"dry_multiplier": 1.0}, {"penalty_last_n": 64}):
        with pytest.raises(InvalidRequestError, match="enable_dry"):
            tiny.submit([1, 2], SamplingParams(**fields))  # type: ignore[arg-type]
    assert EngineConfig(enable_dry=True).enable_dry


def test_breakers_are_the_tokens_of_their_strings(embedded: XlaBatchEngine) -> None:
    validator = replace(embedded.validator, has_dry=True)
    assert embedded.tokenizer is not None
    found = validator.dry_breakers(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=["\n", 5, ":"]))
    assert found[1] == 5 and embedded.tokenizer.decode([found[0]]) == "\n"
    assert validator.dry_breakers(SamplingParams()) == ()
    with pytest.raises(InvalidRequestError, match="not in 0"):
        validator.dry_breakers(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[10**7]))
