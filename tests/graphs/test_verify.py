"""A verify step emits the tokens of decode steps, bit for bit, for any drafts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import TINY, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import NOT_KEPT, Pool, Rows, make_rows, make_tables
from xla_engine.graphs.row_state.sampling_fields import make_sampling_rows
from xla_engine.graphs.sampling.logits import unpack_samples
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import Lanes, PrefillForm, prefill_chunk
from xla_engine.graphs.steps.step import StepForm, StepState
from xla_engine.graphs.steps.verify import Drafts, looked_up, verify_step
from xla_engine.runner.backends import make_spec

MODEL = replace(TINY, num_hidden_layers=1)
SLOTS, LANES, WIDTH, POSITIONS, TOKENS, HELD = 8, 8, 4, 256, 24, 8
PROMPT = 16
Stream = list[tuple[int, int]]  # token and bits of its log-probability


class Device:
    """The three programs of a tiny model, and the state after eight prompts."""

    def __init__(self, block_size: int | None) -> None:
        config = EngineConfig()
        self.spec = make_spec(config, MODEL, jnp.dtype("bfloat16"))
        checkpoint = tiny_checkpoint(model=MODEL)
        leaves, stored = self.spec.leaves, {}
        for name in leaves.sources:
            stored.update(leaves.stored(name, checkpoint.weights[name]))
        weights = [jnp.asarray(stored[name]) for name in leaves]
        rope = jnp.asarray(rope_tables(MODEL, POSITIONS))
        pool = None
        if block_size is not None:
            pool = Pool(SLOTS * POSITIONS // block_size, block_size, POSITIONS // block_size)
        self.pool = pool
        form = StepForm(self.spec, POSITIONS)

        def program(step: Any, *static: Any) -> Any:
            return jax.jit(
                lambda cache, rows, work, tables: step(
                    *static, StepState(weights, rope, cache, rows, tables), work
                )
            )

        self.decode = program(decode_step, form)
        self.prefill = program(prefill_chunk, PrefillForm(form, 8))
        self.verify = program(verify_step, form, WIDTH)
        tables: Any = make_tables(SLOTS, MODEL.vocab_size, has_blocks=pool is not None, drafts=WIDTH - 1)
        self.tables = jax.tree.map(jnp.asarray, tables)

    def start(
        self, sampling: Any, stop_ids: np.ndarray, max_tokens: np.ndarray, min_tokens: np.ndarray
    ) -> Any:
        """Cache and rows after the prompts, which repeat themselves, and the first tokens."""
        rows: Rows = make_rows(SLOTS, stop_ids.shape[1], POSITIONS, self.pool)
        if self.pool is None:
            cache = make_cache(self.spec, SLOTS, POSITIONS)
        else:
            cache = make_cache(self.spec, SLOTS, self.pool.block_size, num_blocks=self.pool.num_blocks)
            own = jnp.arange(self.pool.num_blocks, dtype=jnp.int32).reshape(SLOTS, -1)
            rows = replace(rows, block_tables=own[:, ::-1])
        prompts = np.stack([np.tile(np.arange(4) + 5 * slot, PROMPT // 4) for slot in range(SLOTS)]) % 199
        lanes = Lanes(
            tokens=jnp.asarray(prompts, jnp.int32),
            slot=jnp.arange(SLOTS, dtype=jnp.int32),
            start=jnp.zeros(SLOTS, jnp.int32),
            count=jnp.full(SLOTS, PROMPT, jnp.int32),
            is_last=jnp.ones(SLOTS, bool),
            prompt_length=jnp.full(SLOTS, PROMPT, jnp.int32),
            max_tokens=jnp.asarray(max_tokens, jnp.int32),
            min_tokens=jnp.asarray(min_tokens, jnp.int32),
            stop_ids=jnp.asarray(stop_ids, jnp.int32),
            sampling=sampling,
        )
        cache, rows, packed, *_ = self.prefill(cache, rows, lanes, self.tables)
        return cache, rows, unpack_samples(np.asarray(packed))["token"]


@functools.cache
def device(block_size: int | None = None) -> Device:
    return Device(block_size)


def plainly(here: Device, cache: Any, rows: Rows) -> list[Stream]:
    """The tokens of each row, decoded one a step."""
    streams: list[Stream] = [[] for _ in range(SLOTS)]
    for _ in range(TOKENS):
        cache, rows, packed, _ = here.decode(cache, rows, jnp.ones(SLOTS, bool), here.tables)
        for slot, (token, bits) in enumerate(np.asarray(packed).T.tolist()):
            if token != -1:
                streams[slot].append((token, bits))
    return streams


def speculatively(
    here: Device, cache: Any, rows: Rows, propose: Any, draw: np.random.Generator
) -> tuple[list[Stream], int]:
    """The same with verify steps and the drafts of `propose(slot, emitted)`: (offset from the next token, tokens)."""
    streams: list[Stream] = [[] for _ in range(SLOTS)]
    for steps in range(1, 4 * TOKENS):
        order = draw.permutation(SLOTS)
        tokens = np.full((LANES, HELD), -1, np.int32)
        start, lookup = np.zeros(LANES, np.int32), np.zeros(LANES, bool)
        for lane, slot in enumerate(order):
            offset, found, lookup[lane] = propose(int(slot), len(streams[slot]))
            start[lane] = PROMPT + 1 + len(streams[slot]) + offset
            tokens[lane, : len(found)] = found
        drafts = Drafts(
            slot=jnp.asarray(np.where(draw.random(LANES) < 0.2, -1, order), jnp.int32),
            most=jnp.asarray(draw.integers(0, WIDTH, LANES), jnp.int32),
            tokens=jnp.asarray(tokens),
            start=jnp.asarray(start),
            lookup=jnp.asarray(lookup),
            gated=jnp.zeros(LANES, bool),
        )
        cache, rows, packed, _ = here.verify(cache, rows, drafts, here.tables)
        emitted = np.asarray(packed).reshape(2, LANES, WIDTH)
        for lane, slot in enumerate(np.asarray(drafts.slot).tolist()):
            row = emitted[:, lane].T.tolist()
            if slot >= 0:
                streams[slot] += [(token, bits) for token, bits in row if token not in (-1, NOT_KEPT)]
            behind = [token for token, _ in row]
            assert behind == sorted(behind, key=lambda token: (token == -1, token == NOT_KEPT))
        if not np.asarray(rows.remaining).any():
            return streams, steps
    raise AssertionError("rows never ended")


def sampling_of(draw: np.random.Generator) -> Any:
    sampling: Any = make_sampling_rows(SLOTS)
    sampling = replace(
        sampling,
        temperature=draw.choice([0, 0.7, 1.5], SLOTS).astype(np.float32),
        top_k=draw.choice([0, 5], SLOTS).astype(np.int32),
        top_p=draw.choice([1, 0.8], SLOTS).astype(np.float32),
        repetition_penalty=draw.choice([1, 1.2], SLOTS).astype(np.float32),
        frequency_penalty=draw.choice([0, 0.5], SLOTS).astype(np.float32),
        presence_penalty=draw.choice([0, 0.5], SLOTS).astype(np.float32),
        seed=draw.integers(0, 2**32, (SLOTS, 2)).astype(np.uint32),
        num_logprobs=np.zeros(SLOTS, np.int32),
    )
    return jax.tree.map(jnp.asarray, sampling)


@given(seed=st.integers(0, 10**6), block_size=st.sampled_from([None, 32]))
@settings(max_examples=12, deadline=None)
def test_verify_emits_what_decode_emits(seed: int, block_size: int | None) -> None:
    """Drafts are right, wrong or half right, and lie before or after the row's end; any sampling is possible."""
    draw, here = np.random.default_rng(seed), device(block_size)
    stop_ids = np.where(draw.random((SLOTS, 3)) < 0.5, draw.integers(0, 199, (SLOTS, 3)), -1)
    limits = draw.integers(2, TOKENS + 1, SLOTS), draw.integers(0, 6, SLOTS)
    cache, rows, first = here.start(sampling_of(draw), stop_ids, *limits)
    plain = plainly(here, cache, rows)

    def propose(slot: int, emitted: int) -> tuple[int, list[int], bool]:
        kind, back = draw.integers(5), int(draw.integers(0, 3))
        known = [int(first[slot]), *(token for token, _ in plain[slot])]
        begin = max(emitted + 1 - back, 0)
        found = known[begin : begin + HELD]
        if kind == 0:
            found = [(token + 1) % 199 for token in found]
        elif kind == 1:
            found = [token if draw.random() < 0.8 else int(draw.integers(199)) for token in found]
        elif kind == 2:
            found = []
        return begin - (emitted + 1), found, bool(draw.integers(2))

    found, _ = speculatively(here, cache, rows, propose, draw)
    assert found == plain


