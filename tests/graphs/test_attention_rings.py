"""Rings of a sliding window give the results of a whole slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_cases import Case, Features, _stored, bits
from tests.support.device import read_cache
from tests.support.host_layers import layer_to_host, to_host
from tests.support.instruction_sets import NAMES, NATIVE_ISAS, registered
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.graphs.attention.backend import Attention
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import FULL, KEY_SPAN, SLIDING
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables


@pytest.mark.parametrize("backend", [XlaAttention(call_positions=64)], ids=["xla"])
def test_a_ring_sees_what_a_whole_slot_sees(backend: XlaAttention) -> None:
    """Fill the ring three times, in lanes of one call and of several, over stale values of another; then decode."""
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
@pytest.mark.parametrize(
    "backend", [XlaAttention(), NativeAttention("any")], ids=lambda backend: backend.name
)
def test_a_ring_moves_span_by_span(backend: Attention, length: int, whole: int) -> None:
    """Move a ring to another slot. If the backend clears stale values, spans after the length are written as well."""
    draw = np.random.default_rng(length)
    cache = tuple(draw.standard_normal((2, 1, 512, 64), np.float32) for _ in range(2))
    layer, size = _stored(backend, cache), jnp.int32(length)
    spans = [backend.read_span(layer, jnp.int32(0), jnp.int32(span)) for span in range(whole)]
    for span in range(whole if backend.bounded_by_length else 4):
        moved = spans[min(span, whole - 1)]
        layer = backend.write_span(layer, jnp.int32(1), jnp.int32(span), moved, size)
    valid = min(length, 512)
    for old, new in zip(cache, layer_to_host(backend, layer, 64), strict=True):
        assert bits(new[1, :, :valid]) == bits(old[0, :, :valid]) and bits(new[0]) == bits(old[0])


@pytest.mark.skipif(not NATIVE_ISAS, reason="no C++ attention on this platform")
def test_a_layer_keeps_its_window_and_what_a_call_writes() -> None:
    model = replace(TINY, num_hidden_layers=2, layer_types=(SLIDING, FULL), sliding_window=300)
    best = registered(NAMES[0], "attention_bf16")
    assert best
    for backend in (XlaAttention(call_positions=128), NativeAttention(best, call_positions=128)):
        spec = ModelSpec(model, jnp.dtype(jnp.bfloat16), backend)
        for length, kept in ((2048, [512, 2048]), (256, [256, 256])):
            layers = to_host(spec, make_cache(spec, 8, length))
            assert [keys.shape[2] for keys, _ in layers] == kept


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", "bfloat16"), pytest.param("xla", "float32", marks=pytest.mark.release)]
)
@pytest.mark.full
def test_an_engine_with_rings_keeps_the_law(
    make_engine: Callable[..., XlaBatchEngine], name: str, dtype: str
) -> None:
    """Prompts are longer than a ring, and other layers keep all positions."""
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
