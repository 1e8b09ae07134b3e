"""The sampler in C++ against the one in JAX."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import NATIVE_ISAS, registered
from xla_engine.graphs.row_state.rows import NO_CHOICE, make_tables
from xla_engine.graphs.row_state.sampling_fields import SamplingRows, make_sampling_rows
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sampling.logits_processors import SamplingContext


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize("processed", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize(("vocabulary", "width"), [(10, 1), (4097, 48)])
def test_the_samplers_in_cpp_and_in_jax_agree(isa: str, processed: bool, vocabulary: int, width: int) -> None:
    """Tokens, ranks and the most likely tokens; log-probabilities to rounding."""
    in_jax, in_cpp = (
        jax.jit(functools.partial(sampling.sample, processed_logprobs=processed, native=native))
        for native in (None, registered(isa, "sampler"))
    )
    draw = np.random.default_rng(vocabulary)
    for spread in (1.0, 3.0, 8.0):
        logits = (draw.standard_normal((vocabulary, width)) * spread).astype(np.float32)
        logits[draw.random(logits.shape) < 0.1] = -np.inf
        state = make_sampling_rows(width)
        state.temperature[:] = draw.choice([0, 0.5, 1, 2], width)
        state.top_k[:] = draw.choice([0, 0, 1, 40, 500], width)
        state.top_p[:] = draw.choice([1, 0.999, 0.9, 0.3], width)
        state.min_p[:] = draw.choice([0, 0, 0.05], width)
        state.seed[:] = draw.integers(0, 2**32, (width, 2), np.uint32)
        state.num_logprobs[:] = draw.choice([0, 20], width)
        given = jax.tree.map(jnp.asarray, state)
        for position in range(5):
            at = jnp.full(width, position, jnp.int32)
            expected, found = in_jax(logits, given, at), in_cpp(logits, given, at)
            by_row = in_cpp(ByRow(jnp.asarray(logits.T)), given, at)
            assert [each.tobytes() for each in map(np.asarray, by_row)] == [
                each.tobytes() for each in map(np.asarray, found)
            ]
            np.testing.assert_array_equal(found.token, expected.token)
            np.testing.assert_allclose(found.logprob, expected.logprob, rtol=2e-6, atol=2e-6)
            theirs, ours = (np.asarray(each.top)[:, state.num_logprobs > 0] for each in (expected, found))
            values = theirs[21:].view(np.float32)
            np.testing.assert_allclose(ours[21:].view(np.float32), values, rtol=2e-6, atol=2e-6)
            np.testing.assert_array_equal(ours[0], theirs[0])
            np.testing.assert_array_equal(ours[1:21][np.isfinite(values)], theirs[1:21][np.isfinite(values)])


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize(
    "widths", [(1, 6, 48), pytest.param((2, 4, 8, 16, 272), marks=pytest.mark.full)], ids=["some", "all"]
)
def test_greedy_tokens_in_cpp_at_every_width(isa: str, widths: tuple[int, ...]) -> None:
    """Widths that fill a vector with columns, with several entries of few columns, or in part; with ties and NaN."""
    choose = jax.jit(functools.partial(sampling.sample, native=registered(isa, "sampler")))
    for width in widths:
        for size in (5, 511, 1100, 8200):
            logits = np.round(np.random.default_rng(size).standard_normal((size, width)) * 2).astype(
                np.float32
            )
            expected = logits.argmax(axis=0)
            if width > 1:
                logits[:, 0] = -np.inf
                logits[size // 2, width // 2] = np.nan
                logits[size - 1, -1] = np.inf
                expected[[0, width // 2, -1]] = NO_CHOICE
            state = jax.tree.map(jnp.asarray, make_sampling_rows(width))
            for given in (jnp.asarray(logits), ByRow(jnp.asarray(logits.T))):
                found = choose(given, state, jnp.arange(width, dtype=jnp.int32)).token
                np.testing.assert_array_equal(found, expected)


SLOTS, VOCABULARY, POSITIONS, BLOCK, DRAFTS = 12, 150, 96, 16, 2


def adjusted_rows(
    draw: np.random.Generator, width: int, **form: bool
) -> tuple[SamplingRows, SamplingContext]:
    """Rows with various adjustments, of requests whose text repeats itself."""
    state: Any = make_sampling_rows(width, dry=form["dry"])
    state.temperature[:] = draw.choice([0, 0, 1], width)
    state.repetition_penalty[:] = draw.choice([1, 1, 1.3, 0.7], width)
    state.frequency_penalty[:] = draw.choice([0, 0, 0.4, -0.9], width)
    state.presence_penalty[:] = draw.choice([0, 0, 1.1], width)
    state.has_bias[:], state.has_mask[:] = draw.random((2, width)) < 0.3
    state.seed[:] = draw.integers(0, 2**32, (width, 2), np.uint32)
    state.num_logprobs[:] = draw.choice([-1, 0, 20], width)
    if form["dry"]:
        repetition = state.repetition
        repetition.dry_multiplier[:] = draw.choice([0, 0.8, 3], width)
        repetition.dry_base[:] = draw.choice([1, 1.75, 40], width)
        repetition.dry_allowed_length[:] = draw.integers(1, 5, width)
        repetition.dry_breakers[:, :2] = draw.integers(0, 9, (width, 2))
        repetition.penalty_last_n[:] = draw.choice([-1, 0, 7, 200], width)
    tables: Any = make_tables(SLOTS, VOCABULARY, drafts=DRAFTS if form["drafts"] else 0)
    for ids in tables.bias_ids:
        ids[:5] = draw.choice(VOCABULARY, 5, replace=False)
    tables.bias[:] = draw.standard_normal(tables.bias.shape) * 4
    for masks in (tables.mask, tables.draft_masks):
        if masks is not None:
            masks[:] = draw.integers(1, 2**32, masks.shape, np.uint32)
    length = draw.integers(1, POSITIONS + 1, width).astype(np.int32)
    tokens = np.stack([np.resize(draw.integers(0, 9, draw.integers(1, 30)), POSITIONS) for _ in range(SLOTS)])
    blocks = draw.permutation(SLOTS * POSITIONS // BLOCK).reshape(SLOTS, -1).astype(np.int32)
    history = tokens.astype(np.int32)
    if form["blocks"]:
        history = np.zeros((blocks.size, BLOCK), np.int32)
        history[blocks.reshape(-1)] = tokens.reshape(-1, BLOCK)
    context: Any = SamplingContext(
        live=draw.random(width) < 0.8,  # type: ignore[arg-type]
        slot=draw.integers(0, SLOTS, width).astype(np.int32),  # type: ignore[arg-type]
        length=length,  # type: ignore[arg-type]
        prompt_length=draw.integers(0, length + 1).astype(np.int32),  # type: ignore[arg-type]
        min_remaining=draw.integers(-1, 2, width).astype(np.int32),  # type: ignore[arg-type]
        stop_ids=draw.integers(-1, VOCABULARY, (width, 3)).astype(np.int32),  # type: ignore[arg-type]
        history=history,  # type: ignore[arg-type]
        tables=tables,
        block_tables=blocks if form["blocks"] else None,  # type: ignore[arg-type]
        draft=draw.integers(0, DRAFTS + 1, width).astype(np.int32) if form["drafts"] else None,  # type: ignore[arg-type]
    )
    return jax.tree.map(jnp.asarray, (state, context))


@pytest.mark.parametrize("isa", NATIVE_ISAS)
@pytest.mark.parametrize(
    "form",
    [(), ("dry", "blocks"), ("dry", "drafts"), ("drafts", "blocks"), ("dry", "blocks", "drafts")],
    ids=str,
)
@pytest.mark.full
def test_what_shifts_logits_is_the_same_in_cpp_and_in_jax(isa: str, form: tuple[str, ...]) -> None:
    """Bias, windowed penalties, DRY, forbidden stop ids and masks, with slots and with blocks, after drafts."""
    in_jax, in_cpp = (
        jax.jit(functools.partial(sampling.sample, processed_logprobs=True, native=native))
        for native in (None, registered(isa, "sampler"))
    )
    draw = np.random.default_rng(len(form))
    for width in (1, 12):
        for _ in range(20):
            logits = (draw.standard_normal((VOCABULARY, width)) * 3).astype(np.float32)
            wanted = {kind: kind in form for kind in ("dry", "blocks", "drafts")}
            state, context = adjusted_rows(draw, width, **wanted)
            given = jnp.asarray(logits), state, context.length, context
            expected, found = in_jax(*given), in_cpp(*given)
            live = np.asarray(context.live)
            scored = live & np.asarray(state.num_logprobs >= 0)
            np.testing.assert_array_equal(found.token[live], expected.token[live])
            np.testing.assert_allclose(found.logprob[scored], expected.logprob[scored], rtol=1e-5, atol=1e-5)
            listed = live & np.asarray(state.num_logprobs > 0)
            ours, theirs = (np.asarray(each.top)[21:, listed].view(np.float32) for each in (found, expected))
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