@pytest.mark.full
def test_right_drafts_are_all_accepted() -> None:
    """Each full step brings `WIDTH` tokens; wrong drafts bring one."""
    draw, here = np.random.default_rng(1), device()
    none = np.full((SLOTS, 1), -1)
    cache, rows, _ = here.start(sampling_of(draw), none, np.full(SLOTS, TOKENS), np.zeros(SLOTS, int))
    plain = plainly(here, cache, rows)
    every = jnp.arange(SLOTS, dtype=jnp.int32)
    for shift, brought in ((0, WIDTH), (1, 1)):
        tokens = np.array([[(token + shift) % 199 for token, _ in stream[:HELD]] for stream in plain])
        drafts = Drafts(
            slot=every,
            most=jnp.full(LANES, WIDTH - 1, jnp.int32),
            tokens=jnp.asarray(tokens, jnp.int32),
            start=jnp.full(LANES, PROMPT + 1, jnp.int32),
            lookup=jnp.zeros(LANES, bool),
            gated=jnp.zeros(LANES, bool),
        )
        _, after, packed, _ = here.verify(cache, rows, drafts, here.tables)
        emitted = np.asarray(packed)[0].reshape(LANES, WIDTH)
        assert ((emitted >= 0).sum(axis=1) == brought).all()
        assert (emitted != -1).all()
        assert (np.asarray(after.length) == PROMPT + brought).all()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2]),  # what followed the same four tokens
        ([7, 3, 4, 8, 3, 4, 5, 3, 4], [5, 3, 4]),  # the latest of two
        ([1, 2, 1, 2, 1, 2], [1, 2, 1]),  # goes round
        ([6, 6, 6], [6, 6, 6]),
        ([1, 2, 3, 4, 5, 5], [-1, -1, -1]),  # one token alike is not enough
    ],
)
def test_lookup_by_hand(tokens: list[int], expected: list[int]) -> None:
    known = jnp.asarray([tokens + [0] * 5], jnp.int32)
    found = looked_up(known, jnp.asarray([len(tokens) - 1], jnp.int32), 3)
    assert found[0].tolist() == expected


@given(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=40), most=st.sampled_from([1, 2, 5, 9]))
@settings(max_examples=60, deadline=None)
def test_lookup_is_the_naive_search(tokens: list[int], most: int) -> None:
    def naive() -> list[int]:
        for size in (4, 3, 2):
            for at in range(len(tokens) - 2, size - 2, -1):
                if len(tokens) >= size and tokens[at - size + 1 : at + 1] == tokens[-size:]:
                    grown = list(tokens)
                    for offset in range(most):
                        grown.append(grown[at + 1 + offset])
                    return grown[len(tokens) :]
        return [-1] * most

    padded = jnp.asarray([tokens + [1] * (64 - len(tokens))], jnp.int32)
    found = _lookup(padded, jnp.asarray([len(tokens) - 1], jnp.int32), most)
    assert found[0].tolist() == naive()


_lookup = jax.jit(looked_up, static_argnums=2)
