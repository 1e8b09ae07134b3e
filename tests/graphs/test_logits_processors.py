"""Bias, penalties, forbidden tokens and log-probabilities against NumPy, row by row, all mixed in one shape."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.instruction_sets import ISAS, registered
from xla_engine.graphs.row_state.rows import make_tables
from xla_engine.graphs.row_state.sampling_fields import SamplingRows, make_sampling_rows
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.sampling.logits_processors import SamplingContext, adjust
from xla_engine.graphs.sampling.logprobs import MAX_LOGPROBS, unpack_top_logprobs
from xla_engine.text.token_mask import pack_bits

ROWS, VOCABULARY, POSITIONS, STOPS = 8, 199, 24, 3

Row = dict[str, Any]


@st.composite
def row(draw: st.DrawFn) -> Row:
    """One row: its request's parameters and its tokens so far."""
    token = st.integers(0, VOCABULARY - 1)
    few = st.integers(0, 9)  # so that tokens repeat
    tokens = draw(st.lists(few, min_size=1, max_size=POSITIONS))
    allowed = draw(st.one_of(st.none(), st.sets(token, min_size=20)))
    return {
        "live": draw(st.booleans()),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.3])),
        "top_k": draw(st.sampled_from([0, 0, 5])),
        "min_p": draw(st.sampled_from([0.0, 0.1])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.5, 0.5])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.7, -1.1])),
        "presence_penalty": draw(st.sampled_from([0.0, 1.3])),
        "bias": draw(st.dictionaries(token, st.sampled_from([-100.0, -3.0, 2.5]), max_size=5)),
        "allowed": allowed,
        "min_remaining": draw(st.integers(0, 2)),
        "stop_ids": draw(st.lists(few, max_size=STOPS, unique=True)),
        "tokens": tokens,
        "prompt_length": draw(st.integers(1, len(tokens))),
        "num_logprobs": draw(st.sampled_from([-1, 0, 3, 20])),
    }


def reference(logits: np.ndarray, row: Row) -> np.ndarray:
    """Apply the adjustments to one row, in the order that `SamplingParams` states."""
    logits = logits.copy()
    for token, bias in row["bias"].items():
        logits[token] += np.float32(bias)
    output = row["tokens"][row["prompt_length"] :]
    for token in set(row["tokens"]):
        penalty = np.float32(row["repetition_penalty"])
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(output):
        logits[token] -= np.float32(row["frequency_penalty"]) * output.count(token)
        logits[token] -= np.float32(row["presence_penalty"])
    if row["min_remaining"]:
        logits[row["stop_ids"]] = -np.inf
    if row["allowed"] is not None:
        logits[sorted(set(range(VOCABULARY)) - row["allowed"])] = -np.inf
    return logits


def records(rows: list[Row], order: list[int]) -> tuple[SamplingRows, SamplingContext]:
    """The device's records of `rows`, row i in slot `order[i]` of history and tables."""
    state: Any = make_sampling_rows(ROWS)
    tables: Any = make_tables(ROWS, VOCABULARY)
    history = np.full((ROWS, POSITIONS), 7, np.int32)  # stale
    stop_ids = np.full((ROWS, STOPS), -1, np.int32)
    for index, (row, slot) in enumerate(zip(rows, order, strict=True)):
        for name in ("temperature", "top_k", "min_p", "num_logprobs"):
            getattr(state, name)[index] = row[name]
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            getattr(state, name)[index] = row[name]
        state.seed[index] = 0, index
        state.has_bias[index], state.has_mask[index] = bool(row["bias"]), row["allowed"] is not None
        tables.bias_ids[slot, : len(row["bias"])] = list(row["bias"])
        tables.bias[slot, : len(row["bias"])] = list(row["bias"].values())
        if row["allowed"] is not None:
            tables.mask[slot] = pack_bits(row["allowed"], VOCABULARY)
        history[slot, : len(row["tokens"])] = row["tokens"]
        stop_ids[index, : len(row["stop_ids"])] = row["stop_ids"]
    context = SamplingContext(
        live=np.array([row["live"] for row in rows]),
        slot=np.array(order, np.int32),
        length=np.array([len(row["tokens"]) for row in rows], np.int32),
        prompt_length=np.array([row["prompt_length"] for row in rows], np.int32),
        min_remaining=np.array([row["min_remaining"] for row in rows], np.int32),
        stop_ids=stop_ids,
        history=history,
        tables=tables,
    )
    return state, jax.tree.map(jnp.asarray, context)


def random_logits(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((VOCABULARY, ROWS)) * 3).astype(np.float32)


device_adjust = jax.jit(adjust)


@functools.cache
def device_sample(isa: str | None) -> Callable[..., sampling.Sampled]:
    sample = functools.partial(sampling.sample, native=registered(isa, "sampler"))
    return jax.jit(sample, static_argnames="processed_logprobs")


mixes = st.lists(row(), min_size=ROWS, max_size=ROWS)


