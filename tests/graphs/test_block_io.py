"""Programs over blocks: same bits as with contiguous slots in any order of blocks, and prefixes shared in place."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY, tiny_checkpoint
from xla_engine.graphs.attention.backend import Attention
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import FULL, SLIDING
from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.moves import copy_blocks, load_blocks, read_blocks, write_blocks
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Pool, Rows, Tables, make_rows, make_tables, pack_rows
from xla_engine.graphs.sampling.logits import unpack_samples
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import PrefillForm, prefill_chunk
from xla_engine.graphs.steps.step import StepForm, StepState
from xla_engine.runner.backends import choose_attention
from xla_engine.runner.inputs import make_lanes
from xla_engine.runner.kv_moves import BlockMoves, State, Transfers
from xla_engine.runner.native_library.build import register
from xla_engine.runner.programs import COPY_BLOCKS, LOAD_BLOCKS, READ_BLOCKS, WRITE_BLOCKS
from xla_engine.runner.row_settings import HostTables, RowSettings
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from xla_engine.scheduler import BlockCopy, Chunk, Slot, Swap

MODEL = replace(TINY, layer_types=(SLIDING, FULL), sliding_window=50, qk_norm="head")
ROWS, LENGTH, CHUNK, BLOCK = 8, 256, 64, 32
BACKENDS = {backend.name: backend for backend in (XlaAttention(), choose_attention("auto"))}
SETTINGS = RowSettings(
    max_tokens=99, stop_token_ids=(), params=SamplingParams(temperature=0.8, logprobs=0), seed=11
)


class Device:
    """Cache, rows and both graphs of one layout; `num_blocks` None: contiguous slots."""

    def __init__(self, backend: Attention, num_blocks: int | None = None) -> None:
        if backend.name == "native":
            register(parts={"sampler"})
        spec = ModelSpec(MODEL, jnp.dtype(jnp.bfloat16), backend)
        weights = tiny_checkpoint(model=MODEL).weights
        self.weights = [weights[name] for name in spec.leaves]
        self.rope = rope_tables(MODEL, LENGTH)
        self.cache = make_cache(spec, ROWS, BLOCK if num_blocks else LENGTH, num_blocks=num_blocks)
        if num_blocks:  # stale
            self.cache = [
                jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), each) for each in self.cache
            ]
        pool = None if num_blocks is None else Pool(num_blocks, BLOCK, LENGTH // BLOCK)
        self.rows = make_rows(ROWS, MAX_STOP_TOKEN_IDS, LENGTH, pool)
        self.tables: Tables = make_tables(ROWS, MODEL.vocab_size, has_blocks=num_blocks is not None)
        form = StepForm(spec, LENGTH)

        def program(step: Any, form: Any) -> Any:
            def run(weights: Any, rope: Any, cache: Any, rows: Any, work: Any, tables: Any) -> Any:
                return step(form, StepState(weights, rope, cache, rows, tables), work)

            return jax.jit(run, donate_argnums=(2, 3))

        self._prefill = program(prefill_chunk, PrefillForm(form, ROWS))
        self._decode = program(decode_step, form)

    def prefill(self, slot: int, prompt: list[int], first: int = 0) -> list[Any]:
        """Prefill the chunks of a prompt from `first` on, two lanes a call; returns the first sample."""
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
        return [bits[len(chunks) - 1].tobytes() for bits in unpack_samples(np.asarray(packed)).values()]

    def lend(self, slot: int, blocks: list[int], start: int = 0) -> None:
        """Put blocks into a slot's table from its `start`-th entry on, as the next calls do."""
        changes = np.full((3, ROWS), ROWS, np.int32)
        changes[:, : len(blocks)] = [[slot] * len(blocks), range(start, start + len(blocks)), blocks]
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
        pytest.param(each, id=name, marks=[pytest.mark.release] * (name == "xla" and len(BACKENDS) > 1))
        for name, each in BACKENDS.items()
    ],
)
def test_pages_give_the_bits_of_slots_and_share_a_prefix(backend: Attention) -> None:
    """Of two prompts that begin alike, the second reads the first one's blocks and prefills only the rest."""
    draw = np.random.default_rng(3)
    first = draw.integers(1, MODEL.vocab_size, 100).tolist()
    second = [*first[:CHUNK], *draw.integers(1, MODEL.vocab_size, 20).tolist()]
    blocks = draw.permutation(24).tolist()
    slots, pooled = Device(backend), Device(backend, 24)
    pooled.lend(2, blocks[:4])  # no more than the prompt takes
    assert pooled.prefill(2, first) == slots.prefill(2, first)
    pooled.lend(5, [*blocks[:2], blocks[4]])
    assert pooled.prefill(5, second, CHUNK) == slots.prefill(5, second)
    # before the last one is full
    for slot, index, block, steps in ((5, 3, 5, 12), (2, 4, 6, 16), (5, 4, 7, 12)):
        pooled.lend(slot, [blocks[block]], index)
        assert pooled.decode([2, 5], steps) == slots.decode([2, 5], steps)


