"""Gated DeltaNet layers: agreement with the recurrence in NumPy, and the laws of state in slots."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import HERE
from tests.support.tiers import default
from xla_engine.graphs.config import DeltaForm
from xla_engine.graphs.delta_net.layer import (
    DeltaState,
    DeltaWeights,
    delta_decode,
    delta_prefill,
    make_state,
)
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.recipe import NativeBuildError

FORM = DeltaForm(key_heads=2, value_heads=6, key_dim=16, value_dim=80, kernel=4, norm_eps=1e-6)
SLOTS, WIDTH = 8, 32
RNG = np.random.default_rng(0)
WEIGHTS = DeltaWeights(
    *(
        RNG.standard_normal(shape, np.float32)
        for shape in ((FORM.mixed_features, FORM.kernel), FORM.value_heads, FORM.value_heads, FORM.value_dim)
    )
)


class Forms(NamedTuple):
    """Decode and prefill of one form."""

    decode: Any
    prefill: Any


@pytest.fixture(scope="module", params=["pure JAX", *HERE])
def forms(request: pytest.FixtureRequest) -> Forms:
    native = None if request.param == "pure JAX" else request.param
    if native:
        try:
            register(native, {"delta"})
        except NativeBuildError as error:
            pytest.skip(str(error))
    return Forms(*(jax.jit(functools.partial(f, FORM, native=native)) for f in (delta_decode, delta_prefill)))


def sequence(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, FORM.projected_features)).astype(np.float32)


def recurrence(projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of all positions, and the state after the last, computed in float64 position by position."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    convolution, decay, step_bias, norm = (np.asarray(x, np.float64) for x in WEIGHTS)
    mixed, gates, rate, step = np.split(
        projected.astype(np.float64),
        np.cumsum([FORM.mixed_features, FORM.inner_features, FORM.value_heads]),
        axis=1,
    )
    padded = np.concatenate([np.zeros((FORM.kernel - 1, mixed.shape[1])), mixed])
    memory = np.zeros((FORM.value_heads, FORM.key_dim, FORM.value_dim))
    outputs = []
    for t in range(len(mixed)):
        x = (padded[t : t + FORM.kernel] * convolution.T).sum(axis=0)
        x = x * sigmoid(x)
        keys = FORM.key_heads * FORM.key_dim
        q, k = (x[at : at + keys].reshape(FORM.key_heads, -1) for at in (0, keys))
        q, k = (y / np.sqrt((y * y).sum(axis=1, keepdims=True) + 1e-6) for y in (q, k))
        q, k = (np.repeat(y, FORM.value_heads // FORM.key_heads, axis=0) for y in (q, k))
        v = x[2 * keys :].reshape(FORM.value_heads, -1)
        memory *= np.exp(-np.exp(decay) * np.log1p(np.exp(step[t] + step_bias)))[:, None, None]
        change = (v - np.einsum("hkv,hk->hv", memory, k)) * sigmoid(rate[t])[:, None]
        memory += k[:, :, None] * change[:, None, :]
        out = np.einsum("hkv,hk->hv", memory, q) * FORM.key_dim**-0.5
        out = out / np.sqrt((out * out).mean(axis=1, keepdims=True) + FORM.norm_eps) * norm
        outputs.append(out.reshape(-1) * gates[t] * sigmoid(gates[t]))
    return np.array(outputs), memory


def lanes(pieces: list[tuple[int, int, np.ndarray]], count: int) -> dict[str, Any]:
    """Arguments of a prefill call from (slot, start, projected) per lane; unused lanes hold NaN."""
    projected = np.full((count, WIDTH, FORM.projected_features), np.nan, np.float32)
    slot, start, used = np.zeros((3, count), np.int32)
    for lane, (where, first, rows) in enumerate(pieces):
        projected[lane, : len(rows)] = rows
        slot[lane], start[lane], used[lane] = where, first, len(rows)
    return {"projected": projected.reshape(count * WIDTH, -1), "lanes": Extents(slot, start, used)}


def run(
    forms: Forms, state: DeltaState, pieces: list[tuple[int, int, np.ndarray]], count: int
) -> tuple[DeltaState, list[np.ndarray]]:
    arguments = lanes(pieces, count)
    state, out = forms.prefill(WEIGHTS, state, **arguments)
    by_lane = np.asarray(out).reshape(count, WIDTH, -1)
    return state, [by_lane[lane, : len(rows)] for lane, (_, _, rows) in enumerate(pieces)]


def chunks(slot: int, projected: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    return [(slot, at, projected[at : at + WIDTH]) for at in range(0, len(projected), WIDTH)]


def steps(forms: Forms, state: DeltaState, slot: int, projected: np.ndarray) -> tuple[DeltaState, np.ndarray]:
    outputs = []
    live = np.arange(SLOTS) == slot
    for row in projected:
        fed = np.full((SLOTS, len(row)), np.nan, np.float32)  # of rows that are not live
        fed[slot] = row
        state, out = forms.decode(WEIGHTS, state, fed, live=live)
        outputs.append(np.asarray(out)[slot])
    return state, np.array(outputs)


def poisoned() -> DeltaState:
    """Slots whose last owners left NaN."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_state(FORM, SLOTS))


