"""The graphs over pages: the bits of contiguous slots, in any order of pages, and prefixes shared where they lie."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from graphs.attention import Attention
from graphs.attention_xla import XlaAttention
from graphs.cache import make_cache
from graphs.config import FULL, SLIDING
from graphs.decode import decode_step
from graphs.model import ModelSpec
from graphs.prefill import prefill_chunk
from graphs.rope import rope_tables
from graphs.rows import Pool, Tables, make_rows, make_tables, unpack_samples
from scheduler import Chunk, Slot
from tests.conftest import TINY, tiny_checkpoint
from xla_engine.backends import choose_attention
from xla_engine.prefill_call import make_lanes
from xla_engine.row_settings import RowSettings
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

MODEL = replace(TINY, layer_types=(SLIDING, FULL), sliding_window=50, qk_norm="head")
ROWS, LENGTH, CHUNK, BLOCK = 8, 256, 64, 32
BACKENDS = {backend.name: backend for backend in (XlaAttention(), choose_attention("auto"))}
SETTINGS = RowSettings(
    max_tokens=99, stop_token_ids=(), params=SamplingParams(temperature=0.8, logprobs=0), seed=11
)


class Device:
    """Cache, rows and both graphs of one layout; `num_blocks` None: contiguous slots."""

    def __init__(self, backend: Attention, num_blocks: int | None = None) -> None:
        spec = ModelSpec(MODEL, jnp.dtype(jnp.bfloat16), backend)
        self.weights = spec.flatten(tiny_checkpoint(model=MODEL).weights)
        self.rope = rope_tables(MODEL, LENGTH)
        self.cache = make_cache(spec, ROWS, BLOCK if num_blocks else LENGTH, num_blocks=num_blocks)
        if num_blocks:  # stale
            self.cache = [
                jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), each) for each in self.cache
            ]
        pool = None if num_blocks is None else Pool(num_blocks, BLOCK, LENGTH // BLOCK)
        self.rows = make_rows(ROWS, MAX_STOP_TOKEN_IDS, LENGTH, pool)
        self.tables: Tables = make_tables(ROWS, MODEL.vocab_size, paged=num_blocks is not None)
        self._prefill = jax.jit(functools.partial(prefill_chunk, spec, LENGTH, ROWS), donate_argnums=(2, 3))
        self._decode = jax.jit(functools.partial(decode_step, spec, LENGTH), donate_argnums=(2, 3))

    def prefill(self, slot: int, prompt: list[int], first: int = 0) -> list[Any]:
        """Chunks of a prompt from `first` on, two lanes a call; its first sample."""
        chunks = [
            Chunk(
                slot=Slot(index=slot, epoch=0),
                request_id=str(slot),
                start=start,
                tokens=tuple(prompt[start : start + CHUNK]),
                is_last=start + CHUNK >= len(prompt),
            )
            for start in range(first, len(prompt), CHUNK)
        ]
        lanes = make_lanes(chunks, {len(chunks) - 1: SETTINGS}, 2, CHUNK)
        call = self._prefill(self.weights, self.rope, self.cache, self.rows, lanes, self.tables)
        self.cache, self.rows, packed, *_ = call
        return [bits[len(chunks) - 1].tobytes() for bits in unpack_samples(np.asarray(packed))]

    def lend(self, slot: int, pages: list[int], start: int = 0) -> None:
        """Put pages into a slot's table from its `start`-th entry on, as the next calls do."""
        changes = np.full((3, ROWS), ROWS, np.int32)
        changes[:, : len(pages)] = [[slot] * len(pages), range(start, start + len(pages)), pages]
        self.tables = replace(self.tables, block_changes=changes)

    def decode(self, slots: list[int], steps: int) -> list[bytes]:
        """Samples of each step."""
        scheduled, found = np.isin(np.arange(ROWS), slots), []
        for _ in range(steps):
            step = self._decode(self.weights, self.rope, self.cache, self.rows, scheduled, self.tables)
            self.cache, self.rows, packed, _ = step
            found.append(np.asarray(packed)[:, slots].tobytes())
        return found


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] * (name == "xla" and len(BACKENDS) > 1))
        for name, each in BACKENDS.items()
    ],
)
def test_pages_give_the_bits_of_slots_and_share_a_prefix(backend: Attention) -> None:
    """Two prompts that begin alike: in pages the second one reads the first one's, and prefills only the rest."""
    draw = np.random.default_rng(3)
    first = draw.integers(1, MODEL.vocab_size, 100).tolist()
    second = [*first[:CHUNK], *draw.integers(1, MODEL.vocab_size, 20).tolist()]
    pages = draw.permutation(24).tolist()
    slots, paged = Device(backend), Device(backend, 24)
    paged.lend(2, pages[:4])  # no more than the prompt takes
    assert paged.prefill(2, first) == slots.prefill(2, first)
    paged.lend(5, [*pages[:2], pages[4]])
    assert paged.prefill(5, second, CHUNK) == slots.prefill(5, second)
    for slot, index, page, steps in ((5, 3, 5, 12), (2, 4, 6, 16), (5, 4, 7, 12)):  # before the last one is full
        paged.lend(slot, [pages[page]], index)
        assert paged.decode([2, 5], steps) == slots.decode([2, 5], steps)
