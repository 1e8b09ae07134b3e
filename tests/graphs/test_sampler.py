"""The sampler against NumPy, row by row, and its laws."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.instruction_sets import ISAS, registered
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import feature_major
from xla_engine.graphs.ops import reductions as vocabulary
from xla_engine.graphs.ops.fixed_order_sums import sum_middle
from xla_engine.graphs.ops.reductions import largest_by_rank
from xla_engine.graphs.row_state.rows import NO_CHOICE
from xla_engine.graphs.row_state.sampling_fields import SamplingRows, make_sampling_rows
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.sampling import threshold as truncation
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.graphs.sampling.logprobs import logprobs

ROWS = 8
Sample = Callable[..., sampling.Sampled]


def rows(**fields: Any) -> SamplingRows:
    """Rows that sample at temperature 1, with different seeds and with log-probabilities, except for `fields`."""
    state = make_sampling_rows(ROWS)
    values: dict[str, Any] = {
        "temperature": 1.0,
        "seed": [[0, row] for row in range(ROWS)],
        "num_logprobs": 0,
        **fields,
    }
    for name, value in values.items():
        getattr(state, name)[:] = np.asarray(value)
    return jax.tree.map(jnp.asarray, state)


def random_logits(vocabulary: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((vocabulary, ROWS)) * spread).astype(np.float32)


@pytest.fixture(scope="module", params=ISAS, ids=str)
def sample(request: pytest.FixtureRequest) -> Sample:
    """The sampler in JAX, and in C++ for each instruction set of this machine."""
    return jax.jit(functools.partial(sampling.sample, native=registered(request.param, "sampler")))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="level B is promised on CPUs")
def test_one_column_gets_the_bits_it_has_among_eight(sample: Sample) -> None:
    """This holds for draws of every kind and for their sums; programs of few rows rely on it."""
    logits = random_logits(512, 9)
    given = rows(top_p=[1, 0.9] * 4, min_p=[0, 0, 0.1, 0] * 2, top_k=[0, 0, 0, 7] * 2, num_logprobs=3)
    position = jnp.arange(ROWS, dtype=jnp.int32)
    every = sample(logits, given, position)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = sample(logits[:, one], jax.tree.map(lambda leaf, one=one: leaf[one], given), position[one])
        for found, expected in zip(alone, every, strict=True):
            np.testing.assert_array_equal(
                np.asarray(found).view(np.int32), np.asarray(expected)[..., one].view(np.int32)
            )
    values = np.random.default_rng(1).random((50, 64, ROWS)).astype(np.float32) ** 8
    together = np.asarray(jax.jit(sum_middle)(values))
    for row in range(ROWS):
        np.testing.assert_array_equal(jax.jit(sum_middle)(values[..., row : row + 1])[:, 0], together[:, row])


def kept(scaled: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids of one row that may be drawn, found by sorting in float64. Assumes distinct logits."""
    weight = np.exp(scaled.astype(np.float64) - scaled.max())
    weight[weight < min_p] = 0
    order = np.argsort(-scaled, kind="stable")[: top_k or len(scaled)]
    if top_p < 1:
        cumulative = np.cumsum(weight[order])
        order = order[: int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1]
    return {int(token) for token in order if weight[token] > 0}


@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from([199, 512, 4096]),
    seed=st.integers(0, 2**31),
    top_k=st.lists(st.sampled_from([0, 1, 2, 5, 40, 128, 129, 198, 5000]), min_size=ROWS, max_size=ROWS),
    top_p=st.lists(st.sampled_from([1.0, 0.95, 0.5, 0.1, 0.01, 0.999]), min_size=ROWS, max_size=ROWS),
    min_p=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=ROWS, max_size=ROWS),
)
def test_each_row_keeps_exactly_what_its_own_parameters_keep(
    vocabulary: int, seed: int, top_k: list[int], top_p: list[float], min_p: list[float]
) -> None:
    """Pins the batch-maximum top_k bug: a row's set never depends on another row's parameters."""
    logits = random_logits(vocabulary, seed)
    state = rows(top_k=top_k, top_p=top_p, min_p=min_p)
    peak = logits.max(axis=0)
    threshold = jax.jit(truncation.threshold)
    least = np.asarray(threshold(logits, peak, state.temperature, state, jnp.ones(ROWS, bool)))
    for row in range(ROWS):
        weight = np.exp(logits[:, row].astype(np.float64) - peak[row])
        mine = {int(t) for t in np.nonzero((logits[:, row] >= least[row]) & (weight >= min_p[row]))[0]}
        expected = kept(logits[:, row], top_k[row], top_p[row], min_p[row])
        # float32 sums may move the edge of a nucleus by the token whose cumulative mass ties with top_p
        assert len(mine ^ expected) <= (1 if top_p[row] < 1 else 0), (row, len(mine), len(expected))


