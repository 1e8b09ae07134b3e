"""The laws of an attention backend, for each that this machine can run; GPU kernels are interpreted on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_cases import (
    BACKENDS,
    FEATURES,
    INTERPRET,
    POSITIONS,
    SHAPES,
    Case,
    Features,
    _stored,
    assert_as_numpy,
    bits,
    build_kernels,
    each_backend,
    interpreted,
)
from tests.support.host_layers import from_host, layer_to_host, to_host
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import Attention
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.model.spec import ModelSpec

FULL = pytest.mark.full


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    """The kernels of a test's backend are built."""
    if "backend" in request.fixturenames:
        build_kernels(request.getfixturevalue("backend"))


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [pytest.param(*shape, marks=[pytest.mark.full] * (place > 1)) for place, shape in enumerate(SHAPES)],
    ids=str,
)
@each_backend
def test_attention_is_that_of_numpy(backend: Attention, heads: tuple[int, int, int], dtype: Any) -> None:
    """Any number of heads and groups, head sizes that are not powers of two, and the first and last positions."""
    assert_as_numpy(Case(heads, dtype), backend)


# What is slow to compile or interpret: all but one case in the full tests, and what that shows too before a release.
SLOW = {("xla", 0), ("xla", 2), *[("gpu", index) for index in (0, 2, 3) if INTERPRET]}


@pytest.mark.parametrize(
    ("backend", "heads", "dtype", "features", "block_size"),
    [
        pytest.param(
            backend,
            *case,
            id=f"{backend.name}-{case}",
            marks=[pytest.mark.release] * ((backend.name, index) in SLOW)
            + [pytest.mark.full] * (interpreted(backend) or backend.name == "xla"),
        )
        for index, case in enumerate(FEATURES)
        for backend in BACKENDS
    ],
)
def test_norms_windows_caps_sinks_and_blocks(
    backend: Attention, heads: tuple[int, int, int], dtype: Any, features: Features, block_size: int
) -> None:
    """Contiguous slots agree with NumPy; with blocks, results and cache have the same bits.

    In float32, XLA rounds a soft cap differently in the loop over blocks; there, results agree up to rounding.
    """
    case = Case(heads, dtype, features=features)
    assert_as_numpy(case, backend)
    pooled = case.in_blocks(block_size)
    for run in (case.decode, case.prefill):
        (kept, wanted), (pool, found) = run(backend), run(backend, **pooled)
        used = np.arange(wanted.shape[1]) < case.count[:, None] if wanted.ndim == 3 else slice(None)
        if backend.name == "xla" and dtype == jnp.float32 and features.softcap:
            np.testing.assert_allclose(found[used], wanted[used], atol=1e-6)
        else:
            assert bits(found[used]) == bits(wanted[used])
        for contiguous, blocks in zip(kept, pool, strict=True):
            by_slot = blocks[pooled["tables"]].swapaxes(1, 2).reshape(contiguous.shape)
            assert bits(by_slot) == bits(contiguous)


@each_backend
def test_a_normed_key_is_stored(backend: Attention) -> None:
    """The key is normalised before it is rotated."""
    case = Case((2, 1, 64), jnp.float32, features=Features(norms=True))
    (keys, _), _ = case.decode(backend)
    assert case.weights.k_norm is not None
    for row, position in enumerate(case.length):
        key = case.qkv[row].reshape(-1, 64)[2]
        normed = key / np.sqrt((key**2).mean() + case.form.norm_eps) * np.asarray(case.weights.k_norm)
        (first, second), (cos, sin) = np.split(normed, 2), np.asarray(case.rope)[position]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin])
        np.testing.assert_allclose(keys[row, 0, position], turned, atol=1e-5)


def test_blocks_that_tiles_do_not_fit_are_refused() -> None:
    dtype = jnp.dtype(jnp.bfloat16)
    with pytest.raises(ValueError, match="block_size must be one of 32, 64, 128, 256 here, not 16"):
        NativeAttention("any").make_store(TINY, (0,), 8, 16, dtype)
    for size in (24, 8, 512 + 64):
        with pytest.raises(ValueError, match=r"one of 16, 32, 64, 128, 256 here, not"):
            XlaAttention().make_store(TINY, (0,), 8, size, dtype)


@each_backend
def test_a_row_depends_on_nothing_but_itself(backend: Attention) -> None:
    """Its bits stay the same beside other rows, in another row, in front of stale NaN, and in a longer cache."""
    case = Case((6, 2, 64), jnp.bfloat16)
    _, expected = case.decode(backend)
    order = np.array([2, 0, 3, 1])
    other = Case((6, 2, 64), jnp.bfloat16, seed=1)
    mine = np.array([False, True, False, False])
    keys, values = (
        np.where(mine[:, None, None, None], a, b) for a, b in zip(case.cache, other.cache, strict=True)
    )
    runs = {
        "permuted": (
            {"cache": [x[order] for x in case.cache], "qkv": case.qkv[order], "length": case.length[order]},
            np.argsort(order),
        ),
        "neighbours": ({"cache": (keys, values), "qkv": np.where(mine[:, None], case.qkv, other.qkv)}, [1]),
        "alone": ({"live": mine}, [1]),
        "longer cache": ({"cache": [np.concatenate([x, x], axis=2) for x in case.cache]}, range(4)),
    }
    for name, (changes, rows) in runs.items():
        _, found = case.decode(backend, **changes)
        wanted = expected if len(rows) == 4 else expected[1:2]
        assert bits(found[list(rows)]) == bits(wanted), name
    stale = with_stale_nan(backend, case, behind=case.length)
    assert bits(case.decode(backend, cache=stale)[1]) == bits(expected), "stale NaN"