@settings(max_examples=60, deadline=None)
@given(mixes, st.permutations(range(ROWS)), st.integers(0, 2**31))
def test_logits_are_adjusted_in_the_order_that_is_promised(
    rows: list[Row], order: list[int], seed: int
) -> None:
    logits = random_logits(seed)
    found = np.asarray(device_adjust(jnp.asarray(logits), *records(rows, order)))
    for index, row in enumerate(rows):
        if row["live"]:
            np.testing.assert_allclose(
                found[:, index], reference(logits[:, index], row), rtol=1e-6, atol=1e-5
            )


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(mixes, st.permutations(range(ROWS)), st.integers(0, 2**31), st.booleans())
def test_tokens_and_logprobs_follow_from_the_adjusted_logits(
    isa: str | None, rows: list[Row], order: list[int], seed: int, processed: bool
) -> None:
    """Greedy rows take the largest adjusted logit, others one that is kept; logprobs are raw or processed."""
    logits = random_logits(seed)
    token, logprob, top = (
        np.asarray(value)
        for value in device_sample(isa)(
            jnp.asarray(logits), *_with_position(records(rows, order)), processed_logprobs=processed
        )
    )
    for index, row in enumerate(rows):
        if not row["live"]:
            continue
        adjusted = reference(logits[:, index], row)
        if row["temperature"] == 0:
            scored = adjusted
            assert adjusted[token[index]] >= adjusted.max() - 1e-5
        else:
            scored = _truncated(adjusted / np.float32(row["temperature"]), row)
            assert np.isfinite(scored[token[index]])
        scored = (scored if processed else logits[:, index]).astype(np.float64)
        expected = scored - scored.max() - np.log(np.exp(scored - scored.max()).sum())
        if row["num_logprobs"] >= 0:
            np.testing.assert_allclose(logprob[index], expected[token[index]], atol=1e-4)
        if row["num_logprobs"] > 0:
            found = unpack_top_logprobs(top[:, index], row["num_logprobs"])
            values = np.sort(expected)[::-1][: row["num_logprobs"]]
            np.testing.assert_allclose(found.logprobs, values, atol=1e-4)
            np.testing.assert_allclose(expected[list(found.token_ids)], values, atol=1e-4)
            better = int((expected > expected[token[index]] + 1e-4).sum())
            ties = int((np.abs(expected - expected[token[index]]) <= 1e-4).sum())
            assert better < found.rank <= better + ties


def _with_position(
    state: tuple[SamplingRows, SamplingContext],
) -> tuple[SamplingRows, jax.Array, SamplingContext]:
    return state[0], state[1].length, state[1]


def _truncated(scaled: np.ndarray, row: Row) -> np.ndarray:
    kept = np.exp(scaled - scaled.max()) >= row["min_p"] - 1e-6
    if row["top_k"]:
        kept &= scaled >= np.sort(scaled)[-row["top_k"]]
    return np.where(kept, scaled, -np.inf)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=15, deadline=None)
@given(mixes, mixes, st.permutations(range(ROWS)), st.integers(0, 2**31))
def test_a_row_is_the_same_bits_beside_any_others(
    isa: str | None, rows: list[Row], others: list[Row], order: list[int], seed: int
) -> None:
    """Law 1 inside the sampler: penalties, masks and log-probabilities of other rows change nothing."""
    logits = random_logits(seed)
    mine = replace_live(rows[0])
    alone = [mine, *[{**other, "live": False} for other in others[1:]]]
    among = [mine, *rows[1:]]
    found = [
        [np.asarray(leaf)[..., 0] for leaf in device_sample(isa)(jnp.asarray(logits), *_with_position(state))]
        for state in (records(alone, order), records(among, order))
    ]
    wanted = max(mine["num_logprobs"], 0)
    assert found[0][0] == found[1][0]
    if mine["num_logprobs"] >= 0:
        assert found[0][1].tobytes() == found[1][1].tobytes()
    if wanted:
        assert unpack_top_logprobs(found[0][2], wanted) == unpack_top_logprobs(found[1][2], wanted)


def replace_live(row: Row) -> Row:
    return {**row, "live": True}


def test_the_reference_can_fail() -> None:
    """The comparison detects a penalty that is applied before the bias."""
    plain: Row = {
        "live": True, "temperature": 0.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.5,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "bias": {3: 2.5}, "allowed": None,
        "min_remaining": 0, "stop_ids": [], "tokens": [3], "prompt_length": 1, "num_logprobs": -1,
    }  # fmt: skip
    logits = np.ones((VOCABULARY, ROWS), np.float32)
    state, context = records([plain] * ROWS, list(range(ROWS)))
    found = np.asarray(device_adjust(jnp.asarray(logits), state, context))
    assert found[3, 0] == pytest.approx((1 + 2.5) / 1.5) != pytest.approx(1 / 1.5 + 2.5)
    without = replace(state, repetition_penalty=np.ones(ROWS, np.float32))
    assert np.asarray(device_adjust(jnp.asarray(logits), without, context))[3, 0] == pytest.approx(3.5)


def test_a_vocabulary_smaller_than_the_width_is_listed_whole() -> None:
    logits = jnp.asarray(np.arange(5 * ROWS, dtype=np.float32).reshape(5, ROWS))
    state = make_sampling_rows(ROWS)
    state.num_logprobs[:] = MAX_LOGPROBS
    top = np.asarray(sampling.sample(logits, jax.tree.map(jnp.asarray, state), jnp.arange(ROWS)).top)
    assert unpack_top_logprobs(top[:, 0], MAX_LOGPROBS).token_ids == (4, 3, 2, 1, 0)