def same(left: Any, right: Any) -> bool:
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


@pytest.mark.parametrize("length", default([17, 1, 3, 16, 31, 70], 2))
def test_prefill_then_decode_is_the_recurrence(forms: Forms, length: int) -> None:
    projected = sequence(length + 5)
    expected, memory = recurrence(projected)
    state, pieces = run(forms, poisoned(), chunks(2, projected[:length]), 3)
    np.testing.assert_allclose(np.concatenate(pieces), expected[:length], atol=2e-5)
    state, behind = steps(forms, state, 2, projected[length:])
    np.testing.assert_allclose(behind, expected[length:], atol=2e-5)
    np.testing.assert_allclose(state.memory[2], memory, atol=2e-5)


def test_equal_keys_without_decay_stay_exact(forms: Forms) -> None:
    """This is the worst triangular system: its powers are large, but its inverse is not."""
    projected = np.tile(sequence(1, seed=4), (64, 1))
    projected[:, -FORM.value_heads :] = -30  # no decay
    projected[:, -2 * FORM.value_heads : -FORM.value_heads] = 6  # a rate of almost one
    expected, _ = recurrence(projected)
    _, pieces = run(forms, poisoned(), chunks(0, projected), 3)
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-4)


def test_how_a_prompt_falls_into_lanes_and_calls_changes_no_bit(forms: Forms) -> None:
    projected = sequence(70, seed=1)
    (first, second, third), other = chunks(5, projected), chunks(1, sequence(40, seed=2))
    state, (a, b, c) = run(forms, poisoned(), [first, second, third], 3)
    apart = poisoned()
    apart, (_, d) = run(forms, apart, [other[0], first], 2)
    apart, (e, _) = run(forms, apart, [second, other[1]], 3)
    apart, (f,) = run(forms, apart, [third], 2)
    assert same(np.concatenate([a, b, c]), np.concatenate([d, e, f]))
    assert same(state.memory[5], apart.memory[5]) and same(state.inputs[5], apart.inputs[5])


def test_rows_decode_alone_as_among_others(forms: Forms) -> None:
    state, _ = run(forms, poisoned(), chunks(0, sequence(20, seed=1)), 3)
    state, _ = run(forms, state, chunks(7, sequence(20, seed=1)), 3)
    row = sequence(1, seed=9)[0]
    alone, out = forms.decode(WEIGHTS, state, np.tile(row, (SLOTS, 1)), live=np.arange(SLOTS) == 0)
    crowd = sequence(SLOTS, seed=8)
    crowd[7] = row
    among, others = forms.decode(WEIGHTS, state, crowd, live=np.ones(SLOTS, bool))
    assert same(np.asarray(out)[0], np.asarray(others)[7])
    assert same(alone.memory[0], among.memory[7]) and same(alone.inputs[0], among.inputs[7])


def test_what_is_not_named_keeps_its_bytes(forms: Forms) -> None:
    """Rows that are not live and unused lanes, whose slot is 0, write nothing."""
    before = jax.tree.map(
        lambda leaf: jnp.asarray(RNG.standard_normal(leaf.shape), jnp.float32), make_state(FORM, SLOTS)
    )
    after, _ = run(forms, before, chunks(3, sequence(20)), 3)
    after, _ = steps(forms, after, 3, sequence(2))
    others = np.arange(SLOTS) != 3
    for old, new in zip(before, after, strict=True):
        assert same(np.asarray(old)[others], np.asarray(new)[others])


@pytest.mark.parametrize("isa", HERE)
def test_the_native_form_gives_the_bits_of_decode_by_prefill(isa: str) -> None:
    forms = Forms(*(jax.jit(functools.partial(f, FORM, native=isa)) for f in (delta_decode, delta_prefill)))
    try:
        register(isa, {"delta"})
    except NativeBuildError as error:
        pytest.skip(str(error))
    projected = sequence(40, seed=6)
    state, (a, b) = run(forms, poisoned(), chunks(3, projected), 2)
    other, (c,) = run(forms, poisoned(), chunks(3, projected[:5]), 2)
    other, d = steps(forms, other, 3, projected[5:])
    assert same(np.concatenate([a, b]), np.concatenate([c, d]))
    assert same(state.memory[3], other.memory[3]) and same(state.inputs[3], other.inputs[3])