def with_stale_nan(backend: Attention, case: Case, behind: np.ndarray) -> list[np.ndarray]:
    """The cache of `case` where a previous owner of the 4 slots left NaN behind the positions `behind [4]`."""
    layer = backend.clear_values(  # a new owner clears what the previous one left, then writes its own
        _stored(backend, tuple(np.full_like(x, np.nan) for x in case.cache)), jnp.arange(4), jnp.ones(4, bool)
    )
    beyond = np.arange(POSITIONS) > behind[:, None]
    stale = [
        np.where(beyond[:, None, :, None], x, y)
        for x, y in zip(layer_to_host(backend, layer, case.head_dim), case.cache, strict=True)
    ]
    assert np.isnan(stale[0]).any()
    return stale


@each_backend
def test_a_lane_depends_on_nothing_but_its_slot(backend: Attention) -> None:
    case = Case((6, 2, 64), jnp.bfloat16)
    _, expected = case.prefill(backend)
    other = Case((6, 2, 64), jnp.bfloat16, seed=1)
    order = np.array([2, 0, 1])
    _, permuted = case.prefill(
        backend,
        chunks=case.chunks[order],
        slot=case.slot[order],
        start=case.start[order],
        count=case.count[order],
    )
    foreign = np.arange(4) != 1
    mixed = [
        np.where(foreign[:, None, None, None], b, a) for a, b in zip(case.cache, other.cache, strict=True)
    ]
    _, among_others = case.prefill(backend, cache=mixed, count=np.array([24, 19, 7], np.int32))
    for lane, width in ((0, 24), (1, 19)):
        assert bits(permuted[lane + 1, :width]) == bits(expected[lane, :width])
        assert bits(among_others[lane, :width]) == bits(expected[lane, :width])
    stale = with_stale_nan(backend, case, behind=np.array([0, 240 + 24 + 19 - 1, 0, 0]))
    _, found = case.prefill(backend, cache=stale)
    for lane, width in ((0, 24), (1, 19)):
        assert bits(found[lane, :width]) == bits(expected[lane, :width]), "stale NaN"


def test_a_lane_of_one_token_is_a_row_that_decodes() -> None:
    """On a GPU it is the same kernels: one program for all keys would be slow."""
    case, backend = Case(*SHAPES[0]), GpuAttention(interpret=INTERPRET)
    (keys, values), out = case.decode(backend)
    slot = np.array([3, 1, 2], np.int32)
    count = np.array([1, 1, 0], np.int32)
    chunks = case.qkv[slot][:, None]
    (found_keys, found_values), found = case.prefill(
        backend, chunks=chunks, slot=slot, start=case.length[slot], count=count
    )
    assert bits(found[:2, 0]) == bits(out[slot[:2]])
    for new, old, given in zip((found_keys, found_values), (keys, values), case.cache, strict=True):
        assert bits(new[[3, 1]]) == bits(old[[3, 1]])
        assert bits(new[[0, 2]]) == bits(np.asarray(given[[0, 2]]).astype(new.dtype))


@each_backend
def test_nothing_is_written_but_what_was_asked(backend: Attention) -> None:
    case = Case((6, 2, 64), jnp.bfloat16)
    live = np.array([True, False, True, False])
    after, _ = case.decode(backend, live=live)
    written = np.zeros((4, POSITIONS), bool)
    written[[0, 2], case.length[[0, 2]]] = True
    assert_changed_only(case.cache, after, written)
    after, _ = case.prefill(backend)
    written[:] = False
    written[1, 240:283] = True
    assert_changed_only(case.cache, after, written)


def assert_changed_only(before: Any, after: Any, written: np.ndarray) -> None:
    """A write may also clear the position after the last one, which holds nothing valid yet."""
    behind = np.roll(written, 1, axis=1)
    for old, new in zip(before, after, strict=True):
        changed = np.any(old != new, axis=(1, 3))
        assert np.all(changed >= written) and np.all(changed <= written | behind)
        assert not new[np.broadcast_to((changed & ~written)[:, None, :, None], new.shape)].any()


