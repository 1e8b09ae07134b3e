"""Packing of small arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.models import TINY_ENGINE
from xla_engine.graphs.row_state.packing import pack, unpack
from xla_engine.graphs.row_state.rows import Rows, make_rows, pack_rows, unpack_rows
from xla_engine.runner.prefill_inputs import make_lanes


def noise(leaf: Any) -> np.ndarray:
    draw = np.random.default_rng(leaf.size)
    if leaf.dtype == np.bool_:
        return draw.random(leaf.shape) < 0.5
    return np.frombuffer(draw.bytes(leaf.nbytes), leaf.dtype).reshape(leaf.shape)


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_packing_keeps_every_bit(where: Any) -> None:
    """Of rows and of lanes, NaN and all, packed by either side."""
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
