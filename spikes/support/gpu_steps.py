# Frozen: runs at commit 60b1f13.
"""Parts of spike 013 that run whole steps, or the whole engine.

A part returns tables: (title, header, rows of text).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spikes.support.gpu_kernels import Table
from spikes.support.gpu_scale import (
    Programs,
    Scale,
    device_weights,
    milliseconds,
    model_bytes,
    read_gigabytes_per_second,
    spec_of,
    step_of,
)
from spikes.support.timing import greedy
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.verify import verify
from xla_engine.graphs.attention.backend import KEY_SPAN, AttentionCall, LayerCache
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.ops import fixed_order_sums as sums
from xla_engine.graphs.ops.norms import apply_rope, split_heads
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows, make_tables
from xla_engine.graphs.steps import decode, sample_rows
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk


def law(scale: Scale) -> list[Table]:
    """Level A on the embedded model, whole engine, with this backend."""
    config = EngineConfig(attention_backend="gpu", compile_cache=False, max_model_len=256)
    requests = 200 if scale.calls > 2 else 6
    with XlaBatchEngine.from_pretrained(config=config) as engine:
        check = engine.self_check
        report = verify(engine, requests=requests, schedules=2, seed=0, lags=(0, 1))
        cache = engine.runner.cache_bytes
        rows = [line.split("  ", 1) for line in report.lines() if "  " in line]
        rows += [[name, str(getattr(check, name))] for name in ("row_invariant", "lane_invariant")]
        rows += [["prefill_equals_decode", str(check is not None and check.prefill_equals_decode)]]
        rows += [
            [
                f"{graph.name}: alias of cache, temp MB",
                f"{graph.alias_bytes / cache:.0%}, {graph.temp_bytes / 1e6:.1f}",
            ]
            for graph in engine.inventory_report()
        ]
    return [("Level A, embedded model", ("what", "found"), [[a.strip(), b.strip()] for a, b in rows])]


def roofline(scale: Scale) -> list[Table]:
    """The whole decode step against reading weights and keys once."""
    spec = spec_of(scale.model, scale.attention)
    weights = device_weights(spec)
    ceiling = read_gigabytes_per_second(scale)
    rows = []
    for count, live in scale.live:
        sizes = {"rows": count, "live": live, "length": scale.context, "positions": scale.positions}
        programs = Programs(spec, weights, {"step": step_of(spec, scale.positions)}, **sizes)
        before = programs.cache[0].keys.unsafe_buffer_pointer()
        ahead = milliseconds(scale, lambda programs=programs: programs.run("step"))
        alone = milliseconds(scale, lambda programs=programs: programs.run("step"), each=True)
        report = programs.reports["step"]
        in_place = programs.cache[0].keys.unsafe_buffer_pointer() == before
        floor = sum(model_bytes(scale.model, live, scale.context)) / ceiling / 1e6
        rows.append(
            [
                f"{live} of {count}",
                f"{ahead:.2f}",
                f"{alone:.2f}",
                f"{floor:.2f}",
                f"{floor / ahead:.0%}",
                f"{1e3 * live / ahead:.0f}",
                f"{report.compile_seconds:.0f}",
                f"{report.temp_bytes / 1e6:.0f}",
                "yes" if in_place and report.alias_bytes >= programs.cache_bytes else "NO",
            ]
        )
        programs.close()
    header = ("live rows", "ms", "ms, each waited for", "floor ms", "floor / ms", "tok/s", "compile s", "temp MB",
              "in place")  # fmt: skip
    layers = scale.model.num_hidden_layers
    return [(f"Decode step, {layers} layers, {scale.context} keys per row, bf16", header, rows)]


def _no_attention(
    self: Any, layer: LayerCache, qkv: jax.Array, *_: Any, **__: Any
) -> tuple[LayerCache, jax.Array]:
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    return layer, split_heads(qkv, kv_heads, head_dim)[0].reshape(len(qkv), -1)


def _written_by_xla(
    self: Any, layer: LayerCache, qkv: jax.Array, position: jax.Array, call: AttentionCall
) -> Any:
    """Rotation and write as XLA fuses them, in place of the write kernel: qkv `[B, H + 2 KV, Dh]`."""
    rows, kv_heads, positions, head_dim = layer.keys.shape
    q, k, v = split_heads(qkv.reshape(rows, -1), kv_heads, head_dim)
    at = (jnp.arange(rows), slice(None), jnp.where(position >= 0, position, positions))
    new = zip(layer, (apply_rope(k, call.rope), v), strict=True)
    written = (c.at[at].set(x.astype(c.dtype), mode="drop", unique_indices=True) for c, x in new)
    return LayerCache(*written), apply_rope(q, call.rope).astype(layer.keys.dtype).reshape(
        rows, kv_heads, -1, head_dim
    )


def breakdown(scale: Scale) -> list[Table]:
    """Steps with one thing changed, few layers. Each is traced with a replacement in place."""
    spec, config = spec_of(scale.shallow, scale.attention), scale.shallow
    kind = type(scale.attention)
    plain = step_of(spec, scale.positions)

    def replaced(owner: Any, name: str, value: Any) -> Callable[..., Any]:
        def step(*arguments: Any) -> Any:
            with mock.patch.object(owner, name, value):
                return plain(*arguments)

        return step

    forms = {
        "full step": plain,
        "greedy and log-probabilities only": replaced(sample_rows, "sample", greedy),
        "no attention, no write": replaced(kind, "attend_decode", _no_attention),
        "write by XLA": replaced(kind, "_write", _written_by_xla),
        "rows as left operand": replaced(decode, "WEIGHT_LEFT", ROWS_LEFT),
        "sums in a written-out order": replaced(sums, "_reduce_last", sums._in_order_last),
    }
    sizes = {"rows": scale.most_rows, "live": scale.live[-1][1], "length": scale.context}
    weights = device_weights(spec)
    programs = Programs(spec, weights, forms, positions=scale.positions, **sizes)
    found = {name: milliseconds(scale, lambda name=name: programs.run(name)) for name in forms}
    programs.close()
    other = spec_of(config, XlaAttention())
    xla = Programs(
        other, weights, {"xla": step_of(other, scale.positions)}, positions=scale.positions, **sizes
    )
    found["attention backend xla"] = milliseconds(scale, lambda: xla.run("xla"))
    full = found["full step"]
    rows = [[name, f"{ms:.3f}", f"{ms - full:+.3f}"] for name, ms in found.items()]
    title = (
        f"Decode step of {scale.few} layers, {sizes['live']} rows, {scale.context} keys, one thing changed"
    )
    return [(title, ("form", "ms", "against the full step"), rows)]


def prefill(scale: Scale) -> list[Table]:
    """One prefill call of few layers, first chunks and chunks behind a long prefix."""
    spec = spec_of(scale.shallow, scale.attention)
    weights = device_weights(spec)
    rope = jax.device_put(rope_tables(spec.config, scale.positions))
    layers, _ = model_bytes(dataclasses.replace(scale.shallow, vocab_size=0), 0, 0)
    table = []
    for lanes, tokens in scale.chunks:
        rows = make_rows(lanes, 4, scale.positions)
        tables = jax.device_put(make_tables(lanes, spec.config.vocab_size))
        for start in (0, scale.positions - tokens):
            work = Lanes(
                tokens=jnp.ones((lanes, tokens), jnp.int32),
                slot=jnp.arange(lanes, dtype=jnp.int32),
                start=jnp.full(lanes, start, jnp.int32),
                count=jnp.full(lanes, tokens, jnp.int32),
                is_last=jnp.ones(lanes, bool),
                prompt_length=jnp.full(lanes, start + tokens, jnp.int32),
                max_tokens=jnp.ones(lanes, jnp.int32),
                min_tokens=jnp.zeros(lanes, jnp.int32),
                stop_ids=rows.stop_ids,
                sampling=rows.sampling,
            )
            cache = make_cache(spec, lanes, scale.positions)
            if start == 0:
                step = jax.jit(prefill_chunk, static_argnums=(0, 1, 2), donate_argnums=(5,))
                call = step.lower(
                    spec, scale.positions, max(8, lanes), weights, rope, cache, rows, work, tables
                ).compile()
            state = [cache]

            def run(call: Any = call, state: list[Any] = state, rest: Any = (rows, work, tables)) -> Any:
                state[0], *out = call(weights, rope, state[0], *rest)
                return out

            ms = milliseconds(scale, run)
            jax.tree.map(lambda leaf: leaf.delete(), state)
            rate = lanes * tokens / ms
            flops = layers * lanes * tokens / ms / 1e9
            table.append([f"{lanes} x {tokens}", str(start), f"{ms:.2f}", f"{rate:.1f}", f"{flops:.0f}"])
    header = ("lanes x tokens", "keys before", "ms", "thousand tok/s", "TFLOP/s in projections")
    return [(f"Prefill call of {scale.few} layers with head and sampler", header, table)]


def loop(scale: Scale) -> list[Table]:
    """K steps in one dispatch against K dispatches, and what the host pays for one."""
    table = []
    for name, config in (("small model", scale.small), (f"{scale.few} layers", scale.shallow)):
        spec = spec_of(config, scale.attention)
        for count in (8,) if scale.calls > 2 else (scale.live[0][0],):

            def block(*state: Any, spec: Any = spec) -> Any:
                weights, rope, cache, rows, scheduled, tables = state

                def body(carry: Any, _: None) -> Any:
                    cache, rows, samples, _ = decode_step(
                        spec, scale.positions, weights, rope, *carry, scheduled, tables
                    )
                    return (cache, rows), samples

                (cache, rows), samples = lax.scan(body, (cache, rows), None, length=8)
                return cache, rows, samples

            forms = {"one": step_of(spec, scale.positions), "block": block}
            programs = Programs(spec, device_weights(spec), forms, rows=count, live=count,
                                length=scale.context, positions=scale.positions)  # fmt: skip
            one = milliseconds(scale, lambda p=programs: p.run("one"))
            block_ms = milliseconds(scale, lambda p=programs: p.run("block")) / 8
            began = time.perf_counter()
            for _ in range(scale.calls):
                last = programs.run("one")
            host = 1e3 * (time.perf_counter() - began) / scale.calls
            jax.block_until_ready(last)
            table.append([name, str(count), f"{one:.3f}", f"{block_ms:.3f}", f"{host:.3f}"])
            programs.close()
    header = ("model", "rows", "ms per step", "ms per step, 8 in a dispatch", "host ms per dispatch")
    return [("Steps per dispatch", header, table)]


def bits(scale: Scale) -> list[Table]:
    """Whether samples depend on the row, the neighbours, the width; a hash to compare with another process."""
    spec = spec_of(scale.shallow, scale.attention)
    weights = device_weights(spec)
    widths = sorted({count for count, _ in scale.live} & {8, 64})
    found: dict[int, np.ndarray] = {}
    table = []
    for count in widths:
        sizes = {"rows": count, "live": count, "length": 200, "positions": KEY_SPAN}
        programs = Programs(spec, weights, {"step": step_of(spec, KEY_SPAN)}, **sizes)
        outcomes = []
        for seed, row in ((0, 0), (1, count // 2), (2, count - 1)):
            draw = np.random.default_rng(seed)
            token = draw.integers(0, spec.config.vocab_size, count).astype(np.int32)
            token[row] = 7
            keys = draw.standard_normal((2, *programs.cache[0].keys.shape[1:]), np.float32)
            mine = np.random.default_rng(9).standard_normal(keys.shape, np.float32)
            stored = [
                np.where((np.arange(count) == row)[:, None, None, None], m, k)
                for m, k in zip(mine, keys, strict=True)
            ]
            for index in range(len(programs.cache)):
                pair = [jnp.asarray(x, jnp.bfloat16) for x in stored]
                programs.cache[index] = LayerCache(*pair)
            programs.rows = dataclasses.replace(programs.rows, token=jnp.asarray(token))
            samples = np.asarray(programs.run("step")[1])
            outcomes.append(samples[:, row])
        found[count] = outcomes[0]
        same = all(np.array_equal(outcome, outcomes[0]) for outcome in outcomes)
        table.append(
            [f"{count} rows: first, middle, last among other neighbours", "same" if same else "DIFFERENT"]
        )
        programs.close()
    if len(widths) == 2:
        same = np.array_equal(*found.values())
        table.append([f"{widths[0]} rows against {widths[1]}", "same" if same else "different (no promise)"])
    digest = hashlib.sha256(b"".join(each.tobytes() for each in found.values())).hexdigest()[:12]
    table.append(["hash of these samples", digest])
    return [("Bits of a row", ("comparison", "found"), table)]
