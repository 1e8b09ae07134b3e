"""What decode and verify steps cost on this machine, measured with every row in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from xla_engine.drafting.width import StepCosts
from xla_engine.graphs.row_state.packing import pack
from xla_engine.graphs.row_state.rows import pack_rows
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.dispatch import Dispatch
from xla_engine.runner.programs import decode_name, verify_name
from xla_engine.runner.verify_inputs import no_drafts

_LENGTH = 128  # positions of a row that is timed
_RUNS = 5


def measure(
    dispatch: Dispatch, state: DeviceState, slots: int, shapes: Sequence[tuple[int, int]], keys: int
) -> StepCosts:
    """Time the programs of a runner whose rows are idle; `keys`: the key length they are of.

    Afterwards rows and cache hold anything: blank them.
    """
    host: Any = jax.tree.map(np.asarray, state.make_rows())
    count = len(host.token)
    rows = replace(
        host,
        length=np.full(count, min(_LENGTH, keys // 2), np.int32),
        remaining=np.full(count, keys, np.int32),
        block_tables=None if host.block_tables is None else _own_blocks(host),
    )

    def seconds(name: str, work: Any) -> float:
        return _fastest(
            lambda: dispatch.run(name, work),
            lambda: setattr(state, "rows", jax.device_put(pack_rows(rows))),
        )

    decode, verify = {}, {}
    for number in sorted({min(number, slots) for number in (1, 2, 4, 8, 16, 32, 64, slots)}):
        decode[number] = seconds(decode_name(keys), jax.device_put(np.arange(count) < number))
    for lanes, width in shapes:
        drafts: Any = no_drafts(lanes, width)
        drafts.slot[:], drafts.most[:], drafts.tokens[:] = np.arange(lanes), width - 1, 0
        drafts.start[:] = rows.length[:lanes] + 1
        verify[lanes, width] = seconds(verify_name(lanes, width, keys), jax.device_put(pack(drafts)))
    return StepCosts(decode, verify)


def _own_blocks(rows: Any) -> np.ndarray:
    """Block tables in which slots share no block, if there are as many blocks as slots."""
    own = np.arange(len(rows.token), dtype=np.int32) % len(rows.history)
    return np.repeat(own[:, None], rows.block_tables.shape[1], axis=1)


def _fastest(run: Callable[[], Any], prepare: Callable[[], None]) -> float:
    found = []
    for _ in range(_RUNS):
        prepare()
        began = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - began)
    return min(found)