def test_bisection_and_candidates_agree() -> None:
    logits = random_logits(4096, 3, spread=6.0)
    state = rows(top_k=[0, 1, 7, 64, 128, 0, 20, 3], top_p=[0.9, 1, 0.5, 0.9, 1, 0.2, 0.99, 0.7], min_p=0.0)
    peak = jnp.asarray(logits.max(axis=0))
    wanted = jnp.where(state.top_k > 0, state.top_k, 4096)
    given = jnp.asarray(logits), peak, state.temperature
    fast = jax.jit(truncation.threshold)(*given, state, jnp.ones(ROWS, bool))
    slow = jax.jit(truncation.bisect)(*given, wanted, state.top_p, state.min_p)
    np.testing.assert_array_equal(np.asarray(fast), np.asarray(slow))


def test_temperature_zero_is_argmax_with_the_lowest_id_on_ties(sample: Sample) -> None:
    logits = np.zeros((199, ROWS), np.float32)
    logits[[70, 130, 198]] = 5.0
    token, *_ = sample(jnp.asarray(logits), rows(temperature=0.0), jnp.arange(ROWS))
    assert np.asarray(token).tolist() == [70] * ROWS


@pytest.mark.parametrize("size", [64, 199, 4096])
def test_two_level_argmax_is_argmax(size: int) -> None:
    for seed in range(20):
        logits = np.round(random_logits(size, seed))  # many ties
        np.testing.assert_array_equal(
            np.asarray(vocabulary.argmax(jnp.asarray(logits))), logits.argmax(axis=0)
        )


def test_logprob_is_raw_whatever_the_temperature(sample: Sample) -> None:
    logits = random_logits(512, 5)
    token, logprob, _ = sample(jnp.asarray(logits), rows(temperature=0.3, top_k=5), jnp.arange(ROWS))
    shifted = logits.astype(np.float64)
    expected = shifted - np.log(np.exp(shifted).sum(axis=0))
    np.testing.assert_allclose(np.asarray(logprob), expected[np.asarray(token), np.arange(ROWS)], atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="level B is promised on CPUs")
