"""Packing of small arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY_ENGINE
from xla_engine.graphs.row_state.rows import (
    Rows,
    make_rows,
    pack,
    pack_rows,
    some_rows,
    targets,
    unpack,
    unpack_rows,
    with_rows,
)
from xla_engine.runner.inputs import make_lanes


def noise(leaf: Any) -> np.ndarray:
    draw = np.random.default_rng(leaf.size)
    if leaf.dtype == np.bool_:
        return draw.random(leaf.shape) < 0.5
    return np.frombuffer(draw.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape)


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_packing_keeps_every_bit(where: Any) -> None:
    """Rows and lanes with any values, NaN included, are packed by the host and by the device."""
    rows: Rows = jax.tree.map(lambda leaf: where(noise(leaf)), make_rows(5, 3, 70))
    lanes = jax.tree.map(lambda leaf: where(noise(leaf)), make_lanes([], {}, 4, TINY_ENGINE.chunk_size))
    state = pack_rows(rows)
    like = jax.eval_shape(lambda: make_rows(1, 3, 1))
    assert len(jax.tree.leaves(state)) == 2
    for before, after in (
        (rows, jax.jit(unpack_rows)(jax.tree.map(jnp.asarray, state), like)),
        (lanes, unpack(jnp.asarray(pack(lanes)), lanes)),
    ):
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            assert (old.dtype, old.shape) == (new.dtype, new.shape)
            assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_some_rows_are_read_and_written_to_the_bit() -> None:
    """Slots 4, 1 and 0 of two sets of rows, of which the second is written; others keep theirs."""
    rows = jax.tree.map(lambda leaf: jnp.asarray(noise(leaf)), make_rows(5, 3, 70))
    others = jax.tree.map(lambda leaf: ~leaf if leaf.dtype != np.float32 else -leaf, rows)
    slot, wanted = jnp.array([4, 1, 0]), jnp.array([True, False, True])
    changed = jax.jit(lambda a, b: with_rows(a, targets(slot, wanted, 5), some_rows(b, slot)))(rows, others)
    for name in ("history", "token", "length", "remaining", "stop_ids", "sampling"):
        triples = zip(
            *(jax.tree.leaves(getattr(each, name)) for each in (rows, others, changed)), strict=True
        )
        for old, new, found in triples:
            for row in range(5):
                expected = new if name != "history" and row in (0, 4) else old
                assert np.asarray(found)[row].tobytes() == np.asarray(expected)[row].tobytes()


def test_what_nobody_changes_is_not_packed_again() -> None:
    """Each column that is compiled by itself costs every program of every start a kernel."""
    rows = make_rows(5, 3, 70)
    state = pack_rows(rows)
    again = jax.jit(lambda state: pack_rows(unpack_rows(state, rows)))
    assert "fusion" not in again.lower(state).compile().as_text()
    sampling = jax.jit(lambda state: pack(unpack_rows(state, rows).sampling))
    assert sampling.lower(state).compile().as_text().count(" fusion(") <= 1