@each_backend
def test_a_cache_survives_the_way_over_the_host(backend: Attention) -> None:
    draw = np.random.default_rng(3)
    spec = ModelSpec(TINY, jnp.dtype(jnp.bfloat16), backend)
    cache = make_cache(spec, 3, POSITIONS)
    assert len(cache) == (1 if backend.shares_stores else TINY.num_hidden_layers)
    empty = to_host(spec, cache)
    assert len(empty) == TINY.num_hidden_layers
    shapes = {x.shape for layer in empty for x in layer}
    assert shapes == {(3, TINY.num_key_value_heads, POSITIONS, TINY.head_dim)}
    assert not any(x.any() for layer in empty for x in layer)
    full = jax.tree.map(lambda x: draw.standard_normal(x.shape).astype(np.float32).astype(x.dtype), empty)
    stored = from_host(spec, full)
    assert jax.tree.map(jnp.shape, stored) == jax.tree.map(jnp.shape, cache)
    assert jax.tree.map(bits, to_host(spec, stored)) == jax.tree.map(bits, full)


@pytest.mark.full
def test_an_engine_on_gpu_kernels_keeps_the_law(make_engine: Callable[..., XlaBatchEngine]) -> None:
    config = replace(
        TINY_ENGINE, attention_backend="gpu", linear_backend="gpu", prefill_lanes=(2,), max_num_seqs=4
    )
    engine = make_engine(config)
    assert engine.runner.platform["linear"] == "gpu"
    assert engine.runner.sizes.keys == (512,), "rows are bounded by their own length: one key bucket"
    report = verify(engine, requests=8, schedules=2, seed=5, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())
    assert report.compiles_after_warmup == 0


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend must be one of auto, native, xla.*, not 'cudnn'"
    ):
        EngineConfig(attention_backend="cudnn")


def test_the_default_backend_is_pure_jax() -> None:
    assert ModelSpec(TINY, jnp.dtype(jnp.bfloat16)).attention == XlaAttention()


REACHING = [
    ((4, 2, 64), jnp.bfloat16, Features(), 64),
    ((3, 1, 32), jnp.float32, Features(window=19, norms=True), 32),
    ((4, 1, 64), jnp.bfloat16, Features(window=200, softcap=3.0), 256),
]


@pytest.mark.parametrize(
    ("backend", "heads", "dtype", "features", "block_size"),
    [
        pytest.param(
            backend, *case, id=f"{backend.name}-{index}", marks=[FULL] * (index != 1 or interpreted(backend))
        )
        for index, case in enumerate(REACHING)
        for backend in BACKENDS
    ],
)
def test_queries_see_what_they_reach(
    backend: Attention, heads: tuple[int, int, int], dtype: Any, features: Features, block_size: int
) -> None:
    """Two groups, one of them in two lanes, with windows shorter and longer than they are: NumPy's results, the same
    bits in blocks and wherever the lanes lie, and without groups those of a causal call."""
    case = Case(heads, dtype, features=features)
    position = case.start[:, None] + np.arange(case.chunks.shape[1], dtype=np.int32)
    reach = position + 1
    for start, end in ((242, 247), (250, 279)):
        reach = np.where((position >= start) & (position < end) & (case.slot == 1)[:, None], end, reach)
    cache, out = case.prefill(backend, reach=reach)
    tolerance = 0.02 if dtype == jnp.bfloat16 else 2e-5
    for lane, token in ((0, 0), (0, 2), (0, 6), (0, 8), (0, 10), (0, 23), (1, 0), (1, 14), (1, 15), (1, 18)):
        at = (case.slot[lane], position[lane, token], reach[lane, token])
        expected = case.expected(cache, case.chunks[lane, token], *at)
        np.testing.assert_allclose(out[lane, token], expected, atol=tolerance)
    used = np.arange(out.shape[1]) < case.count[:, None]
    _, causal = case.prefill(backend)
    assert not np.allclose(causal[0, 10], out[0, 10], atol=tolerance)
    assert bits(case.prefill(backend, reach=position + 1)[1][used]) == bits(causal[used])
    if not (backend.name == "xla" and dtype == jnp.float32 and features.softcap):
        _, blocks = case.prefill(backend, **case.in_blocks(block_size), reach=reach)
        assert bits(blocks[used]) == bits(out[used])
    order = [1, 0, 2]
    lanes = {name: getattr(case, name)[order] for name in ("chunks", "slot", "start", "count")}
    if backend.name != "native":  # whose lanes of a slot come in order
        _, turned = case.prefill(backend, **lanes, reach=reach[order])
        assert bits(turned[order][used]) == bits(out[used])


def test_a_query_that_reaches_too_far_is_refused() -> None:
    """Or not to its own key: by the C++ kernels, which read nothing else."""
    backend = BACKENDS[-1]
    if backend.name != "native":
        pytest.skip("no C++ kernels here")
    build_kernels(backend)
    case = Case((2, 1, 16), jnp.float32)
    reach = case.start[:, None] + np.arange(1, 25, dtype=np.int32)
    for lane, token, wrong in ((1, 3, 284), (0, 5, 245)):
        changed = reach.copy()
        changed[lane, token] = wrong
        with pytest.raises(Exception, match="reach"):
            case.prefill(backend, reach=changed)
