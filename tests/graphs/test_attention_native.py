"""The C++ attention: agreement with NumPy, its laws to the bit, its layout, and a machine without a compiler.

Each test runs with keys and values in bfloat16, in float32, and in eight bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.host_layers import layer_from_host, layer_to_host
from tests.support.instruction_sets import HERE
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.runner.backends import choose_attention
from xla_engine.runner.native_library import build as native
from xla_engine.runner.native_library.instruction_sets import available

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="a backend of the CPU")
S = 256  # positions of a slot
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=HERE)
def attention(request: pytest.FixtureRequest) -> NativeAttention:
    """The attention of each instruction set of this machine."""
    try:
        return NativeAttention(native.register(request.param, native.ATTENTION))
    except native.NativeBuildError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Shape:
    kv_heads: int
    groups: int
    head_dim: int
    dtype: Any
    window: int | None = None
    rich: bool = False  # norms, a cap and sinks

    @property
    def stored_width(self) -> int:
        """The stored width of a head on the host."""
        return -(-self.head_dim // 16) * 16 + 4 if self.dtype == jnp.int8 else self.head_dim

    @property
    def features(self) -> int:
        return (self.groups + 2) * self.kv_heads * self.head_dim

    def form(self) -> AttentionForm:
        scale = 0.3 if self.rich else self.head_dim**-0.5
        softcap = 4.0 if self.rich else None
        return AttentionForm(scale=scale, window=self.window, softcap=softcap, norm_eps=1e-5)

    def weights(self) -> AttentionWeights:
        if not self.rich:
            return AttentionWeights()
        norm = np.linspace(0.5, 1.5, self.head_dim, dtype=np.float32)
        return AttentionWeights(
            norm, norm[::-1].copy(), np.linspace(-1, 3, self.groups * self.kv_heads, dtype=np.float32)
        )


SHAPES = [
    Shape(3, 3, 64, jnp.bfloat16),
    Shape(2, 1, 16, jnp.float32),
    Shape(1, 5, 80, jnp.bfloat16),
    Shape(2, 8, 128, jnp.bfloat16),
    Shape(1, 20, 48, jnp.float32),
    Shape(2, 3, 64, jnp.int8),
    Shape(1, 5, 80, jnp.int8),
    Shape(1, 2, 8, jnp.int8),
]


@dataclass
class Slots:
    """Sequences in slots: `feed` prefills or decodes some tokens of some of them."""

    attention: NativeAttention
    shape: Shape
    cache: LayerCache
    lengths: dict[int, int]

    @classmethod
    def of_nan(cls, attention: NativeAttention, shape: Shape, positions: int = S) -> Slots:
        size = (3, shape.kv_heads, positions, shape.stored_width)
        stale = np.full(
            size, -1 if shape.dtype == jnp.int8 else np.nan, shape.dtype
        )  # scales of all ones are NaN
        return cls(attention, shape, layer_from_host(attention, stale, stale), dict.fromkeys(range(3), 0))

    def feed(self, work: list[tuple[int, Array]], width: int) -> list[Array]:
        """`work`: (slot, qkv `[count, F]`) per lane; returns `[count, H Dh]` per lane."""
        qkv = np.zeros((len(work), width, self.shape.features), np.float32)
        slot, start, count = np.zeros((3, len(work)), np.int32)
        position = np.zeros((len(work), width), np.int32)
        for lane, (index, rows) in enumerate(work):
            slot[lane], start[lane], count[lane] = index, self.lengths[index], len(rows)
            qkv[lane, : len(rows)] = rows
            position[lane] = start[lane] + np.arange(width)
            self.lengths[index] += len(rows)
        rope = angles(position, self.shape.head_dim)
        flat = qkv.reshape(-1, self.shape.features)
        if width == 1:  # decode: lane and slot are the same row
            rows_of_slot = [
                dict(zip(slot.tolist(), range(len(work)), strict=True)).get(i) for i in self.lengths
            ]
            pick = [0 if lane is None else lane for lane in rows_of_slot]
            live = np.array([lane is not None for lane in rows_of_slot])
            self.cache, out = _decode(
                self.attention, self.shape, self.cache, flat[pick], rope[pick, 0], start[pick], live
            )
            picked = np.asarray(out).astype(np.float32)
            return [picked[index : index + 1] for index in slot]
        self.cache, out = _prefill(self.attention, self.shape, self.cache, flat, rope, slot, start, count)
        by_lane = np.asarray(out).astype(np.float32).reshape(len(work), width, -1)
        return [lane[:n] for lane, n in zip(by_lane, count, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _decode(
    attention: NativeAttention, shape: Shape, layer: LayerCache, qkv: Any, rope: Any, length: Any, live: Any
) -> Any:
    call = AttentionCall(shape.form(), shape.weights(), rope, S, layer.keys.dtype)
    return attention.attend_decode(layer, qkv, call, length=length, live=live)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _prefill(
    attention: NativeAttention, shape: Shape, layer: LayerCache, qkv: Any, rope: Any, *place: Any
) -> Any:
    call = AttentionCall(shape.form(), shape.weights(), rope, S, layer.keys.dtype)
    return attention.attend_prefill(layer, qkv, call, Extents(*place))


def angles(position: Array, head_dim: int) -> Array:
    """`[..., 2, Dh/2]`."""
    turns = position[..., None] * 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    return np.stack([np.cos(turns), np.sin(turns)], axis=-2).astype(np.float32)


def rotated(heads: Array) -> Array:
    """The Hadamard transform of `[..., D]` in float32, by blocks of the largest power of two that divides D."""
    width, block = heads.shape[-1], heads.shape[-1] & -heads.shape[-1]
    distance = block // 2
    while distance:
        one, other = np.moveaxis(heads.reshape(*heads.shape[:-1], -1, 2, distance), -2, 0)
        heads = np.stack([one + other, one - other], axis=-2).reshape(*heads.shape[:-1], width)
        distance //= 2
    found: Array = heads * (np.float32(1) / np.sqrt(np.float32(block)))
    return found


def eight_bits(heads: Array) -> tuple[Array, Array]:
    """The cells of heads `[..., Dh]`: int8 `[..., Dp]` and scales `[..., 1]`."""
    padding = [(0, 0)] * (heads.ndim - 1) + [(0, -heads.shape[-1] % 16)]
    turned = rotated(np.pad(heads.astype(np.float32), padding))
    scale = np.maximum(np.abs(turned).max(axis=-1, keepdims=True), np.float32(1e-30)) * (np.float32(1) / 127)
    return np.rint(turned * (np.float32(1) / scale)).astype(np.int8), scale


def rounded(heads: Array, shape: Shape) -> Array:
    """Heads `[..., Dh]` as the cache rounds them; in eight bits they are also rotated and padded."""
    if shape.dtype != jnp.int8:
        return heads.astype(shape.dtype).astype(np.float64)
    values, scale = eight_bits(heads)
    return values.astype(np.float64) * scale


def oracle(qkv: Array, shape: Shape) -> Array:
    """Causal attention of one sequence `[N, F]` in NumPy: `[N, H Dh]`. Operands are rounded as the cache is."""
    count, half = len(qkv), shape.head_dim // 2
    heads = qkv.reshape(count, -1, shape.head_dim)
    cos, sin = angles(np.arange(count), shape.head_dim).swapaxes(0, 1)[:, :, None]
    low, high = heads[..., :half], heads[..., half:]
    turned = np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    split = shape.groups * shape.kv_heads
    taken = [rounded(x, shape) for x in (turned, heads)]
    q, k, v = taken[0][:, :split], taken[0][:, split : -shape.kv_heads], taken[1][:, -shape.kv_heads :]
    k, v = (np.repeat(x, shape.groups, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(shape.head_dim)
    scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
    weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hqk,khd->qhd", weight / weight.sum(axis=-1, keepdims=True), v)
    if shape.dtype == jnp.int8:
        out = rotated(out)[..., : shape.head_dim]
    return out.reshape(count, -1)


def sequence(shape: Shape, length: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((length, shape.features)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_and_decode_over_stale_nan_are_the_oracle(attention: NativeAttention, shape: Shape) -> None:
    """Prefill a prompt in chunks of odd sizes, two of them as lanes of one call; then decode beside another row."""
    slots, tokens, other = Slots.of_nan(attention, shape), sequence(shape, 60, 1), sequence(shape, 40, 2)
    found = slots.feed([(1, tokens[:17]), (1, tokens[17:34]), (0, other[:13])], 17)
    found += slots.feed([(1, tokens[34:45]), (0, other[13:30])], 17)
    ours = [found[0], found[1], found[3]]
    for step in range(10):
        ours.append(slots.feed([(0, other[30 + step : 31 + step]), (1, tokens[45 + step : 46 + step])], 1)[1])
    tolerance = 1e-5 if shape.dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(np.concatenate(ours), oracle(tokens[:55], shape), atol=tolerance)


RICH = [
    Shape(2, 3, 64, jnp.bfloat16, 9, rich=True),
    Shape(1, 2, 80, jnp.float32, 33, rich=True),
    Shape(1, 4, 256, jnp.bfloat16, 40, rich=True),
    Shape(1, 3, 96, jnp.int8, 40, rich=True),
]


@pytest.mark.parametrize("shape", [*SHAPES[:3], *SHAPES[5:], *RICH], ids=str)
def test_bits_depend_on_the_sequence_alone(attention: NativeAttention, shape: Shape) -> None:
    """Other chunks, another slot, other rows, or prefill in place of decode change no bit."""
    tokens, other = sequence(shape, 40, 3), sequence(shape, 80, 4)
    whole = Slots.of_nan(attention, shape).feed([(0, tokens)], 40)[0]
    slots = Slots.of_nan(attention, shape)
    slots.feed([(0, other[:9])], 40)
    pieces = slots.feed([(2, tokens[:7]), (0, other[9:30]), (2, tokens[7:24])], 24)
    found = [pieces[0], pieces[2]]
    for step in range(24, 40):
        found.append(slots.feed([(0, other[step + 6 : step + 7]), (2, tokens[step : step + 1])], 1)[1])
    assert np.concatenate(found).tobytes() == whole.tobytes()


@pytest.mark.parametrize("shape", RICH, ids=str)
def test_a_ring_gives_the_bits_of_a_whole_slot(attention: NativeAttention, shape: Shape) -> None:
    """Prefill a sequence three times as long as the ring in lanes and chunks of any size; then decode."""
    tokens = sequence(shape, 3 * S, 8)
    runs = []
    for positions in (S, 4 * S):
        slots, found, at = Slots.of_nan(attention, shape, positions), [], 0
        for first, second in ((64, 64), (64, 1), (50, 64), (64, 0), (1, 64), (64, 64), (64, 64)):
            both = [(1, tokens[at : at + first]), (1, tokens[at + first : at + first + second])]
            found += slots.feed(both, 64)
            at += first + second
        found += [slots.feed([(1, tokens[step : step + 1])], 1)[0] for step in range(at, at + 20)]
        runs.append(np.concatenate(found))
    assert runs[0].tobytes() == runs[1].tobytes()


def test_a_ring_that_would_lose_keys_is_an_error(attention: NativeAttention) -> None:
    slots = Slots.of_nan(attention, Shape(1, 1, 64, jnp.bfloat16, window=200))
    tokens = sequence(slots.shape, 300, 8)
    slots.feed([(0, tokens[:150])], 150)
    with pytest.raises(Exception, match="outside the cache"):
        slots.feed([(0, tokens[150:300])], 150)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96])
def test_cells_in_eight_bits_are_those_of_numpy(attention: NativeAttention, head_dim: int) -> None:
    """Without rotation by position, to the bit; the heads include one of zeros and one with an outlier."""
    shape = Shape(2, 1, head_dim, jnp.int8)
    heads = sequence(shape, 20, 3).reshape(20, -1, head_dim)
    heads[3], heads[4, :, head_dim // 2] = 0, 900
    slots = Slots.of_nan(attention, shape)
    cosines_and_sines = np.broadcast_to(np.float32([1, 0])[:, None], (1, 20, 2, head_dim // 2))
    place = (np.array([number], np.int32) for number in (1, 5, 20))
    cache, _ = _prefill(attention, shape, slots.cache, heads.reshape(20, -1), cosines_and_sines, *place)
    for stored, first in zip(layer_to_host(attention, cache, head_dim), (2, 4), strict=True):
        values, scale = eight_bits(heads[:, first : first + 2].swapaxes(0, 1))
        assert stored[1, :, 5:25, :-4].tobytes() == values.tobytes()
        assert np.ascontiguousarray(stored[1, :, 5:25, -4:]).view(np.float32).tobytes() == scale.tobytes()
        assert (stored[0] == -1).all() and (stored[1, :, [*range(5), *range(25, S)]] == -1).all()


def test_only_the_named_positions_are_written(attention: NativeAttention) -> None:
    """The only other write is to the value half of a word that holds the next position, which is not valid yet."""
    shape = SHAPES[0]
    rng = np.random.default_rng(5)
    before = rng.standard_normal((2, 2, shape.kv_heads, S, shape.head_dim)).astype(shape.dtype)
    slots = Slots(attention, shape, layer_from_host(attention, *before), {0: 0, 1: 37})
    slots.feed([(1, sequence(shape, 8, 6))], 16)
    after = layer_to_host(attention, slots.cache, shape.head_dim)
    changed = [np.argwhere((a != b).any(axis=(1, 3))).tolist() for a, b in zip(before, after, strict=True)]
    assert changed == [[[1, p] for p in range(37, 45)], [[1, p] for p in range(37, 46)]]
    assert not after[1][1, :, 45].any()


def _config(shape: Shape) -> ModelConfig:
    heads = shape.kv_heads
    return replace(TINY, num_key_value_heads=heads, head_dim=shape.head_dim, num_attention_heads=heads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_host_form_is_exact(shape: Shape) -> None:
    attention = NativeAttention(available()[0].name, cache_dtype=jnp.dtype(shape.dtype))
    size = (2, 2, shape.kv_heads, S, shape.stored_width)
    keys, values = (9 * np.random.default_rng(7).standard_normal(size)).astype(shape.dtype)
    layer = layer_from_host(attention, keys, values)
    empty = jax.eval_shape(lambda: attention.make_store(_config(shape), (0,), 2, S, jnp.dtype(shape.dtype)))
    assert jax.tree.map(jnp.shape, layer) == jax.tree.map(jnp.shape, empty)
    back = layer_to_host(attention, layer, shape.head_dim)
    assert (back[0].tobytes(), back[1].tobytes()) == (keys.tobytes(), values.tobytes())


@pytest.mark.parametrize("tables", [None, np.array([[2, 0], [1, 3]], np.int32)], ids=["slots", "pages"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=["bfloat16", "int8"])
def test_a_layer_of_a_store_is_as_it_is_alone(
    attention: NativeAttention, shape: Shape, tables: Array | None
) -> None:
    """Neither its bits nor those of the other layers in the store change."""
    rng = np.random.default_rng(9)
    size = (2, 2, shape.kv_heads, S) if tables is None else (2, 4, shape.kv_heads, 64)
    layers = [(9 * rng.standard_normal((*size, shape.stored_width))).astype(shape.dtype) for _ in range(3)]

    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def both(store: LayerCache, layer_in_store: int) -> Any:
        def call(rope: Array) -> AttentionCall:
            own = shape.form(), shape.weights(), rope, S, jnp.dtype(shape.dtype)
            return AttentionCall(*own, block_tables=tables, layer_in_store=layer_in_store)

        lanes = Extents(*(np.array(each, np.int32) for each in ([1, 0], [5, 60], [16, 9])))
        store, first = attention.attend_prefill(
            store, sequence(shape, 32, 1), call(angles(np.arange(32).reshape(2, 16), shape.head_dim)), lanes
        )
        rows = {"length": np.array([69, 21], np.int32), "live": np.array([True, True])}
        rope = angles(rows["length"], shape.head_dim)
        store, second = attention.attend_decode(store, sequence(shape, 2, 2), call(rope), **rows)
        return store, first, second

    alone, *expected = both(layer_from_host(attention, *layers[1]), 0)
    joined = [
        np.concatenate(leaves)
        for leaves in zip(*(layer_from_host(attention, *each) for each in layers), strict=True)
    ]
    store, *found = both(LayerCache(*jax.device_put(joined)), 1)
    assert [np.asarray(x).tobytes() for x in found] == [np.asarray(x).tobytes() for x in expected]
    for place, layer in enumerate(layers):
        kept = layer if place != 1 else layer_to_host(attention, alone, shape.head_dim)
        assert [x.tobytes() for x in layer_to_host(attention, store, shape.head_dim, place)] == [
            x.tobytes() for x in kept
        ]


def test_a_lane_outside_the_cache_is_an_error(attention: NativeAttention) -> None:
    slots = Slots.of_nan(attention, SHAPES[0])
    slots.lengths[0] = S - 4
    with pytest.raises(Exception, match="outside the cache"):
        slots.feed([(0, sequence(SHAPES[0], 8, 8))], 16)


def test_a_table_that_names_no_page_is_an_error(attention: NativeAttention) -> None:
    shape = SHAPES[0]
    pool = np.zeros((4, shape.kv_heads, 32, shape.head_dim), shape.dtype)
    layer, rope = layer_from_host(attention, pool, pool), angles(np.zeros(2, np.int32), shape.head_dim)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(layer: LayerCache, tables: Array) -> Any:
        rows = {"length": np.full(2, 40, np.int32), "live": np.array([True, False])}
        call = AttentionCall(shape.form(), shape.weights(), rope, S, jnp.dtype(shape.dtype), tables)
        return attention.attend_decode(layer, sequence(shape, 2, 1), call, **rows)

    layer, _ = decode(layer, np.array([[2, 0], [9, -1]], np.int32))  # a row that is not live needs none
    with pytest.raises(Exception, match="names no page"):
        jax.block_until_ready(decode(layer, np.array([[2, 4], [0, 1]], np.int32)))


def test_without_a_compiler_pure_jax_serves_with_a_notice(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make_engine: Callable[..., XlaBatchEngine],
) -> None:
    native._register.cache_clear()
    monkeypatch.setattr(native, "_bound", set())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert choose_attention("auto").name == "xla"
    (record,) = caplog.records
    assert "no-such-compiler" in record.getMessage() and "CXX" in record.getMessage()
    with pytest.raises(ConfigError, match=r"no-such-compiler.*use 'xla'"):
        make_engine(replace(TINY_ENGINE, attention_backend="native"))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(native.NativeBuildError, match="false failed"):
        native.build(available()[0], ["attention_bf16"])


def _resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells what is resident")
def test_a_cache_takes_memory_where_it_was_written(attention: NativeAttention) -> None:
    """Once, the start wrote all of it, and one request to a model of 98 MB took 3.6 GB."""
    shape = Shape(kv_heads=2, groups=1, head_dim=64, dtype=jnp.bfloat16)
    make = functools.partial(attention.make_store, _config(shape), [0, 1], dtype=jnp.dtype(jnp.bfloat16))
    jax.block_until_ready(make(rows=1, length=S))  # what a first call compiles and loads
    before = _resident()
    store = jax.block_until_ready(make(rows=16, length=1 << 14))
    assert store.keys.nbytes + store.values.nbytes == 256 << 20
    assert _resident() - before < 32 << 20
    write = jax.jit(lambda leaf: leaf.at[:, 3, :, :2].set(1), donate_argnums=0)
    keys = jax.block_until_ready(write(store.keys))
    assert _resident() - before < 48 << 20
    assert not np.asarray(keys)[:, 4].any() and np.asarray(keys)[:, 3, :, :2].all()


@pytest.mark.parametrize("length", [S, 1 << 12])
def test_a_new_cache_is_zero_whatever_its_memory_held(attention: NativeAttention, length: int) -> None:
    """Allocate buffers of every alignment and size, and free them full of ones."""
    shape = Shape(kv_heads=1, groups=1, head_dim=32, dtype=jnp.float32)
    dirty = jax.jit(lambda leaf: jnp.ones_like(leaf), donate_argnums=0)
    for rows in (1, 3, 8):
        for _ in range(4):
            store = attention.make_store(_config(shape), [0], rows, length, jnp.dtype(jnp.float32))
            assert not any(np.asarray(leaf).any() for leaf in (store.keys, store.values))
            jax.block_until_ready([dirty(leaf) for leaf in (store.keys, store.values)])
