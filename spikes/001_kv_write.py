# Frozen: runs at commit 590d0eb.
"""Which form of the KV write is in place and cheap in a decode step, and what does harmless stale NaN cost?

Every form is the whole decode step of graphs.decode with one function replaced while it is traced.

    python -m spikes.001_kv_write
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from unittest import mock

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
from xla_engine.graphs.attention import xla as attention_xla
from xla_engine.graphs.attention.backend import KEY_SPAN
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=11)
arguments.add_argument("--layers", type=int, default=30)
rounds, layers = vars(arguments.parse_known_args()[0]).values()

POSITIONS, KEY_LENGTH, LENGTH = 512, 256, 176  # cache, keys attended to, keys of every row
spec = ModelSpec(dataclasses.replace(SMOLLM2_135M, num_hidden_layers=layers), jnp.dtype(jnp.bfloat16))
weights = random_weights(spec)
print(describe_machine())

# %% Forms of the write: (cache [J, B, KV, block, Dh], new [B, KV, Dh], slot [B], position [B], S = drop) -> cache
Write = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def scatter(cache: jax.Array, new: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """A scatter that may meet the same index twice."""
    return cache.at[position // KEY_SPAN, slot, :, position % KEY_SPAN].set(
        new.astype(cache.dtype), mode="drop"
    )


def _write_row(row: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """One row `[J, KV, block, Dh]`. dynamic_update_slice clamps: a dropped write must put back what was there."""
    blocks, kv_heads, _, head_dim = row.shape
    at = (position // KEY_SPAN, 0, position % KEY_SPAN, 0)
    old = lax.dynamic_slice(row, at, (1, kv_heads, 1, head_dim))
    kept = jnp.where(position < blocks * KEY_SPAN, new.astype(row.dtype)[None, :, None], old)
    return lax.dynamic_update_slice(row, kept, at)


def vmap_update(cache: jax.Array, new: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """vmap of dynamic_update_slice over rows."""
    return jax.vmap(_write_row, in_axes=(1, 0, 0), out_axes=1)(cache, new, position)


def loop_update(cache: jax.Array, new: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """One dynamic_update_slice per row."""
    blocks, rows, kv_heads, _, head_dim = cache.shape
    for row in range(rows):
        at = (position[row] // KEY_SPAN, row, 0, position[row] % KEY_SPAN, 0)
        old = lax.dynamic_slice(cache, at, (1, 1, kv_heads, 1, head_dim))
        kept = jnp.where(
            position[row] < blocks * KEY_SPAN, new[row][None, None, :, None].astype(cache.dtype), old
        )
        cache = lax.dynamic_update_slice(cache, kept, at)
    return cache


def one_hot(cache: jax.Array, new: jax.Array, slot: jax.Array, position: jax.Array) -> jax.Array:
    """A select over the whole cache."""
    here = jnp.arange(cache.shape[0] * KEY_SPAN) == position[:, None]  # [B, S]
    here = here.reshape(len(position), -1, KEY_SPAN).swapaxes(0, 1)  # [J, B, block]
    return jnp.where(here[:, :, None, :, None], new[:, :, None].astype(cache.dtype), cache)


FORMS: dict[str, Write] = {
    "scatter, unique_indices, drop (the code)": attention_xla._scatter,
    "scatter, indices may repeat": scatter,
    "vmap of dynamic_update_slice": vmap_update,
    "loop of dynamic_update_slice": loop_update,
    "one-hot select": one_hot,
}
WITH_FLOAT32 = ("scatter, unique_indices, drop (the code)", "loop of dynamic_update_slice", "one-hot select")


def whole_buffer_work(text: str, shape: tuple[int, ...]) -> int:
    """Instructions of optimised HLO that make a whole cache buffer: copies, conversions and selects."""
    size = ",".join(map(str, shape))
    return len(re.findall(rf"= \w+\[{size}\]\S* (?:copy|convert|select)\(", text))


# %% Milliseconds, memory and whole-buffer work of each form
def build(rows: int, form: Write, dtype: jnp.dtype, positions: int = POSITIONS) -> DecodeStep:
    with mock.patch.object(attention_xla, "_scatter", form):
        return DecodeStep(
            ModelSpec(spec.config, spec.dtype, attention_xla.XlaAttention(cache_dtype=dtype)),
            weights,
            rows=rows,
            length=LENGTH,
            key_length=KEY_LENGTH,
            positions=positions,
        )


for rows in (8, 32):
    table: list[tuple[object, ...]] = []
    for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        chosen = FORMS if dtype == jnp.bfloat16 else {name: FORMS[name] for name in WITH_FLOAT32}
        steps = {name: build(rows, form, dtype) for name, form in chosen.items()}
        times = interleave(steps, rounds)
        reference = np.asarray(next(iter(steps.values()))())
        for name, step in steps.items():
            buffer = step.cache[0].keys
            table.append(
                (
                    name,
                    dtype.name,
                    times[name].milliseconds(),
                    f"{step.report.compile_seconds:.1f}",
                    f"{step.report.temp_bytes / 1e6:.1f}",
                    f"{step.report.alias_bytes / 1e6:.1f} of {step.cache_bytes / 1e6:.1f}",
                    whole_buffer_work(step.text, buffer.shape),
                    "yes" if np.array_equal(reference, np.asarray(step())) else "no",
                )
            )
        del steps
    header = ("form", "cache", "ms", "compile s", "temp MB", "alias MB", "whole-buffer ops", "same samples")
    print(f"\nB = {rows}, cache of {POSITIONS} positions, {KEY_LENGTH} keys attended to\n")
    print(markdown_table(header, table))

# %% Stale NaN in V: a select over V in every step, or V of a slot zeroed once when it is handed over
plain_attention = attention_xla._attention


def guarded_attention(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, *, keys_left: bool
) -> jax.Array:
    """`_attention` that masks V as well: visible `[B, 1, S]`."""
    seen = visible.reshape(len(visible), -1, KEY_SPAN).swapaxes(0, 1)  # [J, B, block]
    guarded = jnp.where(seen[:, :, None, :, None], values, 0)
    return plain_attention(q, keys, guarded, visible, keys_left=keys_left)


def clear_all(cache: KVCache, slot: jax.Array, fresh: jax.Array) -> KVCache:
    return [spec.attention.clear_values(layer, slot, fresh) for layer in cache]


class Clear:
    """`clear_values` over all layers as a program of its own, on a donated cache."""

    def __init__(self, rows: int, lanes: int, fresh: int) -> None:
        self.cache = make_cache(spec, rows, POSITIONS)
        self.slot = jnp.arange(lanes, dtype=jnp.int32)
        self.fresh = jnp.arange(lanes) < fresh
        self.inventory = Inventory()
        work = (self.cache, self.slot, self.fresh)
        self.inventory.compile([Program(name="clear", function=clear_all, arguments=work, donate=(0,))])

    def __call__(self) -> object:
        self.cache = self.inventory("clear", self.cache, self.slot, self.fresh)
        return jax.block_until_ready(self.cache)


for rows in (8, 32):
    bfloat16 = jnp.dtype(jnp.bfloat16)
    plain = build(rows, attention_xla._scatter, bfloat16)
    short = build(rows, attention_xla._scatter, bfloat16, KEY_LENGTH)
    with mock.patch.object(attention_xla, "_attention", guarded_attention):
        guarded = build(rows, attention_xla._scatter, bfloat16)
        short_guarded = build(rows, attention_xla._scatter, bfloat16, KEY_LENGTH)
    forms: dict[str, Callable[[], object]] = {
        f"decode step, cache of {KEY_LENGTH}, no select over V (the code)": short,
        f"decode step, cache of {KEY_LENGTH}, select over V": short_guarded,
        f"decode step, cache of {POSITIONS}, no select over V (the code)": plain,
        f"decode step, cache of {POSITIONS}, select over V": guarded,
        "clear_values alone, 8 lanes, 8 fresh": Clear(rows, 8, 8),
        "clear_values alone, 8 lanes, none fresh": Clear(rows, 8, 0),
        "clear_values alone, 2 lanes, 1 fresh": Clear(rows, 2, 1),
    }
    times = interleave(forms, rounds)
    print(f"\nstale NaN in V, B = {rows}\n")
    print(markdown_table(("form", "ms"), [(name, each.milliseconds(2)) for name, each in times.items()]))
    # Does it matter? NaN behind the keys of every row:
    for name, step in (("no select", plain), ("select", guarded)):
        step.cache = [
            layer._replace(values=layer.values.at[0, :, :, LENGTH + 1 :].set(jnp.nan).at[1:].set(jnp.nan))
            for layer in step.cache
        ]
        logprob = np.asarray(step())[1].view(np.float32)
        print(f"NaN behind the keys, {name}: {np.isnan(logprob).sum()} of {rows} log-probabilities are NaN")

# %% A cache longer than the bucket of keys attended to: is its front read where it lies?
for rows in (8, 32):
    steps = {
        f"cache of {positions}": build(rows, attention_xla._scatter, jnp.dtype(jnp.bfloat16), positions)
        for positions in (KEY_LENGTH, POSITIONS, 4 * POSITIONS)
    }
    times = interleave(steps, rounds)
    table = [
        (
            name,
            times[name].milliseconds(),
            f"{step.report.temp_bytes / 1e6:.1f}",
            len(re.findall(r"^ *%slice\S* = bf16\[\S* fusion\(", step.text, re.MULTILINE)),
        )
        for name, step in steps.items()
    ]
    del steps
    print(f"\n{KEY_LENGTH} keys attended to, B = {rows}\n")
    print(markdown_table(("positions", "ms", "temp MB", "copies of a front"), table))
