"""The runner's moves of what slots hold: from slot to slot, from page to page, to the host, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.attention.backend import KEY_SPAN
from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.kv_cache.block_io import blocks_per_call
from xla_engine.graphs.kv_cache.slot_io import num_spans
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.row_state.rows import RowState
from xla_engine.runner.programs import COPY, COPY_PAGES, READ, READ_PAGES, WRITE, WRITE_PAGES
from xla_engine.scheduler import BlockCopy, Reuse, Swap

State = tuple[KVCache, RowState]


@dataclass(slots=True)
class ParkedState:
    """Blocks of a request, first to last, and its row state; device arrays until `settle`."""

    blocks: list[Any]
    row: Any


class Parked:
    """The states of requests that wait on the host, by request id."""

    def __init__(self) -> None:
        self._states: dict[str, ParkedState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def put(self, request_id: str, blocks: list[Any], row: Any) -> None:
        """Keep what was read; the copies are on their way when this returns."""
        for leaf in jax.tree.leaves((blocks, row)):
            leaf.copy_to_host_async()
        self._states[request_id] = ParkedState(blocks, row)

    def settle(self, request_id: str) -> None:
        """Let go of the device's copy of a parked request, unless it is back or gone."""
        if (parked := self._states.get(request_id)) is not None:
            parked.blocks, parked.row = jax.tree.map(np.asarray, (parked.blocks, parked.row))

    def take(self, request_id: str) -> ParkedState:
        """What a request was parked with; it is not here any more."""
        return self._states.pop(request_id)

    def discard(self, request_id: str) -> None:
        """Forget a request, if it is here."""
        self._states.pop(request_id, None)

    def clear(self) -> None:
        """Forget everybody."""
        self._states.clear()


class SlotMoves:
    """Moves of slots of their own, block by block, so that a move costs what it moves. The cache and row state are
    donated and returned.

    blocks: of a slot. stale_is_harmless: the attention never reads what lies behind a row's own keys; elsewhere the
        rest of a slot is cleared when its owner changes.
    """

    def __init__(self, inventory: Inventory, parked: Parked, blocks: int, *, stale_is_harmless: bool) -> None:
        self._inventory = inventory
        self._parked = parked
        self._blocks = blocks
        self._stale_is_harmless = stale_is_harmless

    def reuse(self, state: State, reuse: Reuse) -> State:
        """Bring the first positions of another slot; of the request's own slot nothing moves."""
        target, length = reuse.slot.index, reuse.length
        first = length // KEY_SPAN if target == reuse.source else 0
        for block in range(first, self._last(length, moves=target != reuse.source)):
            state = self._inventory(COPY, *state, *_scalars(reuse.source, target, block, length))
        return state

    def park(self, state: State, swap: Swap) -> None:
        """Read a slot and its row."""
        blocks, row = [], None
        for block in range(num_spans(swap.length)):
            moved, row = self._inventory(READ, *state, *_scalars(swap.slot.index, block))
            blocks.append(moved)
        self._parked.put(swap.request_id, blocks, row)

    def resume(self, state: State, swap: Swap) -> State:
        """Write a parked request into a slot."""
        parked = self._parked.take(swap.request_id)
        row = jax.device_put(parked.row)
        for block in range(self._last(swap.length, moves=True)):
            moved = jax.device_put(parked.blocks[min(block, len(parked.blocks) - 1)])
            scalars = _scalars(swap.slot.index, block, swap.length)
            state = self._inventory(WRITE, *state, *scalars, moved, row)
        return state

    def warm_up(self, state: State, *, copies: bool, swaps: bool) -> State:
        """Run every program once so that no byte changes."""
        whole = self._blocks * KEY_SPAN
        if copies:
            state = self._inventory(COPY, *state, *_scalars(0, 0, 0, whole))
        if swaps:
            moved, row = self._inventory(READ, *state, *_scalars(0, 0))
            state = self._inventory(WRITE, *state, *_scalars(0, 0, whole), moved, row)
        return state

    def _last(self, length: int, *, moves: bool) -> int:
        """Where the blocks end that are to be written."""
        if self._stale_is_harmless:
            return num_spans(length) if moves else 0
        return self._blocks


class BlockMoves:
    """Moves of pages, as many a call as a key block has. The cache and row state are donated and returned."""

    def __init__(self, inventory: Inventory, parked: Parked, block_size: int) -> None:
        self._inventory = inventory
        self._parked = parked
        self._many = blocks_per_call(block_size)

    def copy(self, state: State, copies: Sequence[BlockCopy]) -> State:
        """Copy pages in order."""
        for start in range(0, len(copies), self._many):
            few = copies[start : start + self._many]
            source, target = (
                self._padded([each.source for each in few]),
                self._padded([each.target for each in few]),
            )
            state = self._inventory(COPY_PAGES, *state, source, target, *_scalars(len(few)))
        return state

    def park(self, state: State, swap: Swap) -> None:
        """Read a request's pages and its row."""
        groups, row = [], None
        for pages in self._groups(swap):
            moved, row = self._inventory(READ_PAGES, *state, *_scalars(swap.slot.index), self._padded(pages))
            groups.append(moved)
        self._parked.put(swap.request_id, groups, row)

    def resume(self, state: State, swap: Swap) -> State:
        """Write a parked request's row into a slot and, but for those that are shared, its pages."""
        parked = self._parked.take(swap.request_id)
        row = jax.device_put(parked.row)
        last = len(parked.blocks) - 1
        for index, (pages, group) in enumerate(zip(self._groups(swap), parked.blocks, strict=True)):
            shared = sum(page < 0 for page in pages)
            if shared == len(pages) and index < last:
                continue
            slot, first, end = _scalars(swap.slot.index, shared, len(pages))
            state = self._inventory(
                WRITE_PAGES, *state, slot, self._padded(pages), first, end, jax.device_put(group), row
            )
        return state

    def warm_up(self, state: State, *, swaps: bool) -> State:
        """Run every program once so that no byte changes."""
        pages = self._padded([])
        state = self._inventory(COPY_PAGES, *state, pages, pages, *_scalars(0))
        if swaps:
            slot, none = _scalars(0, 0)
            moved, row = self._inventory(READ_PAGES, *state, slot, pages)
            state = self._inventory(WRITE_PAGES, *state, slot, pages, none, none, moved, row)
        return state

    def _groups(self, swap: Swap) -> list[Sequence[int]]:
        return [swap.blocks[start : start + self._many] for start in range(0, len(swap.blocks), self._many)]

    def _padded(self, pages: Sequence[int]) -> jax.Array:
        padded = np.zeros(self._many, np.int32)
        padded[: len(pages)] = pages
        return jax.device_put(padded)


def _scalars(*values: int) -> list[jax.Array]:
    return jax.device_put([np.int32(value) for value in values])
