"""The runner's moves of what slots hold: from slot to slot, to the host, and back into any slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from graphs.attention import KEY_BLOCK, KVCache
from graphs.inventory import Inventory
from graphs.rows import Rows
from graphs.slots import num_blocks
from scheduler import Reuse, Swap
from xla_engine.programs import COPY, READ, WRITE

State = tuple[KVCache, Rows]


@dataclass(slots=True)
class _Parked:
    """Blocks of a request, first to last, and its row state; device arrays until `settle`."""

    blocks: list[Any]
    row: Any


class SlotMoves:
    """Dispatches block by block, so that a move costs what it moves. The cache and row state are donated and returned.

    blocks: of a slot. stale_is_harmless: the attention never reads what lies behind a row's own keys; elsewhere the
        rest of a slot is cleared when its owner changes.
    """

    def __init__(self, inventory: Inventory, blocks: int, *, stale_is_harmless: bool) -> None:
        self._inventory = inventory
        self._blocks = blocks
        self._stale_is_harmless = stale_is_harmless
        self._parked: dict[str, _Parked] = {}

    def __len__(self) -> int:
        """Requests whose state is here."""
        return len(self._parked)

    def reuse(self, state: State, reuse: Reuse) -> State:
        """Bring the first positions of another slot; of the request's own slot nothing moves."""
        target, length = reuse.slot.index, reuse.length
        first = length // KEY_BLOCK if target == reuse.source else 0
        for block in range(first, self._last(length, moves=target != reuse.source)):
            state = self._inventory(COPY, *state, *_scalars(reuse.source, target, block, length))
        return state

    def park(self, state: State, swap: Swap) -> None:
        """Read a slot and its row; the copies are on their way when this returns."""
        blocks, row = [], None
        for block in range(num_blocks(swap.length)):
            moved, row = self._inventory(READ, *state, *_scalars(swap.slot.index, block))
            blocks.append(moved)
        for leaf in jax.tree.leaves((blocks, row)):
            leaf.copy_to_host_async()
        self._parked[swap.request_id] = _Parked(blocks, row)

    def settle(self, request_id: str) -> None:
        """Let go of the device's copy of a parked request, unless it is back or gone."""
        if (parked := self._parked.get(request_id)) is not None:
            parked.blocks, parked.row = jax.tree.map(np.asarray, (parked.blocks, parked.row))

    def resume(self, state: State, swap: Swap) -> State:
        """Write a parked request into a slot; it is not here any more."""
        parked = self._parked.pop(swap.request_id)
        row = jax.device_put(parked.row)
        for block in range(self._last(swap.length, moves=True)):
            moved = jax.device_put(parked.blocks[min(block, len(parked.blocks) - 1)])
            scalars = _scalars(swap.slot.index, block, swap.length)
            state = self._inventory(WRITE, *state, *scalars, moved, row)
        return state

    def discard(self, request_id: str) -> None:
        """Forget a request, if it is here."""
        self._parked.pop(request_id, None)

    def clear(self) -> None:
        """Forget everybody."""
        self._parked.clear()

    def warm_up(self, state: State, *, copies: bool, swaps: bool) -> State:
        """Run every program once so that no byte changes."""
        whole = self._blocks * KEY_BLOCK
        if copies:
            state = self._inventory(COPY, *state, *_scalars(0, 0, 0, whole))
        if swaps:
            moved, row = self._inventory(READ, *state, *_scalars(0, 0))
            state = self._inventory(WRITE, *state, *_scalars(0, 0, whole), moved, row)
        return state

    def _last(self, length: int, *, moves: bool) -> int:
        """Where the blocks end that are to be written."""
        if self._stale_is_harmless:
            return num_blocks(length) if moves else 0
        return self._blocks


def _scalars(*values: int) -> list[jax.Array]:
    return jax.device_put([np.int32(value) for value in values])
