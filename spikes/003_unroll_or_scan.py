# Measured at commit d81a915; rewritten since, runs at HEAD.
"""Should the decode step unroll its layers, or scan over stacked weights and caches?

    python -m spikes.003_unroll_or_scan [--rows 8 32] [--rounds 15]

The forms are made of the engine's own layers in pure JAX (`graphs.model.decoder.Layer`, attention backend "xla"); only the loop
over the layers differs. A step embeds one token for each row, runs the layers and takes the likeliest token.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.kv_cache.cache import make_cache, tree_bytes
from xla_engine.graphs.linear.products import WEIGHT_LEFT
from xla_engine.graphs.model.decoder import Decoder
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.model.call import Call
from xla_engine.graphs.ops.reductions import argmax
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.tools.bench.models import SMOLLM2_135M

LENGTH, KEY_LENGTH, POSITIONS = 176, 256, 512  # keys of each row, keys that attention reads, positions of a slot
SPEC = ModelSpec(dataclasses.replace(SMOLLM2_135M, max_position_embeddings=POSITIONS), jnp.dtype(jnp.bfloat16))
LAYERS = SPEC.config.num_hidden_layers


def random_leaves() -> list[jax.Array]:
    """Norms of 1, matrices normal with standard deviation 0.04: activations of order one."""
    draw = np.random.default_rng(0)

    def leaf(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, dtype)
        return (draw.standard_normal(shape, np.float32) * np.float32(0.04)).astype(dtype)

    return [jax.device_put(leaf(each.shape, each.dtype)) for each in SPEC.leaves.values()]


def layer_call(layer: nnx.Module, x: jax.Array, cache: LayerCache, rope: jax.Array) -> tuple[jax.Array, LayerCache]:
    """One layer of a decode step in which every row has `LENGTH` keys: x `[B, D]`."""
    written = []

    def attend(index: int, projected: jax.Array, own: Any) -> jax.Array:
        assert isinstance(own, AttentionWeights)
        call = AttentionCall(SPEC.config.attention(0), own, rope, KEY_LENGTH, SPEC.dtype)
        length = jnp.full(x.shape[0], LENGTH, jnp.int32)
        after, out = SPEC.attention.attend_decode(cache, projected, call, length=length, live=length > 0)
        written.append(after)
        return out

    x = layer(x, Call(attend, WEIGHT_LEFT.for_rows(jnp.ones(x.shape[0], bool)).with_adapters(None)))
    return x, written[0]


def ends(decoder: Decoder, x: jax.Array) -> jax.Array:
    """The likeliest token of each row."""
    logits = decoder.logits(x, WEIGHT_LEFT)
    assert isinstance(logits, jax.Array)
    return argmax(logits)


def unrolled(weights: list[jax.Array], rope: jax.Array, tokens: jax.Array, cache: Any) -> Any:
    decoder = SPEC.merge(weights)
    x, after = decoder.embedded(tokens, WEIGHT_LEFT), []
    for layer, own in zip(decoder.layers, cache, strict=True):
        x, own = layer_call(layer, x, own, rope)
        after.append(own)
    return after, ends(decoder, x)


def scanned(unroll: int, carried: bool, weights: list[jax.Array], rope: jax.Array, tokens: jax.Array, cache: Any) -> Any:
    """weights: of the first layer those of all layers, stacked. cache: `[L, B, KV, S, Dh]` each.

    carried: the scan carries the whole cache and updates a layer of it; otherwise it is sliced like the weights.
    """
    decoder = SPEC.merge([leaf[0] if stacked else leaf for leaf, stacked in zip(weights, STACKED, strict=True)])
    graph, _ = nnx.split(decoder.layers[0])
    paths = [path[2:] for path in SPEC.leaves.paths if path[:2] == ("layers", 0)]
    stacks = [leaf for leaf, stacked in zip(weights, STACKED, strict=True) if stacked]

    def layer_of(leaves: list[jax.Array]) -> nnx.Module:
        return nnx.merge(graph, nnx.from_flat_state(list(zip(paths, map(nnx.Param, leaves), strict=True))))

    def sliced(x: jax.Array, inputs: Any) -> Any:
        leaves, own = inputs
        return layer_call(layer_of(leaves), x, own, rope)

    def whole(state: Any, inputs: Any) -> Any:
        (x, kept), (index, leaves) = state, inputs
        own = LayerCache(*(lax.dynamic_index_in_dim(each, index, keepdims=False) for each in kept))
        x, own = layer_call(layer_of(leaves), x, own, rope)
        pairs = zip(kept, own, strict=True)
        return (x, LayerCache(*(lax.dynamic_update_index_in_dim(a, b, index, 0) for a, b in pairs))), None

    x = decoder.embedded(tokens, WEIGHT_LEFT)
    if carried:
        (x, cache), _ = lax.scan(whole, (x, cache), (jnp.arange(LAYERS), stacks), unroll=unroll)
    else:
        x, cache = lax.scan(sliced, x, (stacks, cache), unroll=unroll)
    return cache, ends(decoder, x)


STACKED = [path[:2] == ("layers", 0) for path in SPEC.leaves.paths]  # leaves that stand for those of all layers


def stacked_leaves(leaves: list[jax.Array]) -> list[jax.Array]:
    by_path = dict(zip(SPEC.leaves.paths, leaves, strict=True))

    def leaf(path: Any, own: jax.Array, stacked: bool) -> jax.Array:
        if stacked:
            return jnp.stack([by_path["layers", layer, *path[2:]] for layer in range(LAYERS)])
        return own if path[0] != "layers" else jnp.zeros(own.shape, own.dtype)  # not read

    return [leaf(*each) for each in zip(SPEC.leaves.paths, leaves, STACKED, strict=True)]


class Step:
    """A compiled step with a cache of its own; a call runs it and waits for its tokens."""

    def __init__(self, function: Any, weights: list[jax.Array], cache: Any, tokens: jax.Array) -> None:
        self.weights, self.cache, self.tokens = weights, cache, tokens
        self.rope = jax.device_put(rope_tables(SPEC.config, POSITIONS))[0][jnp.full(len(tokens), LENGTH)]
        self.program = jax.jit(function, donate_argnums=3).lower(weights, self.rope, tokens, cache).compile()

    def __call__(self) -> np.ndarray:
        self.cache, found = self.program(self.weights, self.rope, self.tokens, self.cache)
        return np.asarray(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(describe_machine())
    leaves = random_leaves()
    stacked = stacked_leaves(leaves)
    forms = {
        "unrolled (the engine)": unrolled,
        "scan, cache sliced with the weights": lambda *each: scanned(1, False, *each),
        "scan, cache carried": lambda *each: scanned(1, True, *each),
        "scan of 6 x 5 layers, cache sliced": lambda *each: scanned(5, False, *each),
    }
    for rows in given.rows:
        tokens = jnp.asarray(np.random.default_rng(1).integers(0, SPEC.config.vocab_size, rows), jnp.int32)
        steps = {}
        for name, function in forms.items():
            cache: Any = make_cache(SPEC, rows, POSITIONS)
            if function is not unrolled:
                cache = LayerCache(*(jnp.stack(parts) for parts in zip(*cache, strict=True)))
            steps[name] = Step(function, leaves if function is unrolled else stacked, cache, tokens)
        expected = steps["unrolled (the engine)"]()
        times = interleave(steps, given.rounds)
        table = []
        for name, step in steps.items():
            memory = step.program.memory_analysis()
            table.append(
                (
                    name,
                    times[name].milliseconds(),
                    f"{memory.temp_size_in_bytes / 1e6:.1f}",
                    f"{memory.alias_size_in_bytes / 1e6:.0f} of {tree_bytes(step.cache) / 1e6:.0f}",
                    "yes" if np.array_equal(expected, step()) else "no",
                )
            )
        print(f"\nB = {rows}, {KEY_LENGTH} keys attended to, {POSITIONS} positions a slot\n")
        print(markdown_table(("layers", "ms", "temp MB", "alias MB", "same tokens"), table))


if __name__ == "__main__":
    main()
