"""The parts of spike 013, each a process of its own: a part that fails or hangs takes no other with it.

A part returns tables: (title, header, rows of text).
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from graphs import attention_gpu, decode, sampling, sums
from graphs.attention import KEY_BLOCK, LayerCache
from graphs.attention_xla import XlaAttention
from graphs.decode import decode_step
from graphs.layers import apply_rope, rope_table, split_heads
from graphs.prefill import Lanes, prefill_chunk
from graphs.projection import ROWS_LEFT, WEIGHT_LEFT
from graphs.rows import make_rows
from spikes.gpu_scale import (
    Programs,
    Scale,
    device_weights,
    milliseconds,
    model_bytes,
    read_gigabytes_per_second,
    spec_of,
    step_of,
    timed,
)
from xla_engine.config import EngineConfig
from xla_engine.engine import XlaBatchEngine
from xla_engine.verify import verify

Table = tuple[str, Sequence[str], list[list[str]]]


def device(scale: Scale) -> list[Table]:
    """What the machine can do: the ceilings that everything else is a share of."""
    n = scale.model.hidden_size * 2
    square = jnp.ones((n, n), jnp.bfloat16)
    product = timed(scale, lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32), square)
    big = jnp.ones((1 << 30) // (1 if scale.calls > 2 else 1 << 10), jnp.bfloat16)
    copied = 2 * big.nbytes / timed(scale, lambda x: -x, big) / 1e6
    rows = [
        ["device", jax.devices()[0].device_kind],
        ["read, GB/s", f"{read_gigabytes_per_second(scale):.0f}"],
        ["read and write, GB/s", f"{copied:.0f}"],
        [f"bf16 product of {n}, TFLOP/s", f"{2 * n**3 / product / 1e9:.0f}"],
    ]
    return [("Ceilings", ("what", "found"), rows)]


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


def _no_attention(self: Any, layer: LayerCache, qkv: jax.Array, **_: Any) -> tuple[LayerCache, jax.Array]:
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    return layer, split_heads(qkv, kv_heads, head_dim)[0].reshape(len(qkv), -1)


def _written_by_xla(
    self: Any, layer: LayerCache, qkv: jax.Array, rope: jax.Array, position: jax.Array
) -> Any:
    """Rotation and write as XLA fuses them, in place of the write kernel: qkv `[B, H + 2 KV, Dh]`."""
    rows, kv_heads, positions, head_dim = layer.keys.shape
    q, k, v = split_heads(qkv.reshape(rows, -1), kv_heads, head_dim)
    at = (jnp.arange(rows), slice(None), jnp.where(position >= 0, position, positions))
    new = zip(layer, (apply_rope(k, rope), v), strict=True)
    written = (c.at[at].set(x.astype(c.dtype), mode="drop", unique_indices=True) for c, x in new)
    return LayerCache(*written), apply_rope(q, rope).astype(layer.keys.dtype).reshape(
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

    def greedy(logits: jax.Array, *_: Any) -> tuple[jax.Array, jax.Array]:
        token = sampling.argmax(logits)
        return token, jnp.zeros(token.shape, jnp.float32)

    forms = {
        "full step, log-probabilities wanted": plain,
        "greedy only": replaced(decode, "sample", greedy),
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
    full = found["full step, log-probabilities wanted"]
    rows = [[name, f"{ms:.3f}", f"{ms - full:+.3f}"] for name, ms in found.items()]
    title = (
        f"Decode step of {scale.few} layers, {sizes['live']} rows, {scale.context} keys, one thing changed"
    )
    return [(title, ("form", "ms", "against the full step"), rows)]


def attention(scale: Scale) -> list[Table]:
    """Decode attention of one layer, ragged lengths: share of the read ceiling, and the kernels' parameters."""
    config, ceiling = scale.model, read_gigabytes_per_second(scale)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim

    def measure(backend: Any, rows: int, longest: int) -> tuple[float, float]:
        """Milliseconds, and bytes of keys and values of live rows."""
        positions = -(-longest // KEY_BLOCK) * KEY_BLOCK
        one = dataclasses.replace(config, num_hidden_layers=1)
        (layer,) = backend.make_cache(one, rows, positions, jnp.dtype(jnp.bfloat16))
        length = np.linspace(longest // 2, longest - 1, rows).astype(np.int32)
        qkv = jnp.ones((rows, width), jnp.float32)
        angles = jnp.asarray(rope_table(config, positions))[length]

        def attend(layer: LayerCache, qkv: jax.Array) -> tuple[LayerCache, jax.Array]:
            return backend.attend_decode(
                layer, qkv, rope=angles, length=jnp.asarray(length), live=jnp.ones(rows, bool),
                key_length=positions, compute_dtype=jnp.dtype(jnp.bfloat16),
            )  # fmt: skip

        compiled = jax.jit(attend, donate_argnums=0).lower(layer, qkv).compile()
        state = [layer]

        def run() -> jax.Array:
            state[0], out = compiled(state[0], qkv)
            return out

        found = milliseconds(scale, run)
        jax.tree.map(lambda leaf: leaf.delete(), state)
        return found, 4.0 * int((length + 1).sum()) * config.num_key_value_heads * config.head_dim

    table = []
    for rows in sorted({scale.live[0][0], scale.most_rows}):
        for longest in scale.contexts:
            ours, size = measure(scale.attention, rows, longest)
            xla, _ = measure(XlaAttention(), rows, longest)
            share = size / ours / 1e6 / ceiling
            table.append([str(rows), str(longest), f"{1e3 * ours:.1f}", f"{share:.0%}", f"{1e3 * xla:.1f}"])
    header = ("rows", "longest", "gpu, us", "of the read ceiling", "xla, us")
    tables: list[Table] = [
        ("Attention of one decode layer, rows of half to all of the longest", header, table)
    ]
    tuned = []
    call = type(scale.attention)._call
    for tile in (32, 64, 128):
        for warps in (2, 4, 8):

            def with_warps(self: Any, kernel: Any, *, warps: int, to: int = warps, **rest: Any) -> Any:
                return call(
                    self, kernel, warps=to if kernel is attention_gpu._split_kernel else warps, **rest
                )

            with (
                mock.patch.object(attention_gpu, "KEY_TILE", tile),
                mock.patch.object(type(scale.attention), "_call", with_warps),
            ):
                cells = [f"{1e3 * measure(scale.attention, rows, scale.contexts[-1] // 4 or 64)[0]:.1f}"
                         for rows in sorted({scale.live[0][0], scale.most_rows})]  # fmt: skip
            tuned.append([str(tile), str(warps), *cells])
        if scale.calls == 2:
            break  # a rehearsal tries one tile
    names = [f"{rows} rows, us" for rows in sorted({scale.live[0][0], scale.most_rows})]
    tables.append(("Parameters of the split kernel", ("key tile", "warps", *names), tuned))
    return tables


def products(scale: Scale) -> list[Table]:
    """The projections alone, each over several weights in turn so that no cache holds them."""
    c, ceiling = scale.model, read_gigabytes_per_second(scale)
    shapes = {
        "q, k, v": (c.qkv_features, c.hidden_size),
        "output": (c.hidden_size, c.num_attention_heads * c.head_dim),
        "gate, up": (2 * c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
        "head": (c.vocab_size, c.hidden_size),
    }
    table = []
    for name, shape in shapes.items():
        copies = max(2, int(4e8 // (2 * shape[0] * shape[1]))) if scale.calls > 2 else 2
        weights = [jnp.full(shape, 0.01, jnp.bfloat16) for _ in range(copies)]
        cells = []
        for count in sorted({scale.live[0][0], scale.most_rows, 4 * scale.most_rows}):
            for form in (WEIGHT_LEFT, ROWS_LEFT):

                def chain(weights: list[jax.Array], x: jax.Array, form: Any = form) -> jax.Array:
                    total = jnp.zeros((), jnp.float32)
                    for weight in weights:
                        out = lax.optimization_barrier(form.linear(weight, x + total))
                        total = out[0, 0] * 1e-30
                    return total

                ms = timed(scale, chain, weights, jnp.ones((count, shape[1]), jnp.float32)) / copies
                cells.append(f"{2 * shape[0] * shape[1] / ms / 1e6 / ceiling:.0%}")
        table.append([name, *cells])
    counts = sorted({scale.live[0][0], scale.most_rows, 4 * scale.most_rows})
    header = ("projection", *(f"{n} rows, {side} left" for n in counts for side in ("weight", "rows")))
    return [("Projections, share of the read ceiling", header, table)]


def sampler(scale: Scale) -> list[Table]:
    """The sampler alone on logits of the real vocabulary."""
    table = []
    for count in sorted({scale.live[0][0], scale.most_rows}):
        logits = jax.random.normal(jax.random.key(1), (scale.model.vocab_size, count), jnp.float32)
        idle = make_rows(count, 4).sampling
        hot = dataclasses.replace(idle, temperature=jnp.ones(count))
        kinds = {
            "greedy": idle,
            "greedy, log-probability": dataclasses.replace(idle, wants_logprob=jnp.ones(count, bool)),
            "temperature 1": hot,
            "top-k 50": dataclasses.replace(hot, top_k=jnp.full(count, 50, jnp.int32)),
            "top-p 0.9": dataclasses.replace(hot, top_p=jnp.full(count, 0.9)),
        }
        position = jnp.arange(count, dtype=jnp.int32)
        compiled = jax.jit(sampling.sample).lower(logits, idle, position).compile()
        for name, rows in kinds.items():
            ms = milliseconds(scale, lambda c=compiled, x=logits, r=rows, p=position: c(x, r, p))
            table.append([str(count), name, f"{1e3 * ms:.0f}"])
    return [("Sampler", ("rows", "kind", "us"), table)]


def prefill(scale: Scale) -> list[Table]:
    """One prefill call of few layers, first chunks and chunks behind a long prefix."""
    spec = spec_of(scale.shallow, scale.attention)
    weights = device_weights(spec)
    rope = jax.device_put(rope_table(spec.config, scale.positions))
    layers, _ = model_bytes(dataclasses.replace(scale.shallow, vocab_size=0), 0, 0)
    table = []
    for lanes, tokens in scale.chunks:
        rows = make_rows(lanes, 4)
        for start in (0, scale.positions - tokens):
            work = Lanes(
                tokens=jnp.ones((lanes, tokens), jnp.int32),
                slot=jnp.arange(lanes, dtype=jnp.int32),
                start=jnp.full(lanes, start, jnp.int32),
                count=jnp.full(lanes, tokens, jnp.int32),
                is_last=jnp.ones(lanes, bool),
                max_tokens=jnp.ones(lanes, jnp.int32),
                stop_ids=rows.stop_ids,
                sampling=rows.sampling,
            )
            cache = spec.attention.make_cache(spec.config, lanes, scale.positions, spec.dtype)
            if start == 0:
                step = jax.jit(prefill_chunk, static_argnums=(0, 1, 2), donate_argnums=(5,))
                call = step.lower(
                    spec, scale.positions, max(8, lanes), weights, rope, cache, rows, work
                ).compile()
            state = [cache]

            def run(call: Any = call, state: list[Any] = state, rows: Any = rows, work: Any = work) -> Any:
                state[0], *rest = call(weights, rope, state[0], rows, work)
                return rest

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
                weights, rope, cache, rows, scheduled = state

                def body(carry: Any, _: None) -> Any:
                    cache, rows, samples = decode_step(
                        spec, scale.positions, weights, rope, *carry, scheduled
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
        sizes = {"rows": count, "live": count, "length": 200, "positions": KEY_BLOCK}
        programs = Programs(spec, weights, {"step": step_of(spec, KEY_BLOCK)}, **sizes)
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


PARTS: dict[str, Callable[[Scale], list[Table]]] = {
    each.__name__: each
    for each in (device, roofline, law, breakdown, attention, bits, sampler, prefill, loop, products)
}
