# Frozen: runs at commit 84bfb74.
"""What do the C++ operations gain over the best pure-JAX forms, in a whole decode step and a whole prefill call?

python -m spikes.018_native_operations
"""

# %%
from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spikes.support.timing import (
    SMOLLM2_135M,
    DecodeStep,
    describe_machine,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.kv_cache.cache import make_cache, places
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import ROWS_LEFT
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.runner.native_library.build import register

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=9)
arguments.add_argument("--rows", type=int, nargs="+", default=[8, 32])
arguments.add_argument("--length", type=int, default=192, help="keys of every row")
arguments.add_argument("--positions", type=int, default=512)
options = arguments.parse_known_args()[0]

ISA = register()
BF16 = jnp.dtype(jnp.bfloat16)
SPECS = {
    "pure JAX": ModelSpec(SMOLLM2_135M, BF16, XlaAttention()),
    "C++ attention": ModelSpec(SMOLLM2_135M, BF16, NativeAttention(ISA)),
    "C++ attention and products": ModelSpec(SMOLLM2_135M, BF16, NativeAttention(ISA), NativeProducts(ISA)),
}
weights = random_weights(next(iter(SPECS.values())))


def key_length(spec: ModelSpec, longest: int) -> int:
    """The bucket an engine would take."""
    return options.positions if spec.attention.bounded_by_length else -(-longest // 256) * 256


# %% Decode
steps: dict[str, Any] = {}
for rows in options.rows:
    for name, spec in SPECS.items():
        steps[f"{rows} {name}"] = DecodeStep(
            spec,
            weights,
            rows=rows,
            length=options.length,
            key_length=key_length(spec, options.length + 1),
            positions=options.positions,
        )
times = interleave(steps, options.rounds)
print(describe_machine(), "\n")
table = []
for rows in options.rows:
    base = times[f"{rows} pure JAX"].median
    for name in SPECS:
        each = times[f"{rows} {name}"]
        table.append(
            [str(rows), name, each.milliseconds(), f"{rows / each.median:.0f}", f"{base / each.median:.2f}"]
        )
print(markdown_table(["rows", "form", "ms a step", "tok/s", "against pure JAX"], table), "\n")
del steps


# %% Prefill: the layers over eight lanes of 32 prompt tokens, at the start of their slots and behind 448 keys
LANES, WIDTH = 8, 32


class Prefill:
    """The decoder layers of one prefill call, cache donated."""

    def __init__(self, spec: ModelSpec, start: int) -> None:
        self.cache = make_cache(spec, LANES, options.positions)
        angles = jnp.ones((LANES, WIDTH, 2, SMOLLM2_135M.head_dim // 2), jnp.float32)
        lane = jnp.arange(LANES, dtype=jnp.int32)
        place = (lane, jnp.full(LANES, start, jnp.int32), jnp.full(LANES, WIDTH, jnp.int32))
        tokens = jnp.arange(LANES * WIDTH, dtype=jnp.int32)
        self.call = jax.jit(
            functools.partial(layers, spec, key_length(spec, start + WIDTH)), donate_argnums=1
        )
        self.rest = (angles, *place, tokens)

    def __call__(self) -> None:
        self.cache, last = self.call(weights, self.cache, *self.rest)
        last.block_until_ready()


def layers(
    spec: ModelSpec,
    keys: int,
    weights: Any,
    cache: Any,
    rope: Any,
    slot: Any,
    start: Any,
    count: Any,
    tokens: Any,
) -> Any:
    updated, where = list(cache), places(spec)

    def attend(index: int, qkv: jax.Array, own: AttentionWeights) -> jax.Array:
        store, layer_in_store = where[index]
        call = AttentionCall(
            spec.config.attention(index), own, rope, keys, BF16, layer_in_store=layer_in_store
        )
        updated[store], out = spec.attention.attend_prefill(
            updated[store], qkv, call, Extents(slot, start, count)
        )
        return out

    return updated, spec.merge(weights).hidden(tokens, attend, spec.products or ROWS_LEFT)[:1]


calls = {f"{start} {name}": Prefill(spec, start) for start in (0, 448) for name, spec in SPECS.items()}
times = interleave(calls, options.rounds)
table = []
for start in (0, 448):
    base = times[f"{start} pure JAX"].median
    for name in SPECS:
        each = times[f"{start} {name}"]
        rate = LANES * WIDTH / each.median
        table.append([str(start), name, each.milliseconds(), f"{rate:.0f}", f"{base / each.median:.2f}"])
print(markdown_table(["keys before", "form", "ms a call", "tok/s", "against pure JAX"], table))