@pytest.mark.parametrize("isa", ISAS)
def test_the_number_of_columns_changes_no_bit_of_a_logprob(isa: str | None) -> None:
    """Pins an exponential over 8 columns, whose unrolled loop was compiled without fused multiply-adds.

    Logits are constants or come from the C++ head: on some machines XLA's products depend on the number of rows.
    """
    draw = np.random.default_rng(0)
    head = np.asarray(draw.standard_normal((4096, 32)), jnp.bfloat16)
    hidden = draw.standard_normal((4096, 32)).astype(np.float32)
    if isa is None:
        logits = np.ascontiguousarray(feature_major(jnp.asarray(head), hidden).T)  # [N, V]
    else:
        products = NativeProducts(registered(isa, "sampler", "linear_bf16"))
        packed = jnp.asarray(products.pack(head, "head"))

    @jax.jit
    def chosen(rows: jax.Array) -> jax.Array:
        logits = rows.T if isa is None else products.head(packed, None, rows)
        token = jnp.argmax(logits.values, axis=1) if isinstance(logits, ByRow) else vocabulary.argmax(logits)
        token = token.astype(jnp.int32)
        return logprobs(logits, token, jnp.zeros(len(rows), jnp.int32), native=isa)[0]

    def by(count: int) -> np.ndarray:
        every = logits if isa is None else hidden
        return np.concatenate([np.asarray(chosen(part)) for part in np.split(every, len(every) // count)])

    expected = by(16)
    for count in (8, 32):
        np.testing.assert_array_equal(by(count).view(np.int32), expected.view(np.int32))


def test_noise_is_that_of_jax(sample: Sample) -> None:
    """With 4,096 equal logits, the uniform number determines the token."""
    flat = jnp.zeros((4096, ROWS), jnp.float32)
    state = rows(seed=[[row * 2**29 + 5, 2**32 - 1 - row] for row in range(ROWS)])
    for position in (0, 1, 77, 2**31 - 1):
        at = jnp.full(ROWS, position, jnp.int32)
        expected = np.floor(np.asarray(sampling._uniform(state.seed, at)) * 4096)
        np.testing.assert_array_equal(sample(flat, state, at).token, expected)


def test_top_k_one_is_greedy_for_sampled_rows(sample: Sample) -> None:
    logits = random_logits(512, 6)
    token, *_ = sample(jnp.asarray(logits), rows(top_k=1), jnp.arange(ROWS))
    np.testing.assert_array_equal(np.asarray(token), logits.argmax(axis=0))


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_most_likely_token_is_kept_at_every_temperature(fields: dict[str, Any], sample: Sample) -> None:
    """A quotient that is rounded in two ways must not leave a row without a token (61: the last block is partial)."""
    logits = random_logits(61, 8)
    for turn, temperature in enumerate(np.random.default_rng(9).uniform(0.05, 2.0, (60, ROWS))):
        state = rows(temperature=temperature.astype(np.float32), **fields)
        moved = logits + np.float32(turn)
        token, *_ = sample(jnp.asarray(moved), state, jnp.arange(ROWS))
        np.testing.assert_array_equal(np.asarray(token), moved.argmax(axis=0))


def test_draws_follow_the_distribution(sample: Sample) -> None:
    """Chi-square over 16 tokens and 40,000 draws with fixed seeds; 15 degrees of freedom, bound at p = 1e-5."""
    probability = np.arange(1, 17) / 136
    logits = jnp.asarray(np.repeat(np.log(probability)[:, None], ROWS, axis=1).astype(np.float32))
    state = rows()
    draws = np.concatenate([np.asarray(sample(logits, state, jnp.full(ROWS, p))[0]) for p in range(5000)])
    counts = np.bincount(draws, minlength=16)
    expected = probability * len(draws)
    assert ((counts - expected) ** 2 / expected).sum() < 50.5


def test_noise_depends_on_seed_and_position_only(sample: Sample) -> None:
    """A row's sample is the same at any index and in any batch; only its own seed and position matter."""
    column = random_logits(512, 9)[:, :1]
    logits = jnp.asarray(np.repeat(column, ROWS, axis=1))
    same = rows(seed=[[0, 7]] * ROWS, temperature=1.5)
    token, *_ = sample(logits, same, jnp.full(ROWS, 11))
    assert len(set(np.asarray(token).tolist())) == 1
    mixed = rows(
        seed=[[0, 7], *([[0, n + 90] for n in range(ROWS - 1)])],
        temperature=1.5,
        top_k=[0] + [3] * (ROWS - 1),
    )
    other, *_ = sample(logits, mixed, jnp.full(ROWS, 11))
    assert int(other[0]) == int(token[0])
    many_seeds, *_ = sample(logits, rows(temperature=1.5), jnp.full(ROWS, 11))
    many_positions, *_ = sample(logits, same, jnp.arange(ROWS))
    assert len(set(np.asarray(many_seeds).tolist())) > 1
    assert len(set(np.asarray(many_positions).tolist())) > 1


def test_greedy_rows_do_not_notice_sampled_peers(sample: Sample) -> None:
    logits = jnp.asarray(random_logits(512, 10))
    alone, *_ = sample(logits, rows(temperature=0.0), jnp.arange(ROWS))
    mixed, *_ = sample(logits, rows(temperature=[0, 1, 0, 2, 0, 0.5, 0, 1]), jnp.arange(ROWS))
    np.testing.assert_array_equal(np.asarray(alone)[::2], np.asarray(mixed)[::2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 63, 64, 65, 130, 5000]))
def test_cumulative_sums(seed: int, count: int) -> None:
    values = np.random.default_rng(seed).random((count, 3)).astype(np.float32)
    ours = np.asarray(jax.jit(vocabulary.cumulative)(jnp.asarray(values)))
    np.testing.assert_allclose(ours, np.cumsum(values.astype(np.float64), axis=0), rtol=1e-4)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-9, 0.5, 1 - 2**-24]),
    st.sampled_from([64, 199, 640]),
    st.integers(1, 4),
)
def test_a_token_without_weight_is_never_drawn(seed: int, uniform: float, count: int, positive: int) -> None:
    draw = np.random.default_rng(seed)
    weight = np.zeros((count, 2), np.float32)
    for column in range(2):
        weight[draw.choice(count, positive, replace=False), column] = draw.random(positive) * 1e-3 + 1e-6
    token = np.asarray(jax.jit(sampling._invert)(jnp.asarray(weight), np.full(2, uniform, np.float32)))
    assert all(weight[token[column], column] > 0 for column in range(2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "count", "widths"), [(8000, 16, (8,)), pytest.param(32000, 64, (8, 32), marks=pytest.mark.full)]
)
def test_a_row_draws_the_same_among_more_rows(size: int, count: int, widths: tuple[int, ...]) -> None:
    """Level B of the draw: cumulative sums and the search for a wide nucleus do not depend on the number of rows."""
    logits = np.random.default_rng(4).standard_normal((size, count)).astype(np.float32)
    fields = {
        "top_p": np.tile(np.float32([1, 0.9, 0.999, 0.5]), count // 4),
        "top_k": np.tile([0, 0, 500, 0], count // 4),
    }

    def draw(columns: slice) -> np.ndarray:
        state = make_sampling_rows(count)
        state.temperature[:], state.top_p[:], state.top_k[:] = 1.0, fields["top_p"], fields["top_k"]
        state.seed[:, 1] = np.arange(count)
        mine = jax.tree.map(lambda leaf: jnp.asarray(leaf[columns]), state)
        peak = logits[:, columns].max(axis=0)
        least = jax.jit(truncation.threshold)(
            logits[:, columns], peak, mine.temperature, mine, mine.temperature > 0
        )
        weight = np.exp(logits[:, columns] - peak)  # not by XLA, whose exponential may depend on the width
        drawn = jax.jit(sampling._invert)(jnp.asarray(weight), sampling._uniform(mine.seed, mine.top_k))
        return np.stack([np.asarray(least), np.asarray(drawn)])

    whole = draw(slice(0, count))
    for width in widths:
        for at in range(0, count, width):
            np.testing.assert_array_equal(draw(slice(at, at + width)), whole[:, at : at + width])


@pytest.mark.parametrize("largest", [vocabulary.largest, largest_by_rank])
@pytest.mark.parametrize(("vocabulary_size", "count"), [(199, 20), (4096, 20), (4096, 128), (10, 10)])
def test_the_largest_are_those_of_a_stable_sort(
    largest: Callable[..., Any], vocabulary_size: int, count: int
) -> None:
    call = jax.jit(largest, static_argnums=1)
    for seed in range(5):
        logits = np.round(random_logits(vocabulary_size, seed)) + 0.0  # many ties, and no negative zeros
        logits[logits > 5] = np.inf
        logits[logits < seed - 3] = -np.inf
        values, index = call(jnp.asarray(logits), count)
        expected = np.argsort(-logits, axis=0, kind="stable")[:count]
        np.testing.assert_array_equal(np.asarray(index), expected)
        np.testing.assert_array_equal(np.asarray(values), np.take_along_axis(logits, expected, axis=0))


@pytest.mark.parametrize("vocabulary", [199, 4096])
def test_a_row_that_cannot_choose_says_so_and_its_neighbours_do_not_notice(
    vocabulary: int, sample: Sample
) -> None:
    """A hidden state has NaN or infinity, or no token is allowed. A single forbidden token is harmless."""
    logits = random_logits(vocabulary, 5)
    settings_of_rows = rows(temperature=[0, 1, 0, 1, 0, 1, 0, 1], top_p=[1, 0.9, 1, 1, 1, 1, 1, 0.5])
    position = jnp.arange(ROWS, dtype=jnp.int32)
    good = sample(jnp.asarray(logits), settings_of_rows, position)
    bad = logits.copy()
    hidden = np.ones((16, 4), np.float32)
    hidden[3] = np.nan, np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        head = np.random.default_rng(1).standard_normal((vocabulary, 16)).astype(np.float32)
        bad[:, :4] = head @ hidden
    bad[:, 4] = bad[:, 5] = -np.inf
    bad[np.argmin(bad[:, 6]), 6] = -np.inf
    found = sample(jnp.asarray(bad), settings_of_rows, position)
    assert found.token.tolist() == [NO_CHOICE] * 6 + good.token.tolist()[6:]
    assert np.asarray(found.logprob)[7:].tobytes() == np.asarray(good.logprob)[7:].tobytes()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`sample`, traced for platforms other than CPUs."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    return jax.jit(lambda *arguments: sampling.sample(*arguments))


@pytest.mark.full
def test_a_gpu_takes_the_same_tokens(monkeypatch: pytest.MonkeyPatch, sample: Sample) -> None:
    """Narrow and wide nuclei, top-k within and beyond the candidates, and ties."""
    logits = np.concatenate([random_logits(4000, 1), np.round(random_logits(1000, 2))])
    position = jnp.arange(ROWS, dtype=jnp.int32)
    wanted = rows(
        top_k=[0, 0, 40, 500, 0, 129, 1, 300],
        top_p=[1, 0.9, 1, 0.9, 0.3, 0.99, 1, 1],
        temperature=[1, 1, 0.5, 2, 1, 1, 1, 0],
        num_logprobs=20,
    )
    expected = sample(jnp.asarray(logits), wanted, position)
    found = as_on_a_gpu(monkeypatch)(jnp.asarray(logits), wanted, position)
    np.testing.assert_array_equal(found.token, expected.token)
    np.testing.assert_array_equal(found.top[:21], expected.top[:21])
    np.testing.assert_allclose(found.logprob, expected.logprob, rtol=1e-5)


def test_a_gpu_gets_no_sort_and_no_loop() -> None:
    """With either, a CUDA graph cannot have the conditional, and the host would wait for the device in every step."""
    logits = jax.ShapeDtypeStruct((4096, ROWS), jnp.float32)
    exported = jax.export.export(jax.jit(sampling.sample), platforms=["cuda"])(
        logits, rows(), jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    )
    text = exported.mlir_module()
    assert "stablehlo.case" in text
    for operation in ("while", "sort", "top_k"):
        assert f"hlo.{operation}" not in text, operation
