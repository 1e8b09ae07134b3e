"""Recurrent layers of each kind: agreement with the recurrence in NumPy, and the laws of state in slots."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.instruction_sets import HERE, NAMES
from tests.support.tiers import default
from xla_engine.graphs.recurrent.kind import ConvolutionWeights, DeltaWeights, MambaWeights, RecurrentState
from xla_engine.graphs.recurrent.layer import make_state, recurrent_decode, recurrent_prefill
from xla_engine.graphs.recurrent_forms import ConvolutionForm, DeltaForm, MambaForm
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.recipe import NativeBuildError

SLOTS, WIDTH = 8, 32
RNG = np.random.default_rng(0)


def drawn(*shapes: int | tuple[int, ...]) -> list[np.ndarray]:
    return [RNG.standard_normal(shape, np.float32) for shape in shapes]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def convolved(mixed: np.ndarray, weights: Any) -> np.ndarray:
    """The causal convolution of `mixed [N, C]`."""
    filters = np.asarray(weights.convolution, np.float64)
    padded = np.concatenate([np.zeros((filters.shape[1] - 1, mixed.shape[1])), mixed])
    bias = 0 if weights.convolution_bias is None else weights.convolution_bias
    return (
        np.stack([(padded[t : t + filters.shape[1]] * filters.T).sum(axis=0) for t in range(len(mixed))])
        + bias
    )


DELTA = DeltaForm(key_heads=2, value_heads=6, key_dim=16, value_dim=80, kernel=4, norm_eps=1e-6)
DELTA_WEIGHTS = DeltaWeights(
    *drawn((DELTA.mixed_features, DELTA.kernel), DELTA.value_heads, DELTA.value_heads, DELTA.value_dim)
)
KIMI = DeltaForm(
    key_heads=3, value_heads=3, key_dim=32, value_dim=80, kernel=4, norm_eps=1e-6, rate_factor=2, gate_rank=16
)
KIMI_WEIGHTS = DeltaWeights(
    *drawn((KIMI.mixed_features, KIMI.kernel), KIMI.value_heads, KIMI.decay_features, KIMI.value_dim)
)
CONVOLUTION = ConvolutionForm(features=48, kernel=3, bias=True)
CONVOLUTION_WEIGHTS = ConvolutionWeights(*drawn((48, 3), 48))


def delta_net(
    projected: np.ndarray, form: DeltaForm = DELTA, weights: DeltaWeights = DELTA_WEIGHTS
) -> tuple[np.ndarray, np.ndarray]:
    decay, step_bias, norm = (np.asarray(x, np.float64) for x in weights[1:4])
    ends = np.cumsum([form.mixed_features, form.inner_features, form.value_heads])
    mixed, gates, rate, step = np.split(projected, ends, axis=1)
    every = convolved(mixed, weights)
    memory = np.zeros((form.value_heads, form.key_dim, form.value_dim))
    outputs = []
    for t in range(len(mixed)):
        x = every[t] * sigmoid(every[t])
        keys = form.key_heads * form.key_dim
        q, k = (x[at : at + keys].reshape(form.key_heads, -1) for at in (0, keys))
        q, k = (y / np.sqrt((y * y).sum(axis=1, keepdims=True) + 1e-6) for y in (q, k))
        q, k = (np.repeat(y, form.value_heads // form.key_heads, axis=0) for y in (q, k))
        v = x[2 * keys :].reshape(form.value_heads, -1)
        steps = np.log1p(np.exp(step[t] + step_bias)).reshape(form.value_heads, -1)
        memory *= np.exp(-np.exp(decay)[:, None] * steps)[:, :, None]
        rates = sigmoid(rate[t]) * form.rate_factor
        change = (v - np.einsum("hkv,hk->hv", memory, k)) * rates[:, None]
        memory += k[:, :, None] * change[:, None, :]
        out = np.einsum("hkv,hk->hv", memory, q) * form.key_dim**-0.5
        out = out / np.sqrt((out * out).mean(axis=1, keepdims=True) + form.norm_eps) * norm
        gate = sigmoid(gates[t]) if form.gate_rank else gates[t] * sigmoid(gates[t])
        outputs.append(out.reshape(-1) * gate)
    return np.array(outputs), memory


def short_convolution(projected: np.ndarray) -> tuple[np.ndarray, None]:
    before, behind, x = np.split(projected, 3, axis=1)
    return behind * convolved(before * x, CONVOLUTION_WEIGHTS), None


MAMBA = MambaForm(
    value_heads=6,
    value_dim=80,
    key_heads=2,
    key_dim=16,
    kernel=4,
    norm_eps=1e-6,
    step_limits=(0.01, 2.0),
    multipliers=(0.5, 0.75, 1.5, 1.25, 0.25),
)
MAMBA_WEIGHTS = MambaWeights(
    *drawn((MAMBA.mixed_features, MAMBA.kernel), 6, 6, 6, MAMBA.inner_features, MAMBA.mixed_features)
)


def mamba(projected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    form, weights = MAMBA, MAMBA_WEIGHTS
    decay, step_bias, skip, norm = (np.asarray(x, np.float64) for x in weights[1:5])
    inner, keys = form.inner_features, form.key_heads * form.key_dim
    sizes = (inner, inner, keys, keys, form.value_heads)
    parts = np.split(projected * np.repeat(form.multipliers, sizes), np.cumsum(sizes)[:-1], axis=1)
    gates, mixed, steps = parts[0], np.concatenate(parts[1:4], axis=1), parts[4]
    every = convolved(mixed, weights)
    memory = np.zeros((form.value_heads, form.key_dim, form.value_dim))
    outputs = []
    for t in range(len(mixed)):
        each = every[t] * sigmoid(every[t])
        x, b, c = np.split(each, [inner, inner + keys])
        b, c = (np.repeat(y.reshape(form.key_heads, -1), 3, axis=0) for y in (b, c))
        x = x.reshape(form.value_heads, -1)
        step = np.clip(np.log1p(np.exp(steps[t] + step_bias)), *form.step_limits)
        memory = memory * np.exp(-np.exp(decay) * step)[:, None, None]
        memory = memory + b[:, :, None] * (step[:, None] * x)[:, None]
        out = np.einsum("hkv,hk->hv", memory, c) + skip[:, None] * x
        out = (out.reshape(-1) * gates[t] * sigmoid(gates[t])).reshape(form.key_heads, -1)
        out = out / np.sqrt((out * out).mean(axis=1, keepdims=True) + form.norm_eps)
        outputs.append(out.reshape(-1) * norm)
    return np.array(outputs), memory


class Case(NamedTuple):
    """A kind of layers: its form, weights, and the outputs of all positions and the memory after the last, computed in
    float64 position by position."""

    form: Any
    weights: Any
    recurrence: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]


CASES = {
    "DeltaNet": Case(DELTA, DELTA_WEIGHTS, delta_net),
    "Kimi": Case(KIMI, KIMI_WEIGHTS, functools.partial(delta_net, form=KIMI, weights=KIMI_WEIGHTS)),
    "Mamba-2": Case(MAMBA, MAMBA_WEIGHTS, mamba),
    "short convolution": Case(CONVOLUTION, CONVOLUTION_WEIGHTS, short_convolution),
}


class Forms(NamedTuple):
    """Decode and prefill of one form."""

    case: Case
    decode: Any
    prefill: Any


def forms_of(name: str, isa: str) -> Forms:
    native = None if isa == "pure JAX" else isa
    if native:
        try:
            register(native, {"recurrent"})
        except NativeBuildError as error:
            pytest.skip(str(error))
    case = CASES[name]
    steps = (recurrent_decode, recurrent_prefill)
    return Forms(case, *(jax.jit(functools.partial(f, case.form, native=native)) for f in steps))


@pytest.fixture(scope="module", params=["pure JAX", *HERE])
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=CASES)
def forms(request: pytest.FixtureRequest, isa: str) -> Forms:
    return forms_of(request.param, isa)


def sequence(forms: Forms, length: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    return draw.standard_normal((length, forms.case.form.projected_features)).astype(np.float32)


def lanes(forms: Forms, pieces: list[tuple[int, int, np.ndarray]], count: int) -> dict[str, Any]:
    """Arguments of a prefill call from (slot, start, projected) per lane; unused lanes hold NaN."""
    projected = np.full((count, WIDTH, forms.case.form.projected_features), np.nan, np.float32)
    slot, start, used = np.zeros((3, count), np.int32)
    for lane, (where, first, rows) in enumerate(pieces):
        projected[lane, : len(rows)] = rows
        slot[lane], start[lane], used[lane] = where, first, len(rows)
    return {"projected": projected.reshape(count * WIDTH, -1), "lanes": Extents(slot, start, used)}


def run(
    forms: Forms, state: RecurrentState, pieces: list[tuple[int, int, np.ndarray]], count: int
) -> tuple[RecurrentState, list[np.ndarray]]:
    arguments = lanes(forms, pieces, count)
    state, out = forms.prefill(forms.case.weights, state, **arguments)
    by_lane = np.asarray(out).reshape(count, WIDTH, -1)
    return state, [by_lane[lane, : len(rows)] for lane, (_, _, rows) in enumerate(pieces)]


def chunks(slot: int, projected: np.ndarray) -> list[tuple[int, int, np.ndarray]]:
    return [(slot, at, projected[at : at + WIDTH]) for at in range(0, len(projected), WIDTH)]


def steps(
    forms: Forms, state: RecurrentState, slot: int, projected: np.ndarray
) -> tuple[RecurrentState, np.ndarray]:
    outputs = []
    live = np.arange(SLOTS) == slot
    for row in projected:
        fed = np.full((SLOTS, len(row)), np.nan, np.float32)  # of rows that are not live
        fed[slot] = row
        state, out = forms.decode(forms.case.weights, state, fed, live=live)
        outputs.append(np.asarray(out)[slot])
    return state, np.array(outputs)


def poisoned(forms: Forms) -> RecurrentState:
    """Slots whose last owners left NaN."""
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), make_state(forms.case.form, SLOTS))


def same(left: Any, right: Any) -> bool:
    return np.asarray(left).tobytes() == np.asarray(right).tobytes()


def same_states(left: RecurrentState, slot: int, right: RecurrentState, other: int) -> bool:
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(same(one[slot], another[other]) for one, another in leaves)


@pytest.mark.parametrize("length", default([17, 1, 3, 16, 31, 70], 2))
def test_prefill_then_decode_is_the_recurrence(forms: Forms, length: int) -> None:
    projected = sequence(forms, length + 5)
    expected, memory = forms.case.recurrence(projected.astype(np.float64))
    state, pieces = run(forms, poisoned(forms), chunks(2, projected[:length]), 3)
    np.testing.assert_allclose(np.concatenate(pieces), expected[:length], atol=2e-5)
    state, behind = steps(forms, state, 2, projected[length:])
    np.testing.assert_allclose(behind, expected[length:], atol=2e-5)
    if memory is not None:
        np.testing.assert_allclose(state.memory[2], memory, atol=2e-5)


def test_equal_keys_without_decay_stay_exact(isa: str) -> None:
    """This is the worst triangular system: its powers are large, but its inverse is not."""
    forms = forms_of("DeltaNet", isa)
    projected = np.tile(sequence(forms, 1, seed=4), (64, 1))
    projected[:, -DELTA.value_heads :] = -30  # no decay
    projected[:, -2 * DELTA.value_heads : -DELTA.value_heads] = 6  # a rate of almost one
    expected, _ = forms.case.recurrence(projected.astype(np.float64))
    _, pieces = run(forms, poisoned(forms), chunks(0, projected), 3)
    np.testing.assert_allclose(np.concatenate(pieces), expected, atol=1e-4)


def test_how_a_prompt_falls_into_lanes_and_calls_changes_no_bit(forms: Forms) -> None:
    projected = sequence(forms, 70, seed=1)
    (first, second, third), other = chunks(5, projected), chunks(1, sequence(forms, 40, seed=2))
    state, (a, b, c) = run(forms, poisoned(forms), [first, second, third], 3)
    apart = poisoned(forms)
    apart, (_, d) = run(forms, apart, [other[0], first], 2)
    apart, (e, _) = run(forms, apart, [second, other[1]], 3)
    apart, (f,) = run(forms, apart, [third], 2)
    assert same(np.concatenate([a, b, c]), np.concatenate([d, e, f]))
    assert same_states(state, 5, apart, 5)


def test_rows_decode_alone_as_among_others(forms: Forms) -> None:
    state, _ = run(forms, poisoned(forms), chunks(0, sequence(forms, 20, seed=1)), 3)
    state, _ = run(forms, state, chunks(7, sequence(forms, 20, seed=1)), 3)
    row = sequence(forms, 1, seed=9)[0]
    alone, out = forms.decode(forms.case.weights, state, np.tile(row, (SLOTS, 1)), live=np.arange(SLOTS) == 0)
    crowd = sequence(forms, SLOTS, seed=8)
    crowd[7] = row
    among, others = forms.decode(forms.case.weights, state, crowd, live=np.ones(SLOTS, bool))
    assert same(np.asarray(out)[0], np.asarray(others)[7])
    assert same_states(alone, 0, among, 7)


def test_what_is_not_named_keeps_its_bytes(forms: Forms) -> None:
    """Rows that are not live and unused lanes, whose slot is 0, write nothing."""
    before = jax.tree.map(
        lambda leaf: jnp.asarray(RNG.standard_normal(leaf.shape), jnp.float32),
        make_state(forms.case.form, SLOTS),
    )
    after, _ = run(forms, before, chunks(3, sequence(forms, 20)), 3)
    after, _ = steps(forms, after, 3, sequence(forms, 2))
    others = np.arange(SLOTS) != 3
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert same(np.asarray(old)[others], np.asarray(new)[others])


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", CASES)
def test_prefill_gives_the_bits_of_decode(name: str, isa: str) -> None:
    forms = forms_of(name, isa)
    projected = sequence(forms, 40, seed=6)
    state, (a, b) = run(forms, poisoned(forms), chunks(3, projected), 2)
    other, (c,) = run(forms, poisoned(forms), chunks(3, projected[:5]), 2)
    other, d = steps(forms, other, 3, projected[5:])
    assert same(np.concatenate([a, b]), np.concatenate([c, d]))
    assert same_states(state, 3, other, 3)


@pytest.mark.parametrize("isa", HERE)
def test_rates_up_to_two_are_those_of_pure_jax(isa: str) -> None:
    forms = forms_of("DeltaNet", isa)
    form = dataclasses.replace(DELTA, rate_factor=2.0)
    lanes = Extents(*(np.array(values, np.int32) for values in ([2, 3], [0, 0], [16, 9])))
    given = DELTA_WEIGHTS, poisoned(forms), sequence(forms, 32, seed=3), lanes
    state, out = recurrent_prefill(form, *given, native=isa)
    expected, other = recurrent_prefill(form, *given)
    used = np.r_[:16, 16:25]
    np.testing.assert_allclose(np.asarray(out)[used], np.asarray(other)[used], atol=1e-4)
    np.testing.assert_allclose(np.asarray(state.memory)[2:4], np.asarray(expected.memory)[2:4], atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("name", ["DeltaNet", "Mamba-2"])
def test_no_instruction_set_changes_a_bit(name: str) -> None:
    found = []
    for isa in NAMES:
        forms = forms_of(name, isa)
        state, (a, b) = run(forms, poisoned(forms), chunks(3, sequence(forms, 40, seed=6)), 2)
        found.append((np.asarray(state.inputs)[3], np.asarray(state.memory)[3], a, b))
    assert all(same(each, other) for other in found[1:] for each, other in zip(found[0], other, strict=True))
