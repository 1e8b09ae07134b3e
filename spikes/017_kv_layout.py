# Frozen: runs at commit a8802fc.
"""Which layout of the pure-JAX cache lets a decode step read a short key bucket of a long cache cheaply? And what does
a step cost by its key bucket: three against as many as doubling makes?

In `layouts` each form is a whole attention backend in a whole decode step; write and arithmetic are the same.

    python -m spikes.017_kv_layout layouts --rows 32 --positions 512 --keys 256
    python -m spikes.017_kv_layout buckets --rows 32 --positions 2048
"""

# %%
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spikes.support.timing import (
    SMOLLM2_135M,
    DecodeStep,
    describe_machine,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.config import EngineConfig
from xla_engine.graphs.attention.backend import KEY_SPAN, AttentionCall, LayerCache
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.norms import apply_rope, split_heads

arguments = argparse.ArgumentParser()
arguments.add_argument("question", nargs="?", choices=["layouts", "buckets"], default="layouts")
arguments.add_argument("--rounds", type=int, default=7)
arguments.add_argument("--rows", type=int, default=32)
arguments.add_argument("--positions", type=int, default=512)
arguments.add_argument("--keys", type=int, default=256)
options = arguments.parse_known_args()[0]


# %% Forms with blocks behind the heads: one buffer, or one per key bucket
def _product(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    return lax.dot_general(
        left,
        right,
        (((4,), (right_axis,)), ((0, 1, 2), (0, 1, 2))),
        preferred_element_type=jnp.float32,
    )


class Segments(XlaAttention):
    """Buffers `[B, KV, J, block, Dh]`, one per key bucket: 256, 256, 512, 1024, ... positions."""

    def sizes(self, length: int) -> list[int]:
        ends = [KEY_SPAN]
        while ends[-1] < length:
            ends.append(min(2 * ends[-1], length))
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def make_store(
        self, config: ModelConfig, layers: Sequence[int], rows: int, length: int, dtype: jnp.dtype
    ) -> LayerCache:
        def buffers() -> Any:
            heads = (rows, config.num_key_value_heads)
            return tuple(
                jnp.zeros((*heads, size // KEY_SPAN, KEY_SPAN, config.head_dim), dtype)
                for size in self.sizes(length)
            )

        return LayerCache(buffers(), buffers())

    def attend_decode(
        self, layer: Any, qkv: jax.Array, call: AttentionCall, *, length: Any, live: Any
    ) -> Any:
        rope, key_length = call.rope, call.key_length
        rows, kv_heads, _, _, head_dim = layer.keys[0].shape
        q, k, v = split_heads(qkv, kv_heads, head_dim)
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        row, stored = jnp.arange(rows), [list(layer.keys), list(layer.values)]
        grouped = q.reshape(rows, kv_heads, 1, -1, head_dim).astype(layer.keys[0].dtype)
        scores, base, used = [], 0, 0
        while base < key_length:
            blocks = stored[0][used].shape[2]
            relative = length - base
            wanted = live & (relative >= 0) & (relative < blocks * KEY_SPAN)
            at = (row, slice(None), jnp.where(wanted, relative // KEY_SPAN, blocks), relative % KEY_SPAN)
            for side, new in zip(stored, (k, v), strict=True):
                side[used] = (
                    side[used].at[at].set(new.astype(side[used].dtype), mode="drop", unique_indices=True)
                )
            count = min(blocks, (key_length - base) // KEY_SPAN)  # a part of a buffer is copied
            keys = stored[0][used][:, :, :count]
            queries = jnp.broadcast_to(grouped, (rows, kv_heads, count, *grouped.shape[3:]))
            found = lax.optimization_barrier(_product(keys, queries, 4)).swapaxes(3, 4) * head_dim**-0.5
            seen = jnp.arange(count * KEY_SPAN).reshape(count, KEY_SPAN) <= relative[:, None, None]
            scores.append(jnp.where(seen[:, None, :, None], found, -jnp.inf))
            base, used = base + count * KEY_SPAN, used + 1
        peak = scores[0].max(axis=(2, 4), keepdims=True)
        for found in scores[1:]:
            peak = jnp.maximum(peak, found.max(axis=(2, 4), keepdims=True))
        weighted, total = [], []
        for found, values in zip(scores, stored[1], strict=False):
            weights = jnp.exp(found - peak)
            out = _product(weights.astype(values.dtype), values[:, :, : found.shape[2]], 3)
            sums = sum_last(weights)
            weighted += [out[:, :, block] for block in range(found.shape[2])]
            total += [sums[:, :, block] for block in range(found.shape[2])]
        result = sum(weighted[1:], weighted[0]) / sum(total[1:], total[0])
        return LayerCache(*map(tuple, stored)), result.reshape(rows, -1)


class OneBuffer(Segments):
    """One buffer `[B, KV, J, block, Dh]`, which is `[B, KV, S, Dh]` in memory: as it was before."""

    def sizes(self, length: int) -> list[int]:
        return [length]


FORMS = {
    "blocks lead, one buffer (the code)": XlaAttention(),
    "positions behind the heads, one buffer": OneBuffer(),
    "positions behind the heads, a buffer per key bucket": Segments(),
}

spec = ModelSpec(SMOLLM2_135M, jnp.dtype(jnp.bfloat16), XlaAttention())
weights = random_weights(spec)


# %%
def layouts() -> None:
    steps = {
        name: DecodeStep(
            ModelSpec(spec.config, spec.dtype, form),
            weights,
            rows=options.rows,
            length=options.keys - 80,
            key_length=options.keys,
            positions=options.positions,
        )
        for name, form in FORMS.items()
    }
    times = interleave(steps, options.rounds)
    reference = np.asarray(next(iter(steps.values()))())
    table = [
        [
            name,
            times[name].milliseconds(),
            f"{step.report.temp_bytes / 1e6:.1f}",
            "yes" if np.array_equal(reference, np.asarray(step())) else "no",
        ]
        for name, step in steps.items()
    ]
    print(f"\nB = {options.rows}, {options.keys} keys of {options.positions} positions\n")
    print(markdown_table(("layout", "ms", "temp MB", "same samples"), table))


# %%
def buckets() -> None:
    doubling = (*(256 << n for n in range(24) if 256 << n < options.positions), options.positions)
    chosen = EngineConfig().buckets(options.positions)
    forms = {"each twice the one before": doubling, "three": chosen, "one": (options.positions,)}
    shared = [make_cache(spec, options.rows, options.positions)]

    def step_of(keys: int) -> Callable[[], jax.Array]:
        """One step over `keys` positions, in the one cache that all have in turn."""
        step = DecodeStep(
            spec,
            weights,
            rows=options.rows,
            length=keys - 1,
            key_length=keys,
            positions=options.positions,
            cache=shared[0],
        )

        def run() -> jax.Array:
            step.cache = shared[0]
            samples = jax.block_until_ready(step())
            shared[0] = step.cache
            return samples

        return run

    sizes = sorted({*doubling, *chosen})
    times = interleave({str(size): step_of(size) for size in sizes}, options.rounds)
    cost = {size: times[str(size)].median for size in sizes}
    print(markdown_table(["keys", "ms"], [[size, times[size].milliseconds()] for size in times]))

    def mean(buckets: Sequence[int], lengths: np.ndarray) -> str:
        """Milliseconds of a step, averaged over the longest row's length."""
        found = [cost[next(size for size in buckets if size >= at)] for at in lengths]
        return f"{1e3 * float(np.mean(found)):.1f}"

    lengths = np.arange(1, options.positions + 1)
    falling = np.exp(np.linspace(np.log(64), np.log(options.positions), 4000))  # each doubling as likely
    header = ["buckets", "every length as likely, ms", "every doubling from 64 as likely, ms"]
    table = [[name, mean(each, lengths), mean(each, falling)] for name, each in forms.items()]
    print(markdown_table(header, table))


# %%
print(describe_machine())
{"layouts": layouts, "buckets": buckets}[options.question]()
