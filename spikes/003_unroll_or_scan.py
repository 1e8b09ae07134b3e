# Frozen: runs at commit 60b1f13.
"""Should the decode step unroll its layers, or scan over stacked weights and caches?

The scanned steps are built from the same pieces as graphs.decode; only the loop over layers differs.

    python -m spikes.003_unroll_or_scan
"""

# %%
from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spikes.support.timing import (
    SMOLLM2_135M,
    DecodeStep,
    describe_machine,
    greedy,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.products import WEIGHT_LEFT, feature_major
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.row_state.rows import Rows, Tables
from xla_engine.graphs.steps.decode import decode_step

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=15)
rounds = arguments.parse_known_args()[0].rounds

spec = ModelSpec(SMOLLM2_135M, jnp.dtype(jnp.bfloat16))
LENGTH, KEY_LENGTH, POSITIONS = 176, 256, 512
print(describe_machine())

# %% The scanned forms. Leaves of all layers are stacked: {"layers": {name: [L, ...]}, other name: leaf}
Stacked = dict[str, Any]


def stack(weights: list[jax.Array]) -> Stacked:
    """Flat leaves to stacked leaves; names are `layers.N.name`."""
    named = dict(zip(spec.names, weights, strict=True))
    fields = sorted({name.split(".", 2)[2] for name in named if name.startswith("layers.")})
    layers = range(SMOLLM2_135M.num_hidden_layers)
    stacked = {field: jnp.stack([named[f"layers.{layer}.{field}"] for layer in layers]) for field in fields}
    return {
        "layers": stacked,
        **{name: leaf for name, leaf in named.items() if not name.startswith("layers.")},
    }


def one_layer(
    weights: dict[str, jax.Array],
    x: jax.Array,
    layer: LayerCache,
    rope: jax.Array,
    length: jax.Array,
    key_length: int,
) -> tuple[jax.Array, LayerCache]:
    """The body of `Decoder.hidden` with a layer's leaves passed in: x `[B, D]`."""
    eps = SMOLLM2_135M.rms_norm_eps
    qkv = WEIGHT_LEFT.linear(weights["qkv"], rms_norm(x, weights["input_norm"], eps))
    call = AttentionCall(SMOLLM2_135M.attention(0), AttentionWeights(), rope, key_length, spec.dtype)
    live = jnp.ones(length.shape, bool)
    layer, out = spec.attention.attend_decode(layer, qkv, call, length=length, live=live)
    x = x + WEIGHT_LEFT.linear(weights["output"], out.reshape(x.shape[0], -1))
    normed = rms_norm(x, weights["pre_feedforward_norm"], eps)
    hidden = WEIGHT_LEFT.gated(weights["gate_up"], normed)
    return x + WEIGHT_LEFT.linear(weights["down"], hidden), layer


def scanned_step(
    unroll: int,
    carry_cache: bool,
    spec: ModelSpec,
    key_length: int,
    weights: Stacked,
    rope: jax.Array,
    cache: LayerCache,
    rows: Rows,
    scheduled: jax.Array,
    tables: Tables,
) -> tuple[LayerCache, Rows, jax.Array, jax.Array]:
    """A decode step over `cache [L, B, KV, S, Dh]`, scanned slice by slice or carried whole."""
    x = weights["embed"][rows.token].astype(jnp.float32)
    angles = rope[0, rows.length]

    def slices(x: jax.Array, inputs: tuple[dict[str, jax.Array], LayerCache]) -> tuple[jax.Array, LayerCache]:
        leaves, layer = inputs
        return one_layer(leaves, x, layer, angles, rows.length, key_length)

    def carried(
        state: tuple[jax.Array, LayerCache], inputs: tuple[jax.Array, dict[str, jax.Array]]
    ) -> tuple[tuple[jax.Array, LayerCache], None]:
        (x, whole), (index, leaves) = state, inputs
        layer = LayerCache(*(lax.dynamic_index_in_dim(each, index, keepdims=False) for each in whole))
        x, layer = one_layer(leaves, x, layer, angles, rows.length, key_length)
        parts = zip(whole, layer, strict=True)
        return (x, LayerCache(*(lax.dynamic_update_index_in_dim(a, b, index, 0) for a, b in parts))), None

    if carry_cache:
        index = jnp.arange(SMOLLM2_135M.num_hidden_layers, dtype=jnp.int32)
        (x, cache), _ = lax.scan(carried, (x, cache), (index, weights["layers"]), unroll=unroll)
    else:
        x, cache = lax.scan(slices, x, (weights["layers"], cache), unroll=unroll)
    hidden = rms_norm(x, weights["final_norm"], SMOLLM2_135M.rms_norm_eps)
    sampled = greedy(feature_major(weights["embed"], hidden), rows.sampling)
    return cache, rows, sampled.packed(), sampled.top


FORMS = {
    "unrolled (the code)": None,
    "scan, cache sliced with the weights": functools.partial(scanned_step, 1, False),
    "scan, cache carried": functools.partial(scanned_step, 1, True),
    "scan of 6 x 5 layers, cache sliced": functools.partial(scanned_step, 5, False),
}


# %% Milliseconds, scratch memory, seconds to compile
weights = random_weights(spec)
stacked = stack(weights)
shape = {"length": LENGTH, "key_length": KEY_LENGTH, "positions": POSITIONS}
for rows in (8, 32):
    steps = {}
    for name, form in FORMS.items():
        if form is None:
            steps[name] = DecodeStep(spec, weights, rows=rows, function=decode_step, **shape)
            continue
        layers = make_cache(spec, rows, POSITIONS)
        cache = LayerCache(*(jnp.stack(parts) for parts in zip(*layers, strict=True)))
        steps[name] = DecodeStep(spec, stacked, rows=rows, cache=cache, function=form, **shape)
    times = interleave(steps, rounds)
    reference = np.asarray(steps["unrolled (the code)"]())
    table = [
        (
            name,
            times[name].milliseconds(),
            f"{step.report.temp_bytes / 1e6:.1f}",
            f"{step.report.alias_bytes / 1e6:.0f} of {step.cache_bytes / 1e6:.0f}",
            f"{step.report.lower_seconds:.1f} + {step.report.compile_seconds:.1f}",
            "yes" if np.array_equal(reference, np.asarray(step())) else "no",
        )
        for name, step in steps.items()
    ]
    del steps
    print(f"\nB = {rows}, {KEY_LENGTH} keys attended to, cache of {POSITIONS} positions\n")
    print(markdown_table(("layers", "ms", "temp MB", "alias MB", "lower + compile s", "same bits"), table))
