"""The laws of an attention backend, for each that this machine can run; GPU kernels are interpreted on a CPU."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.conftest import TINY, TINY_ENGINE
from tests.support.device import read_cache
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import (
    KEY_SPAN,
    Attention,
    AttentionCall,
    AttentionWeights,
    LayerCache,
)
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import FULL, SLIDING, AttentionForm
from xla_engine.graphs.kv_cache.cache import from_host, make_cache, to_host
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.runner.backends import choose_attention

INTERPRET = jax.default_backend() != "gpu"
BACKENDS: list[Attention] = [XlaAttention(), GpuAttention(interpret=INTERPRET)]
if isinstance(native := choose_attention("auto"), NativeAttention):
    BACKENDS.append(native)
POSITIONS = 512
each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)


class Case:
    """Random cache, projections and lengths of 4 decode rows, or of 3 prefill lanes: two chunks of one prompt, one
    shorter than its width, and an unused lane."""

    def __init__(
        self, heads: tuple[int, int, int], dtype: Any, seed: int = 0, features: Features | None = None
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads
        self.dtype = jnp.dtype(dtype)
        draw = np.random.default_rng(seed)
        self.features = features or Features()
        self.form = self.features.form(self.head_dim)
        self.weights = self.features.weights(self.heads, self.head_dim, draw)
        self.tables: np.ndarray | None = None
        self.key_length = POSITIONS
        shape = (4, self.kv_heads, POSITIONS, self.head_dim)
        self.cache = tuple(
            np.asarray(jnp.asarray(draw.standard_normal(shape, np.float32), dtype)) for _ in range(2)
        )
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.qkv = draw.standard_normal((4, width), np.float32)
        self.length = np.array([0, 255, 256, 511], np.int32)
        self.live = np.array([True, True, True, True])
        self.chunks = draw.standard_normal((3, 24, width), np.float32)
        self.slot = np.array([1, 1, 2], np.int32)
        self.start = np.array([240, 264, 9], np.int32)
        self.count = np.array([24, 19, 0], np.int32)
        model = replace(TINY, head_dim=self.head_dim)
        self.rope = jnp.asarray(rope_tables(model, POSITIONS)[0])

    def decode(self, backend: Attention, **changes: Any) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Cache `[B, KV, S, Dh]` and result `[B, H Dh]` of a decode call; `changes` replace attributes."""
        own = {**vars(self), **changes}
        layer, out = _decode(backend, self.dtype, self.form, _stored(backend, own["cache"]), own["qkv"], self.rope,
                             self.weights, own["length"], own["live"], own["tables"], own["key_length"])  # fmt: skip
        return backend.to_host(layer, self.head_dim), np.asarray(out, np.float32)

    def prefill(self, backend: Attention, **changes: Any) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The same of a prefill call: result `[P, T, H Dh]`."""
        own = {**vars(self), **changes}
        chunks = own["chunks"]
        layer, out = _prefill(backend, self.dtype, self.form, _stored(backend, own["cache"]), chunks, self.rope,
                              self.weights, own["slot"], own["start"], own["count"], own["tables"],
                              own["key_length"])  # fmt: skip
        return backend.to_host(layer, self.head_dim), np.asarray(out, np.float32).reshape(
            *chunks.shape[:2], -1
        )

    def expected(
        self, cache: tuple[np.ndarray, np.ndarray], qkv: np.ndarray, slot: int, position: int
    ) -> np.ndarray:
        """Attention of one token over a cache that holds its key, in float64: `[H Dh]`."""
        cos, sin = np.asarray(self.rope, np.float64)[position]
        heads = qkv.reshape(-1, self.head_dim)[: self.heads].astype(np.float64)
        q_norm, _, sinks = self.weights
        if q_norm is not None:
            heads = heads / np.sqrt((heads**2).mean(axis=1, keepdims=True) + self.form.norm_eps) * q_norm
        first, second = np.split(heads, 2, axis=1)
        q = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
        seen = slice(max(0, position + 1 - (self.form.window or POSITIONS)), position + 1)
        keys, values = (x[slot, :, seen].astype(np.float64) for x in cache)
        out = []
        for head, query in enumerate(q):
            of = head // (self.heads // self.kv_heads)
            scores = keys[of] @ query * self.form.scale
            if self.form.softcap is not None:
                scores = self.form.softcap * np.tanh(scores / self.form.softcap)
            weights = np.exp(scores - scores.max())
            sink = 0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
            out.append(weights @ values[of] / (weights.sum() + sink))
        return np.concatenate(out)

    def in_pages(self, size: int, seed: int = 7) -> dict[str, Any]:
        """The same cache in pages of `size` positions, in any order, among pages of NaN."""
        draw = np.random.default_rng(seed)
        slots, pages = len(self.cache[0]), POSITIONS // size
        place = draw.permutation(slots * pages + 5)[: slots * pages]
        pool = []
        for each in self.cache:
            parts = each.reshape(slots, self.kv_heads, pages, size, -1).swapaxes(1, 2)
            stored = np.full((slots * pages + 5, *parts.shape[2:]), np.nan, each.dtype)
            stored[place] = parts.reshape(-1, *parts.shape[2:])
            pool.append(stored)
        return {"cache": tuple(pool), "tables": place.reshape(slots, pages).astype(np.int32)}


@dataclass(frozen=True)
class Features:
    """What a model's attention has beside Llama's."""

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    norms: bool = False
    sinks: bool = False

    def form(self, head_dim: int) -> AttentionForm:
        return AttentionForm(
            scale=head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            softcap=self.softcap,
            norm_eps=1e-3,
        )

    def weights(self, heads: int, head_dim: int, draw: np.random.Generator) -> AttentionWeights:
        norms = [draw.uniform(0.5, 2, head_dim).astype(np.float32) if self.norms else None for _ in range(2)]
        return AttentionWeights(*norms, draw.uniform(-1, 5, heads).astype(np.float32) if self.sinks else None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 10))
def _decode(
    backend: Attention, dtype: Any, form: AttentionForm, layer: LayerCache, qkv: Any, rope: Any, weights: Any,
    length: Any, live: Any, tables: Any, key_length: int,
) -> Any:  # fmt: skip
    call = AttentionCall(form, weights, rope[length], key_length, dtype, tables)
    return backend.attend_decode(layer, qkv, call, length=length, live=live)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 11))
def _prefill(
    backend: Attention, dtype: Any, form: AttentionForm, layer: LayerCache, chunks: Any, rope: Any, weights: Any,
    slot: Any, start: Any, count: Any, tables: Any, key_length: int,
) -> Any:  # fmt: skip
    angles = rope[start[:, None] + jnp.arange(chunks.shape[1])]
    call = AttentionCall(form, weights, angles, key_length, dtype, tables)
    qkv = chunks.reshape(-1, chunks.shape[2])
    return backend.attend_prefill(layer, qkv, call, slot=slot, start=start, count=count)


def _stored(backend: Attention, cache: tuple[np.ndarray, np.ndarray]) -> LayerCache:
    return backend.from_host(*(np.array(each) for each in cache))


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


SHAPES = [
    ((9, 3, 64), jnp.bfloat16),
    ((7, 1, 96), jnp.float32),
    ((8, 1, 128), jnp.bfloat16),
    ((3, 3, 64), jnp.float32),
]


def assert_as_numpy(case: Case, backend: Attention) -> None:
    tolerance = 0.02 if case.dtype == jnp.bfloat16 else 2e-5
    cache, out = case.decode(backend)
    for row, position in enumerate(case.length):
        expected = case.expected(cache, case.qkv[row], row, position)
        np.testing.assert_allclose(out[row], expected, atol=tolerance)
    cache, out = case.prefill(backend)
    for lane, token in ((0, 0), (0, 23), (1, 0), (1, 18)):
        expected = case.expected(cache, case.chunks[lane, token], case.slot[lane], case.start[lane] + token)
        np.testing.assert_allclose(out[lane, token], expected, atol=tolerance)


@pytest.mark.parametrize(("heads", "dtype"), SHAPES, ids=str)
@each_backend
def test_attention_is_that_of_numpy(backend: Attention, heads: tuple[int, int, int], dtype: Any) -> None:
    """Any number of heads and groups, head sizes that are no power of two, first and last positions."""
    assert_as_numpy(Case(heads, dtype), backend)


FEATURES = [
    ((6, 2, 64), jnp.bfloat16, Features(norms=True), 64),
    ((4, 1, 80), jnp.float32, Features(window=100, softcap=5.0, scale=0.3, sinks=True), 16),
    ((20, 1, 48), jnp.float32, Features(window=33, sinks=True), 128),
    ((6, 2, 96), jnp.bfloat16, Features(window=300, softcap=20.0, norms=True, sinks=True), 32),
]


# What is slow to compile or interpret, and shown by the others.
SLOW = {("xla", 0), ("xla", 2), *[("gpu", index) for index in (0, 2, 3) if INTERPRET]}


@pytest.mark.parametrize(
    ("backend", "heads", "dtype", "features", "block_size"),
    [
        pytest.param(
            backend,
            *case,
            id=f"{backend.name}-{case}",
            marks=[pytest.mark.slow] * ((backend.name, index) in SLOW),
        )
        for index, case in enumerate(FEATURES)
        for backend in BACKENDS
    ],
)
def test_norms_windows_caps_sinks_and_pages(
    backend: Attention, heads: tuple[int, int, int], dtype: Any, features: Features, block_size: int
) -> None:
    """Against NumPy with contiguous slots, and the same bits from pages, also what is written.

    XLA rounds a soft cap in float32 otherwise in the loop over pages: there it is the same up to that.
    """
    case = Case(heads, dtype, features=features)
    assert_as_numpy(case, backend)
    paged = case.in_pages(block_size)
    for run in (case.decode, case.prefill):
        (kept, wanted), (pool, found) = run(backend), run(backend, **paged)
        used = np.arange(wanted.shape[1]) < case.count[:, None] if wanted.ndim == 3 else slice(None)
        if backend.name == "xla" and dtype == jnp.float32 and features.softcap:
            np.testing.assert_allclose(found[used], wanted[used], atol=1e-6)
        else:
            assert bits(found[used]) == bits(wanted[used])
        for contiguous, pages in zip(kept, pool, strict=True):
            by_slot = pages[paged["tables"]].swapaxes(1, 2).reshape(contiguous.shape)
            assert bits(by_slot) == bits(contiguous)


@pytest.mark.parametrize("backend", [XlaAttention(call_positions=64)], ids=["xla"])
def test_a_ring_sees_what_a_whole_slot_sees(backend: XlaAttention) -> None:
    """Three rounds of it, in lanes of one call and of several, over stale values of another owner; then decode."""
    case = Case((2, 1, 64), jnp.float32, features=Features(window=100))
    case.rope = jnp.asarray(rope_tables(replace(TINY, head_dim=64), 4 * KEY_SPAN)[0])
    draw, runs = np.random.default_rng(2), []
    tokens = draw.standard_normal((900, 256), np.float32)
    for positions, apart in ((KEY_SPAN, False), (KEY_SPAN, True), (4 * KEY_SPAN, False)):
        cache = tuple(draw.standard_normal((4, 1, positions, 64), np.float32) for _ in range(2))
        found, slot = [], np.array([2, 2], np.int32)
        for at in range(0, 832, 64):
            chunks = tokens[at : at + 64].reshape(2, 32, -1)
            start, both = np.array([at, at + 32], np.int32), np.array([32, 32], np.int32)
            for count in [both * [1, 0], both * [0, 1]] if apart else [both]:
                own = {"slot": slot, "start": start, "count": count.astype(np.int32), "chunks": chunks}
                cache, out = case.prefill(backend, cache=cache, key_length=4 * KEY_SPAN, **own)
                found.append(out[count > 0].reshape(-1, 128))
        for at in range(832, 840):
            own = {"length": np.full(4, at, np.int32), "live": np.arange(4) == 2, "qkv": tokens[[at] * 4]}
            cache, out = case.decode(backend, cache=cache, key_length=4 * KEY_SPAN, **own)
            found.append(out[2:3])
        runs.append(np.concatenate(found))
    assert bits(runs[0]) == bits(runs[1])
    np.testing.assert_allclose(runs[0], runs[2], atol=2e-5)


@pytest.mark.parametrize(("length", "whole"), [(300, 2), (700, 3), (1024, 4)])
@pytest.mark.parametrize("backend", [XlaAttention(), NativeAttention()], ids=lambda backend: backend.name)
def test_a_ring_moves_block_by_block(backend: Attention, length: int, whole: int) -> None:
    """To another slot; blocks behind the length are written as well where the backend has stale values cleared."""
    draw = np.random.default_rng(length)
    cache = tuple(draw.standard_normal((2, 1, 512, 64), np.float32) for _ in range(2))
    layer, size = _stored(backend, cache), jnp.int32(length)
    blocks = [backend.read_span(layer, jnp.int32(0), jnp.int32(block)) for block in range(whole)]
    for block in range(whole if backend.bounded_by_length else 4):
        moved = blocks[min(block, whole - 1)]
        layer = backend.write_span(layer, jnp.int32(1), jnp.int32(block), moved, size)
    valid = min(length, 512)
    for old, new in zip(cache, backend.to_host(layer, 64), strict=True):
        assert bits(new[1, :, :valid]) == bits(old[0, :, :valid]) and bits(new[0]) == bits(old[0])


def test_a_layer_keeps_its_window_and_what_a_call_writes() -> None:
    model = replace(TINY, num_hidden_layers=2, layer_types=(SLIDING, FULL), sliding_window=300)
    for backend in (XlaAttention(call_positions=128), NativeAttention(call_positions=128)):
        spec = ModelSpec(model, jnp.dtype(jnp.bfloat16), backend)
        for length, kept in ((2048, [512, 2048]), (256, [256, 256])):
            layers = to_host(spec, make_cache(spec, 8, length))
            assert [keys.shape[2] for keys, _ in layers] == kept


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", "bfloat16"), pytest.param("xla", "float32", marks=pytest.mark.slow)]
)
def test_an_engine_with_rings_keeps_the_law(
    make_engine: Callable[..., XlaBatchEngine], name: str, dtype: str
) -> None:
    """Prompts longer than a ring, beside layers that keep everything."""
    model = replace(
        TINY, layer_types=(SLIDING, FULL), sliding_window=100, qk_norm="head", max_position_embeddings=1024
    )
    config = replace(
        TINY_ENGINE, attention_backend=name, max_model_len=800, prefill_lanes=(8,), key_buckets=(512,)
    )
    engine = make_engine(config, dtype, model)
    assert [keys.shape[2] for keys, _ in read_cache(engine.runner)] == [256, 1024]
    report = verify(engine, requests=16, schedules=2, seed=6, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())
    assert report.compiles_after_warmup == 0


@each_backend
def test_a_normed_key_is_stored(backend: Attention) -> None:
    """The norm is that of the key itself, before its rotation."""
    case = Case((2, 1, 64), jnp.float32, features=Features(norms=True))
    (keys, _), _ = case.decode(backend)
    assert case.weights.k_norm is not None
    for row, position in enumerate(case.length):
        key = case.qkv[row].reshape(-1, 64)[2]
        normed = key / np.sqrt((key**2).mean() + case.form.norm_eps) * np.asarray(case.weights.k_norm)
        (first, second), (cos, sin) = np.split(normed, 2), np.asarray(case.rope)[position]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin])
        np.testing.assert_allclose(keys[row, 0, position], turned, atol=1e-5)


def test_pages_that_tiles_do_not_fit_are_refused() -> None:
    dtype = jnp.dtype(jnp.bfloat16)
    with pytest.raises(ValueError, match="block_size must be one of 32, 64, 128, 256 here, not 16"):
        NativeAttention().make_store(TINY, (0,), 8, 16, dtype)
    for size in (24, 8, 512 + 64):
        with pytest.raises(ValueError, match=r"one of 16, 32, 64, 128, 256 here, not"):
            XlaAttention().make_store(TINY, (0,), 8, size, dtype)


@each_backend
def test_a_row_depends_on_nothing_but_itself(backend: Attention) -> None:
    """Its bits: among other neighbours, in another row, before stale NaN, in a longer cache."""
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
            dict(cache=[x[order] for x in case.cache], qkv=case.qkv[order], length=case.length[order]),
            np.argsort(order),
        ),
        "neighbours": (dict(cache=(keys, values), qkv=np.where(mine[:, None], case.qkv, other.qkv)), [1]),
        "alone": (dict(live=mine), [1]),
        "longer cache": (dict(cache=[np.concatenate([x, x], axis=2) for x in case.cache]), range(4)),
    }
    for name, (changes, rows) in runs.items():
        _, found = case.decode(backend, **changes)
        wanted = expected if len(rows) == 4 else expected[1:2]
        assert bits(found[list(rows)]) == bits(wanted), name
    beyond = np.arange(POSITIONS) > case.length[:, None]
    layer = backend.clear_values(  # a new owner clears what the previous one left, then writes its own
        _stored(backend, tuple(np.full_like(x, np.nan) for x in case.cache)), jnp.arange(4), jnp.ones(4, bool)
    )
    stale = [
        np.where(beyond[:, None, :, None], x, y)
        for x, y in zip(backend.to_host(layer, case.head_dim), case.cache, strict=True)
    ]
    assert np.isnan(stale[0]).any()
    assert bits(case.decode(backend, cache=stale)[1]) == bits(expected), "stale NaN"


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
    """The position behind the last one may be cleared: it holds nothing that is valid."""
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


# -- the GPU kernels --------------------------------------------------------------------------------------------


def test_an_engine_on_gpu_kernels_keeps_the_law(make_engine: Callable[..., XlaBatchEngine]) -> None:
    config = replace(TINY_ENGINE, attention_backend="gpu", prefill_lanes=(2,), max_num_seqs=4)
    engine = make_engine(config)
    assert engine.runner.bucket_choices == (512,), "rows are bounded by their own length: one key bucket"
    report = verify(engine, requests=24, schedules=2, seed=5, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())
    assert report.compiles_after_warmup == 0


@contextlib.contextmanager
def hopper() -> Any:
    """Lower for an H200 on a machine without one. Versions that need no device description have none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        if not hasattr(jax.sharding, "AbstractDevice"):
            yield
            return
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
            yield


