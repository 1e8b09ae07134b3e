# Measured at commit d81a915; rewritten since, runs at HEAD.
"""What does admitting a request cost if the host keeps a mirror of the KV cache?

    python -m spikes.005_host_mirror_admission [--slots 8 16 32] [--rounds 9]

The first published version of this kind of scheduler copied the whole cache to the host, wrote the new request's slot there and
copied everything back. Here that is timed beside a write of one slot on the device, and beside the engine's own admission: the
prefill of the prompt, in which each layer writes its keys and values into the slot.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.config import EngineConfig
from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.kv_cache.cache import make_cache, tree_bytes
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.runner.row_settings import RowSettings
from xla_engine.runner.runner import Runner
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Chunk, Plan, Slot
from xla_engine.tools.bench.models import SMOLLM2_135M

POSITIONS, PROMPT = 512, 128
SPEC = ModelSpec(dataclasses.replace(SMOLLM2_135M, max_position_embeddings=POSITIONS), jnp.dtype(jnp.bfloat16))


class Cache:
    """A cache on the device; each admission takes the next slot and replaces the arrays."""

    def __init__(self, slots: int) -> None:
        self.arrays: Any = jax.block_until_ready(make_cache(SPEC, slots, POSITIONS))
        self.slots: Iterator[int] = (number % slots for number in count())


def prompt_kv() -> list[LayerCache]:
    """Keys and values of a prompt, as a prefill left them: per layer `[KV, T, Dh]` each."""
    shape = (SPEC.config.num_key_value_heads, PROMPT, SPEC.config.head_dim)
    return [LayerCache(jnp.ones(shape, SPEC.dtype), jnp.ones(shape, SPEC.dtype))] * SPEC.config.num_hidden_layers


def by_mirror(cache: Cache, new: list[LayerCache]) -> None:
    """The whole cache down, one slot written, the whole cache up."""
    slot = next(cache.slots)
    mirror = [LayerCache(*map(np.array, layer)) for layer in jax.device_get(cache.arrays)]  # read-only until copied
    for layer, fresh in zip(mirror, new, strict=True):
        for array, part in zip(layer, fresh, strict=True):
            array[0, slot, :, :PROMPT] = part
    cache.arrays = jax.block_until_ready([LayerCache(*map(jax.device_put, layer)) for layer in mirror])


def _write(cache: Any, new: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda array, part: array.at[0, slot, :, :PROMPT].set(part), cache, new)


def by_write(write: Any, cache: Cache, new: list[LayerCache]) -> None:
    """One donated program writes the slot in place."""
    cache.arrays = jax.block_until_ready(write(cache.arrays, new, np.int32(next(cache.slots))))


def by_prefill(slots: int) -> Callable[[], object]:
    """The engine's admission: chunks of the prompt are computed and written into the slot, and a first token is sampled."""
    options = EngineConfig(max_num_seqs=slots, max_model_len=POSITIONS, compile_cache=True)
    runner = Runner(SPEC.config, random_weights(SPEC.config, dtype="bfloat16"), "bfloat16", options)
    size = runner.config.chunk_size
    settings = RowSettings(max_tokens=2, stop_token_ids=(), params=SamplingParams(temperature=0, max_tokens=2), seed=0)
    numbers = count()

    def admit() -> None:
        number = next(numbers)
        slot = Slot(index=number % slots, epoch=number // slots)
        starts = range(0, PROMPT, size)
        chunks = [Chunk(slot, "prompt", start, tuple(range(size)), start + size == PROMPT) for start in starts]
        runner.wait(runner.start(Plan(step=number, chunks=tuple(chunks)), {"prompt": settings}))

    return admit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print(describe_machine())
    new = prompt_kv()
    on_host = [LayerCache(*map(np.asarray, layer)) for layer in new]
    table = []
    for slots in given.slots:
        mirrored, written = Cache(slots), Cache(slots)
        write = jax.jit(_write, donate_argnums=0)
        ways: dict[str, Callable[[], object]] = {
            "mirror": partial(by_mirror, mirrored, on_host),
            "write": partial(by_write, write, written, new),
            "prefill": by_prefill(slots),
        }
        times = interleave(ways, given.rounds, warm_up=2)
        table.append(
            (
                str(slots),
                f"{2 * tree_bytes(mirrored.arrays) / 1e6:.0f}",
                f"{tree_bytes(new) / 1e6:.1f}",
                times["mirror"].milliseconds(),
                times["write"].milliseconds(2),
                f"{times['mirror'].median / times['write'].median:.0f}x",
                times["prefill"].milliseconds(),
            )
        )
    print(f"\nms to admit a prompt of {PROMPT} tokens, {POSITIONS} positions a slot, median (least-most)\n")
    names = ("slots", "mirror moves, MB", "write moves, MB", "host mirror", "device write", "ratio", "whole prefill")
    print(markdown_table(names, table))


if __name__ == "__main__":
    main()
