"""Routed experts: agreement with NumPy, and a row's bits do not depend on which rows share its experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.support.instruction_sets import HERE, NAMES, marks
from xla_engine.graphs.experts.gpu import gpu_experts
from xla_engine.graphs.experts.routing import (
    BLOCK_ROWS,
    Experts,
    Groups,
    Route,
    blocked_experts,
    native_experts,
    route,
    route_by_sigmoid,
    shared_native_experts,
)
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.graphs.ops.int8 import Quantized, quantize_weight
from xla_engine.model_loader.quantised.mxfp4 import from_mxfp4
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.recipe import NativeBuildError

COUNT, WIDTH, INNER, CHOSEN = 7, 96, 160, 3  # experts, sizes in whole tiles, experts per row
Form = Callable[[Experts, Any, Route, Any], jax.Array]


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def called(
    form: Form, arrays: Any, x: Any, routed: Route, residual: Any, limit: float | None, plain: bool
) -> jax.Array:
    """The activation is static, as in a model."""
    return form(Experts(*arrays, limit, plain=plain), x, routed, residual)


def run(form: Form, experts: Experts, x: Any, routed: Route, residual: Any | None = None) -> np.ndarray:
    """Run one compiled call."""
    residual = jnp.asarray(x if residual is None else residual)
    arrays, x = experts[:4], jnp.asarray(x)
    return np.asarray(called(form, arrays, x, routed, residual, experts.limit, experts.plain))


def weights(dtype: Any, *, biased: bool = False, limit: float | None = None, plain: bool = False) -> Experts:
    rng = np.random.default_rng(0)

    def draw(*shape: int, dtype: Any = dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.2, dtype)

    features = INNER if plain else 2 * INNER
    matrices = draw(COUNT, features, WIDTH), draw(COUNT, WIDTH, INNER)
    if not biased:
        return Experts(*matrices, limit=limit, plain=plain)
    biases = draw(COUNT, features, dtype=jnp.float32), draw(COUNT, WIDTH, dtype=jnp.float32)
    return Experts(*matrices, *biases, limit, plain=plain)


def rows(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def routes(count: int, seed: int = 2) -> Route:
    logits = np.random.default_rng(seed).standard_normal((count, COUNT)).astype(np.float32)
    return route(jnp.asarray(logits), CHOSEN, renormalise=True)


def by_numpy(experts: Experts, x: np.ndarray, routed: Route) -> np.ndarray:
    """The same in float64, assignment by assignment; x is rounded as the products round it."""
    gate_up, down = (np.asarray(leaf, np.float64) for leaf in experts[:2])
    biases = (np.zeros(each.shape[:2]) for each in experts[:2])
    if experts.gate_up_bias is not None:
        biases = (np.asarray(each, np.float64) for each in experts[2:4])
    gate_up_bias, down_bias = biases
    rounded = np.asarray(jnp.asarray(x, experts.gate_up.dtype), np.float64)
    out = x.astype(np.float64)
    for row, (chosen, shares) in enumerate(zip(*map(np.asarray, routed), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            both = gate_up[expert] @ rounded[row] + gate_up_bias[expert]
            gates, ups = np.split(both, 2)
            if experts.plain:
                hidden = np.square(np.maximum(both, 0))
            elif experts.limit is None:
                hidden = gates / (1 + np.exp(-gates)) * ups
            else:
                gates, ups = np.minimum(gates, experts.limit), np.clip(ups, -experts.limit, experts.limit)
                hidden = (ups + 1) * gates / (1 + np.exp(-1.702 * gates))
            out[row] += share * (down[expert] @ hidden + down_bias[expert])
    return out


ON_GPU = functools.partial(gpu_experts, interpret=jax.default_backend() != "gpu")
SLOW = [
    pytest.param(name, marks=pytest.mark.full) for name in ("blocked float32", "gpu float32", "gpu bfloat16")
]


@pytest.fixture(
    params=[
        "blocked bfloat16",
        *SLOW,
        *(pytest.param(f"native {name}", marks=marks(name)) for name in NAMES),
    ]
)
def form_and_dtype(request: pytest.FixtureRequest) -> tuple[Form, Any]:
    kind, dtype = request.param.split()
    if kind == "native" and jax.default_backend() != "cpu":
        pytest.skip("C++ kernels are for CPUs")
    if kind != "native":
        return blocked_experts if kind == "blocked" else ON_GPU, jnp.dtype(dtype)
    try:
        return functools.partial(native_experts, isa=register(dtype, {"experts_bf16"})), jnp.dtype(
            jnp.bfloat16
        )
    except NativeBuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("biased", "limit", "plain"), [(False, None, False), (True, 0.5, False), (True, None, True)]
)
def test_each_form_is_the_sum_over_the_experts(
    form_and_dtype: tuple[Form, Any], biased: bool, limit: float | None, plain: bool
) -> None:
    form, dtype = form_and_dtype
    experts, x, routed = weights(dtype, biased=biased, limit=limit, plain=plain), rows(61), routes(61)
    expected = by_numpy(experts, x, routed)
    atol = (1e-5 if dtype == jnp.float32 else 1e-2) * np.abs(expected).max()
    np.testing.assert_allclose(run(form, experts, x, routed), expected, atol=atol)


@pytest.mark.parametrize("plain", [False, True])
def test_bits_of_a_row_do_not_depend_on_its_peers(form_and_dtype: tuple[Form, Any], plain: bool) -> None:
    """Run the row alone, among any number of rows, and among rows with the same experts, which fill several blocks."""
    form, dtype = form_and_dtype
    experts, x, routed = weights(dtype, biased=True, plain=plain), rows(100), routes(100)
    whole = run(form, experts, x, routed)
    for first, count in ((0, 1), (3, 8), (20, 17), (50, 48)):
        part = slice(first, first + count)
        found = run(form, experts, x[part], Route(routed.expert[part], routed.weight[part]))
        assert found.tobytes() == whole[part].tobytes()
    crowd = Route(jnp.tile(routed.expert[60], (100, 1)), jnp.tile(routed.weight[60], (100, 1)))
    assert 3 * BLOCK_ROWS < 100
    assert run(form, experts, x, crowd)[60].tobytes() == whole[60].tobytes()


@pytest.mark.parametrize("kind", ["blocked", *HERE])
def test_experts_in_eight_bits_are_near_those_they_stand_for(kind: str) -> None:
    """The experts have biases and clamps; rows run among peers and alone."""
    form: Form = blocked_experts
    if kind != "blocked":
        if jax.default_backend() != "cpu":
            pytest.skip("C++ kernels are for CPUs")
        try:
            form = functools.partial(native_experts, isa=register(kind, {"experts_int8"}))
        except NativeBuildError as error:
            pytest.skip(str(error))
    rng = np.random.default_rng(2)
    shapes = (COUNT, 2 * 192, 128), (COUNT, 128, 192)
    plain = [rng.standard_normal(shape).astype(np.float32) * 0.2 for shape in shapes]
    biases = [rng.standard_normal(shape[:2]).astype(np.float32) for shape in shapes]
    kept = [Quantized(*map(jnp.asarray, quantize_weight(each))) for each in plain]
    x, routed = rng.standard_normal((61, 128)).astype(np.float32), routes(61)
    for bias, limit in (([None, None], None), (biases, 0.5)):
        of = [None if each is None else jnp.asarray(each) for each in bias]
        whole = run(form, Experts(*kept, *of, limit), x, routed)
        expected = by_numpy(Experts(*plain, *of, limit), x, routed)
        assert np.abs(whole - expected).max() < 0.02 * np.abs(expected - x).max()
        alone = run(form, Experts(*kept, *of, limit), x[7:8], Route(routed.expert[7:8], routed.weight[7:8]))
        assert alone.tobytes() == whole[7:8].tobytes()
    ups = plain[0][:, :192]  # without gates
    ungated = Experts(Quantized(*map(jnp.asarray, quantize_weight(ups))), kept[1], plain=True)
    whole = run(form, ungated, x, routed)
    expected = by_numpy(Experts(ups, plain[1], plain=True), x, routed)
    assert np.abs(whole - expected).max() < 0.02 * np.abs(expected - x).max()


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.full), jnp.bfloat16])
@pytest.mark.parametrize("plain", [False, True])
def test_gathered_features_are_multiplied_as_those_of_one_device(dtype: Any, plain: bool) -> None:
    """The products between which devices gather are those of `blocked_experts` without it, bit for bit."""
    experts, x, routed = weights(dtype, biased=True, plain=plain), rows(48), routes(48)
    gathers = functools.partial(blocked_experts, gather=lambda hidden: hidden)
    assert run(gathers, experts, x, routed).tobytes() == run(blocked_experts, experts, x, routed).tobytes()


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("plain", [False, True])
def test_experts_in_two_calls_have_the_bits_of_one(isa: str, plain: bool) -> None:
    """As several devices compute them; some rows have no expert."""
    try:
        register(isa, {"experts_bf16"})
    except NativeBuildError as error:
        pytest.skip(str(error))
    experts, x, routed = weights(jnp.bfloat16, biased=True, plain=plain), rows(48), routes(48)
    routed = routed._replace(expert=jnp.where(jnp.arange(48)[:, None] % 5 > 0, routed.expert, COUNT))
    whole = functools.partial(native_experts, isa=isa)
    halves = functools.partial(shared_native_experts, gather=lambda hidden: hidden, isa=isa)
    assert run(halves, experts, x, routed).tobytes() == run(whole, experts, x, routed).tobytes()


def test_a_row_with_nan_keeps_it_to_itself(form_and_dtype: tuple[Form, Any]) -> None:
    form, dtype = form_and_dtype
    experts, x, routed = weights(dtype), rows(24), routes(24)
    clean = run(form, experts, x, routed)
    x[5, 7] = np.nan
    found, others = run(form, experts, x, routed), np.arange(24) != 5
    assert np.isnan(found[5]).any()
    assert found[others].tobytes() == clean[others].tobytes()


def test_a_row_without_experts_is_its_residual(form_and_dtype: tuple[Form, Any]) -> None:
    form, dtype = form_and_dtype
    experts, x, routed = weights(dtype), rows(24), routes(24)
    live = np.arange(24) % 3 == 0
    some = routed._replace(expert=jnp.where(live[:, None], routed.expert, COUNT))
    found = run(form, experts, x, some)
    assert found[~live].tobytes() == x[~live].tobytes()
    assert found[live].tobytes() == run(form, experts, x, routed)[live].tobytes()
    unrouted = routed._replace(expert=jnp.full_like(routed.expert, COUNT))
    assert run(form, experts, x, unrouted).tobytes() == x.tobytes()


@pytest.mark.full
def test_kernels_for_a_gpu_give_a_row_its_own_sum() -> None:
    """Compare with NumPy: among other rows, with more rows of one expert than a block holds, and without experts."""
    experts, x, routed = weights(jnp.bfloat16, biased=True, limit=0.5), rows(24), routes(24)
    call = jax.jit(lambda arrays, x, routed: ON_GPU(Experts(*arrays, experts.limit), x, routed, x))
    whole, expected = np.asarray(call(experts[:4], x, routed)), by_numpy(experts, x, routed)
    np.testing.assert_allclose(whole, expected, atol=1e-2 * np.abs(expected).max())
    mine, alone = 20, 5
    others = rows(24, seed=5)
    others[mine] = x[3]
    crowd = jnp.tile(routed.expert[3], (24, 1)).at[alone].set(COUNT)
    found = call(experts[:4], others, Route(crowd, routed.weight.at[mine].set(routed.weight[3])))
    assert np.asarray(found[mine]).tobytes() == whole[3].tobytes()
    assert np.asarray(found[alone]).tobytes() == others[alone].tobytes()


def test_a_router_takes_the_best_and_the_lower_index_among_equals() -> None:
    logits = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [5.0, -1.0, 4.0, 4.5]])
    live = jnp.asarray([True, True, False])
    chosen = route(logits, 2, renormalise=True, live=live)
    np.testing.assert_array_equal(chosen.expert, [[1, 2], [0, 1], [4, 4]])
    np.testing.assert_allclose(chosen.weight[:2], 0.5)
    probabilities = jax.nn.softmax(logits, axis=1)
    np.testing.assert_allclose(
        route(logits, 2, renormalise=False).weight[2], probabilities[2, jnp.asarray([0, 3])], rtol=1e-6
    )


def test_a_router_takes_experts_of_the_best_groups_only() -> None:
    """Compare with an enumeration; a group counts for its best expert, with sigmoids for the sum of its best two."""
    rng, groups = np.random.default_rng(7), Groups(4, 2)
    logits = rng.standard_normal((200, 12)).astype(np.float32)
    correction = rng.standard_normal(12).astype(np.float32)
    rules: dict[str, Any] = {"renormalise": False, "groups": groups}
    for best, found in (
        (1, route(jnp.asarray(logits), 3, **rules)),
        (2, route_by_sigmoid(jnp.asarray(logits), jnp.asarray(correction), 3, factor=2.0, **rules)),
    ):
        scores = np.asarray(jax.nn.sigmoid(logits)) if best == 2 else np.asarray(jax.nn.softmax(logits))
        by_choice = scores + correction if best == 2 else logits
        free = 0
        for row, values in enumerate(by_choice):
            worth = [sum(sorted(group)[-best:]) for group in values.reshape(4, 3)]
            kept = {int(at) for at in np.argsort(worth)[-2:]}
            inside = [at for at in np.argsort(-values) if at // 3 in kept][:3]
            assert found.expert[row].tolist() == inside
            free += inside != np.argsort(-values)[:3].tolist()
            factor = 2.0 if best == 2 else 1.0
            np.testing.assert_allclose(found.weight[row], factor * scores[row][inside], rtol=1e-5)
        assert free > 50, "groups rarely mattered"


@pytest.mark.parametrize(
    ("sizes", "word"),
    [
        ({"n_group": 5, "topk_group": 2}, "does not divide"),
        ({"n_group": 4, "topk_group": 5}, "exceeds"),
        ({"n_group": 12, "topk_group": 2}, "too few"),
        ({"n_group": 12, "topk_group": 3, "scoring_func": "sigmoid"}, "no best two"),
    ],
)
def test_groups_that_cannot_be_are_refused(sizes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        RoutedExperts(num_experts=12, num_experts_per_tok=3, moe_intermediate_size=8, **sizes)


def test_mxfp4_is_dequantised_exactly() -> None:
    """Every byte with every scale follows the definition: sign, two bits of exponent, one of fraction."""

    def number(nibble: int) -> float:
        sign, exponent, fraction = -1.0 if nibble & 8 else 1.0, nibble >> 1 & 3, nibble & 1
        return sign * (fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1))

    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)  # sixteen blocks
    for scale in (1, 100, 127, 130, 251):  # the largest that no number overflows
        found = from_mxfp4(blocks, np.full((1, 16), scale, np.uint8))
        assert found.dtype == ml_dtypes.bfloat16 and found.shape == (1, 512)
        expected = [
            number(half) * 2.0 ** (scale - 127) for byte in range(256) for half in (byte & 15, byte >> 4)
        ]
        np.testing.assert_array_equal(found[0].astype(np.float64), expected)
    assert np.isnan(from_mxfp4(blocks[:, :1], np.full((1, 1), 255, np.uint8)).astype(np.float32)).all()