LOWERED = [(heads, dtype, None, None) for heads, dtype in [*SHAPES, ((32, 8, 128), jnp.bfloat16)]]


@pytest.mark.parametrize(("heads", "dtype", "features", "block_size"), [*LOWERED, *FEATURES], ids=str)
def test_the_kernels_lower_for_cuda(
    heads: tuple[int, int, int], dtype: Any, features: Features | None, block_size: int | None
) -> None:
    """Through Triton, with both cache buffers aliased to the write kernel's outputs."""
    case, backend = Case(heads, dtype, features=features), GpuAttention()
    stored = case.in_pages(block_size) if block_size else {"cache": case.cache, "tables": None}
    layer = LayerCache(*(jax.ShapeDtypeStruct(x.shape, case.dtype) for x in stored["cache"]))
    rest = case.rope, case.weights
    decode = (case.form, layer, case.qkv, *rest, case.length, case.live, stored["tables"], POSITIONS)
    prefill = (
        case.form,
        layer,
        case.chunks,
        *rest,
        case.slot,
        case.start,
        case.count,
        stored["tables"],
        POSITIONS,
    )
    with hopper():
        for function, arguments, kernels in ((_decode, decode, 3), (_prefill, prefill, 1)):
            lowered = function.trace(backend, case.dtype, *arguments).lower(lowering_platforms=("cuda",))
            text = lowered.as_text()
            calls = [line for line in text.splitlines() if "@__gpu$xla.gpu.triton" in line]
            assert len(calls) == kernels
            assert sum(line.count("output_operand_alias<") for line in calls) == (2 if kernels == 3 else 0)


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"attention_backend must be one of auto, native, xla.*, not 'cudnn'"
    ):
        EngineConfig(attention_backend="cudnn")


def test_the_default_backend_is_pure_jax() -> None:
    assert ModelSpec(TINY, jnp.dtype(jnp.bfloat16)).attention == XlaAttention()