def test_block_tables_on_the_device_follow_those_of_the_host() -> None:
    """Between two calls, one entry changes, or more than fit into one update, or the same entry twice."""
    draw = np.random.default_rng(5)
    host, expected = HostTables(4, 50, 6), np.zeros((4, 6), np.int32)
    tables = replace(make_tables(4, 50, has_blocks=True), **host.take_stale())
    rows: Rows = make_rows(4, 1, 384, Pool(99, 64, 6))
    whole = 0
    for _ in range(60):
        for _ in range(draw.integers(0, 4)):
            slot, start = (int(each) for each in draw.integers(0, (4, 6)))
            blocks = draw.integers(0, 99, draw.integers(1, 7 - start)).tolist()
            host.set_blocks(slot, start, blocks)
            expected[slot, start : start + len(blocks)] = blocks
        if (sent := host.take_block_tables()) is not None:
            rows, whole = replace(rows, block_tables=jnp.asarray(sent)), whole + 1
        tables = replace(tables, **host.take_stale())
        for _ in range(draw.integers(1, 3)):  # calls of the step
            rows = rows.with_tables(tables)
            assert rows.block_tables is not None and (np.asarray(rows.block_tables) == expected).all()
    assert 10 < whole < 50


class Calls:
    """The programs of moves, compiled when first called."""

    def __init__(self, spec: ModelSpec) -> None:
        self._known: dict[str, Any] = {
            COPY_BLOCKS: jax.jit(functools.partial(copy_blocks, spec)),
            READ_BLOCKS: jax.jit(functools.partial(read_blocks, spec)),
            WRITE_BLOCKS: jax.jit(functools.partial(write_blocks, spec)),
            LOAD_BLOCKS: jax.jit(functools.partial(load_blocks, spec)),
        }

    def __call__(self, name: str, *arguments: Any) -> Any:
        return self._known[name](*arguments)


def by_page(state: State) -> list[tuple[bytes, ...]]:
    """Every block's keys, values and tokens."""
    cache, rows = state
    count = len(rows.history)
    leaves = [np.asarray(leaf) for leaf in (*jax.tree.leaves(cache), rows.history)]
    arrays = [np.moveaxis(leaf, leaf.shape.index(count), 0) for leaf in leaves]  # blocks or layers come first
    return [tuple(array[block].tobytes() for array in arrays) for block in range(count)]


def by_slot(rows: Rows) -> list[tuple[bytes, ...]]:
    """Every slot's row state."""
    fields: Any = rows
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(replace(fields, history=None, block_tables=None))]
    return [tuple(leaf[slot].tobytes() for leaf in leaves) for slot in range(ROWS)]


@pytest.mark.parametrize(
    "backend", [*BACKENDS.values(), GpuAttention(interpret=True)], ids=lambda each: each.name
)
def test_pages_move_byte_for_byte_and_nothing_else_does(backend: Attention) -> None:
    """Blocks and rows are random, NaN among them: copied in order, parked, and resumed elsewhere."""
    draw = np.random.default_rng(7)
    spec = ModelSpec(MODEL, jnp.dtype(jnp.bfloat16), backend)

    def noise(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(np.frombuffer(draw.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape))
        values = draw.standard_normal(leaf.shape)
        return jnp.asarray(np.where(draw.random(leaf.shape) < 0.1, np.nan, values), leaf.dtype)

    cache = make_cache(spec, ROWS, 64, num_blocks=30)
    state: State = jax.tree.map(
        noise, (cache, pack_rows(make_rows(ROWS, 2, LENGTH, Pool(30, 64, LENGTH // 64))))
    )
    put = Transfers(whole=jax.device_put, pieces=jax.device_put, states=jax.device_put)
    moves = BlockMoves(cast("Inventory", Calls(spec)), 64, put)
    expected, slots = by_page(state), by_slot(state[1])
    assert by_page(moves.warm_up(state, swaps=True, loads=True)) == expected

    pairs = [*draw.integers(0, 30, (7, 2)).tolist(), [7, 8], [8, 9]]
    state = moves.copy(state, [BlockCopy(source=source, target=target) for source, target in pairs])
    for source, target in pairs:
        expected[target] = expected[source]
    assert by_page(state) == expected and by_slot(state[1]) == slots

    blocks = draw.permutation(30).tolist()
    held, others = tuple(blocks[:11]), blocks[11:]
    for shared in (0, 1, 6, 11):
        swap = Swap(slot=Slot(index=3, epoch=0), request_id="a", length=11 * 64 - 5, blocks=held)
        parked = moves.park(state, swap, [])
        content, row = by_page(state), by_slot(state[1])[3]
        state = jax.tree.map(noise, state)  # others write
        parked.settle()
        expected, slots = by_page(state), by_slot(state[1])
        place = (*[-1] * shared, *others[shared:11])
        state = moves.resume(state, replace(swap, slot=Slot(index=6, epoch=4), blocks=place), parked)
        for source, target in zip(held[shared:], place[shared:], strict=True):
            expected[target] = content[source]
        slots[6] = row
        assert by_page(state) == expected and by_slot(state[1]) == slots
