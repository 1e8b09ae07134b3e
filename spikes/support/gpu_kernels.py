# Frozen: runs at commit a8802fc.
"""Parts of spike 013 that time one piece alone: ceilings, attention, products, the sampler.

A part returns tables: (title, header, rows of text).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spikes.support.gpu_scale import Scale, milliseconds, read_gigabytes_per_second, timed
from xla_engine.graphs.attention import gpu_kernels as kernels
from xla_engine.graphs.attention.backend import KEY_SPAN, AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows
from xla_engine.graphs.sampling import sampler as sampling

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


def attention(scale: Scale) -> list[Table]:
    """Decode attention of one layer, ragged lengths: share of the read ceiling, and the kernels' parameters."""
    config, ceiling = scale.model, read_gigabytes_per_second(scale)
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim

    def measure(backend: Any, rows: int, longest: int) -> tuple[float, float]:
        """Milliseconds, and bytes of keys and values of live rows."""
        positions = -(-longest // KEY_SPAN) * KEY_SPAN
        layer = backend.make_store(config, (0,), rows, positions, jnp.dtype(jnp.bfloat16))
        length = np.linspace(longest // 2, longest - 1, rows).astype(np.int32)
        qkv = jnp.ones((rows, width), jnp.float32)
        angles = jnp.asarray(rope_tables(config, positions)[0])[length]

        def attend(layer: LayerCache, qkv: jax.Array) -> tuple[LayerCache, jax.Array]:
            own = config.attention(0), AttentionWeights()
            call = AttentionCall(*own, angles, positions, jnp.dtype(jnp.bfloat16))
            live = jnp.ones(rows, bool)
            return backend.attend_decode(layer, qkv, call, length=jnp.asarray(length), live=live)

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
                    self,
                    kernel,
                    warps=to if getattr(kernel, "func", None) is kernels.split_kernel else warps,
                    **rest,
                )

            with (
                mock.patch.object(kernels, "KEY_TILE", tile),
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
        idle = make_rows(count, 4, 1).sampling
        hot = dataclasses.replace(idle, temperature=jnp.ones(count))
        kinds = {
            "greedy": idle,
            "greedy, log-probability": dataclasses.replace(idle, num_logprobs=jnp.zeros(count, jnp.int32)),
            "greedy, 20 most likely": dataclasses.replace(idle, num_logprobs=jnp.full(count, 20, jnp.int32)),
            "temperature 1": hot,
            "top-k 50": dataclasses.replace(hot, top_k=jnp.full(count, 50, jnp.int32)),
            "top-p 0.9 of few tokens": dataclasses.replace(
                hot, temperature=jnp.full(count, 0.1), top_p=jnp.full(count, 0.9)
            ),
            "top-p 0.9 of many tokens": dataclasses.replace(hot, top_p=jnp.full(count, 0.9)),
        }
        position = jnp.arange(count, dtype=jnp.int32)
        compiled = jax.jit(sampling.sample).lower(logits, idle, position).compile()
        for name, rows in kinds.items():
            ms = milliseconds(scale, lambda c=compiled, x=logits, r=rows, p=position: c(x, r, p))
            table.append([str(count), name, f"{1e3 * ms:.0f}"])
    return [("Sampler", ("rows", "kind", "us"), table)]
