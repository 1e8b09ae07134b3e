"""Random attention calls, numpy's answer to them, and the backends that this machine can run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.host_layers import layer_from_host, layer_to_host
from tests.support.instruction_sets import HAS_KERNELS, NAMES, registered
from tests.support.models import TINY
from xla_engine.config import AUTO
from xla_engine.environment import requested_isa
from xla_engine.graphs.attention.backend import Attention, AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.forms import AttentionForm
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.runner.native_library.build import ATTENTION

INTERPRET = jax.default_backend() != "gpu"

# The kernels' instruction set here. They are built by the first test that runs them (`build_kernels`), not at import.
ISA = requested_isa() if requested_isa() != AUTO else next(iter(NAMES), "none")
BACKENDS: list[Attention] = [XlaAttention(), GpuAttention(interpret=INTERPRET)]
BACKENDS += [NativeAttention(ISA)] * HAS_KERNELS

POSITIONS = 512


def build_kernels(backend: Attention) -> None:
    """Build the C++ kernels if this is their backend; skip the test if that is impossible."""
    if isinstance(backend, NativeAttention):
        registered(backend.isa, *ATTENTION)


def interpreted(backend: Attention) -> bool:
    """A kernel for a GPU that a CPU runs instruction by instruction: too slow for a default run."""
    return backend.name == "gpu" and INTERPRET


each_backend = pytest.mark.parametrize(
    "backend",
    [pytest.param(each, id=each.name, marks=[pytest.mark.full] * interpreted(each)) for each in BACKENDS],
)


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
        return layer_to_host(backend, layer, self.head_dim), np.asarray(out, np.float32)

    def prefill(self, backend: Attention, **changes: Any) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
        """The same of a prefill call: result `[P, T, H Dh]`."""
        own = {**vars(self), **changes}
        chunks = own["chunks"]
        layer, out = _prefill(backend, self.dtype, self.form, _stored(backend, own["cache"]), chunks, self.rope,
                              self.weights, own["slot"], own["start"], own["count"], own["tables"],
                              own["key_length"], own.get("reach"))  # fmt: skip
        return layer_to_host(backend, layer, self.head_dim), np.asarray(out, np.float32).reshape(
            *chunks.shape[:2], -1
        )

    def expected(
        self,
        cache: tuple[np.ndarray, np.ndarray],
        qkv: np.ndarray,
        slot: int,
        position: int,
        reach: int | None = None,
    ) -> np.ndarray:
        """Attention of one token over a cache that holds the keys it sees, in float64: `[H Dh]`."""
        cos, sin = np.asarray(self.rope, np.float64)[position]
        heads = qkv.reshape(-1, self.head_dim)[: self.heads].astype(np.float64)
        q_norm, sinks = self.weights.q_norm, self.weights.sinks

        def normed(heads: np.ndarray) -> np.ndarray:
            if q_norm is None:
                return heads
            return heads / np.sqrt((heads**2).mean(axis=1, keepdims=True) + self.form.norm_eps) * q_norm

        first, second = np.split(heads if self.form.norm_last else normed(heads), 2, axis=1)
        q = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)
        q = normed(q) if self.form.norm_last else q
        seen = slice(max(0, position + 1 - (self.form.window or POSITIONS)), reach or position + 1)
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

    def in_blocks(self, size: int, seed: int = 7) -> dict[str, Any]:
        """The same cache in blocks of `size` positions, in any order, among blocks of NaN."""
        draw = np.random.default_rng(seed)
        slots, blocks = len(self.cache[0]), POSITIONS // size
        place = draw.permutation(slots * blocks + 5)[: slots * blocks]
        pool = []
        for each in self.cache:
            parts = each.reshape(slots, self.kv_heads, blocks, size, -1).swapaxes(1, 2)
            stored = np.full((slots * blocks + 5, *parts.shape[2:]), np.nan, each.dtype)
            stored[place] = parts.reshape(-1, *parts.shape[2:])
            pool.append(stored)
        return {"cache": tuple(pool), "tables": place.reshape(slots, blocks).astype(np.int32)}


@dataclass(frozen=True)
class Features:
    """Features of a model's attention that Llama's does not have."""

    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    norms: bool = False
    sinks: bool = False
    norm_last: bool = False

    def form(self, head_dim: int) -> AttentionForm:
        return AttentionForm(
            scale=head_dim**-0.5 if self.scale is None else self.scale,
            window=self.window,
            softcap=self.softcap,
            norm_eps=1e-3,
            norm_last=self.norm_last,
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
    slot: Any, start: Any, count: Any, tables: Any, key_length: int, reach: Any,
) -> Any:  # fmt: skip
    angles = rope[start[:, None] + jnp.arange(chunks.shape[1])]
    call = AttentionCall(form, weights, angles, key_length, dtype, tables, reach=reach)
    qkv = chunks.reshape(-1, chunks.shape[2])
    return backend.attend_prefill(layer, qkv, call, Extents(slot, start, count))


def _stored(backend: Attention, cache: tuple[np.ndarray, np.ndarray]) -> LayerCache:
    return layer_from_host(backend, *(np.array(each) for each in cache))


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


FEATURES = [
    ((6, 2, 64), jnp.bfloat16, Features(norms=True), 64),
    ((4, 1, 80), jnp.float32, Features(window=100, softcap=5.0, scale=0.3, sinks=True), 16),
    ((20, 1, 48), jnp.float32, Features(window=33, sinks=True), 128),
    ((6, 2, 96), jnp.bfloat16, Features(window=300, softcap=20.0, norms=True, sinks=True), 32),
]
