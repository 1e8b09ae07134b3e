# Frozen: runs at commit 590d0eb.
"""What does admitting a request cost if the host keeps a mirror of the KV cache?

The first published version of this kind of scheduler copied the whole cache to the host, wrote the new request's
slot there and copied everything back. Here the same is measured against a write of one slot on the device, alone
and as part of the prefill call that computes it.

    python -m spikes.005_host_mirror_admission
"""

# %%
from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import Times, describe_machine, interleave, markdown_table
from xla_engine.bench.models import SMOLLM2_135M
from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows, make_sampling_rows, make_tables
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS

POSITIONS = 512  # per slot
PROMPT = 128
CHUNK = 32
LANES = PROMPT // CHUNK
SPEC = ModelSpec(SMOLLM2_135M, jnp.dtype(jnp.bfloat16))


# %%
class Cache:
    """The device's cache, replaced by every admission; the next admission takes the next slot."""

    def __init__(self, batch: int) -> None:
        self.device: KVCache = jax.block_until_ready(make_cache(SPEC, batch, POSITIONS))
        self.batch = batch
        self._next = 0

    def next_slot(self) -> int:
        self._next = (self._next + 1) % self.batch
        return self._next

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.device))


def prompt_kv() -> KVCache:
    """K and V of one prompt, per layer `[KV, T, Dh]`, as a prefill left them."""
    shape = (SMOLLM2_135M.num_key_value_heads, PROMPT, SMOLLM2_135M.head_dim)
    layer = LayerCache(jnp.ones(shape, jnp.bfloat16), jnp.ones(shape, jnp.bfloat16))
    return [layer] * SMOLLM2_135M.num_hidden_layers


def admit_by_mirror(cache: Cache, new: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Whole cache down, one slot written, whole cache up.

    What comes down is read-only, so it is copied before the write; the copy is the mirror's memory on a CPU, where
    device memory is host memory.
    """
    slot = cache.next_slot()
    down = [(np.array(keys), np.array(values)) for keys, values in jax.device_get(cache.device)]
    for mirror, fresh in zip(down, new, strict=True):
        for buffer, part in zip(mirror, fresh, strict=True):
            buffer[0, slot, :, :PROMPT] = part
    cache.device = jax.block_until_ready([LayerCache(*map(jax.device_put, layer)) for layer in down])


def _write_slot(cache: KVCache, new: KVCache, slot: jax.Array) -> KVCache:
    return jax.tree.map(lambda buffer, part: buffer.at[0, slot, :, :PROMPT].set(part), cache, new)


def admit_on_device(write: Any, cache: Cache, new: KVCache) -> None:
    """One donated program writes the slot in place."""
    cache.device = jax.block_until_ready(write(cache.device, new, np.int32(cache.next_slot())))


class Prefill:
    """The engine's prefill call of one whole prompt: the model's work, the slot's write and the first token."""

    def __init__(self, batch: int) -> None:
        self._weights = jax.device_put(SPEC.flatten(random_weights(SMOLLM2_135M, dtype="bfloat16")))
        self._rope = jax.device_put(rope_tables(SMOLLM2_135M, POSITIONS))
        self._rows = make_rows(batch, MAX_STOP_TOKEN_IDS, POSITIONS)
        self._tables = jax.device_put(make_tables(batch, SMOLLM2_135M.vocab_size))
        step = functools.partial(prefill_chunk, SPEC, 256, 8)
        self._call = jax.jit(step, donate_argnums=(2,))

    def admit(self, cache: Cache) -> None:
        lanes = self._lanes(cache.next_slot())
        cache.device, _, token, *_ = self._call(
            self._weights, self._rope, cache.device, self._rows, lanes, self._tables
        )
        jax.block_until_ready((cache.device, token))

    def _lanes(self, slot: int) -> Lanes:
        return Lanes(
            tokens=np.arange(PROMPT, dtype=np.int32).reshape(LANES, CHUNK),
            slot=np.full(LANES, slot, np.int32),
            start=np.arange(0, PROMPT, CHUNK, dtype=np.int32),
            count=np.full(LANES, CHUNK, np.int32),
            is_last=np.arange(LANES) == LANES - 1,
            prompt_length=np.full(LANES, PROMPT, np.int32),
            max_tokens=np.full(LANES, 128, np.int32),
            min_tokens=np.zeros(LANES, np.int32),
            stop_ids=np.full((LANES, MAX_STOP_TOKEN_IDS), -1, np.int32),
            sampling=make_sampling_rows(LANES),
        )


# %%
def measure(batch: int, rounds: int) -> tuple[int, dict[str, Times]]:
    """Bytes of the cache and times of each way. Each way has its own cache: what `device_put` took from numpy
    may be copied when donated, so a device write that follows a mirror could pay for that."""
    mirrored, written, prefilled = Cache(batch), Cache(batch), Cache(batch)
    new = prompt_kv()
    on_host = [(np.asarray(keys), np.asarray(values)) for keys, values in new]
    write = jax.jit(_write_slot, donate_argnums=0)
    prefill = Prefill(batch)
    ways: dict[str, Callable[[], None]] = {
        "mirror": functools.partial(admit_by_mirror, mirrored, on_host),
        "device": functools.partial(admit_on_device, write, written, new),
        "prefill": functools.partial(prefill.admit, prefilled),
    }
    return mirrored.nbytes, interleave(ways, rounds, warm_up=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32])
    arguments = parser.parse_args()
    slot_bytes = sum(part.nbytes for part in jax.tree.leaves(prompt_kv()))
    table = []
    for batch in arguments.batches:
        cache_bytes, times = measure(batch, arguments.rounds)
        table.append(
            [
                str(batch),
                f"{2 * cache_bytes / 1e6:.0f}",
                f"{slot_bytes / 1e6:.1f}",
                times["mirror"].milliseconds(),
                times["device"].milliseconds(2),
                f"{times['mirror'].median / times['device'].median:.0f}x",
                times["prefill"].milliseconds(),
            ]
        )
    print(describe_machine())
    print(
        f"\nms per admission of a prompt of {PROMPT} tokens, {POSITIONS} positions per slot, median (least-most):\n"
    )
    header = [
        "B_max",
        "mirror moves, MB",
        "slot write moves, MB",
        "host mirror",
        "device slot write",
        "ratio",
    ]
    print(markdown_table([*header, "whole prefill call"], table))


if __name__ == "__main__":
    main()
