"""Moves KV entries and row state: between slots, between blocks, to the host and back; and saves recurrent states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.config import KEY_SPAN
from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.kv_cache.cache import KVCache, States, states_of, with_states
from xla_engine.graphs.kv_cache.moves import blocks_per_call, num_spans
from xla_engine.graphs.row_state.rows import RowState
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.devices import to_host
from xla_engine.runner.programs import (
    COPY,
    COPY_BLOCKS,
    LOAD_BLOCKS,
    READ,
    READ_BLOCKS,
    READ_SAVED,
    READ_STATE,
    RESTORE_STATE,
    SAVE_STATE,
    WRITE,
    WRITE_BLOCKS,
    WRITE_SAVED,
    WRITE_STATE,
)
from xla_engine.runner.stored_blocks import BlockContent, stacked
from xla_engine.scheduler import BlockCopy, Reuse, StoredBlock, Swap

State = tuple[KVCache, RowState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """Copies from the host to the devices. whole: for replicated arrays. pieces: for keys and values of slots or
    blocks. states: for recurrent states."""

    whole: Callable[..., Any]
    pieces: Callable[..., Any]
    states: Callable[..., Any]

    def scalars(self, *values: int) -> list[jax.Array]:
        found: list[jax.Array] = self.whole([np.int32(value) for value in values])
        return found


@dataclass(slots=True)
class ParkedState:
    """A request's KV entries in pieces, from its beginning, its row state, and the state of recurrent layers; device
    arrays until `settle`.

    A piece is what one call moves: a span of a slot, or a group of blocks.
    """

    pieces: list[Any]
    row: Any
    recurrent: States

    def __post_init__(self) -> None:
        """Start the copy to the host."""
        for leaf in jax.tree.leaves(self._arrays):
            if leaf.is_fully_addressable:
                leaf.copy_to_host_async()

    @property
    def num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._arrays))

    @property
    def _arrays(self) -> tuple[Any, Any, States]:
        return self.pieces, self.row, self.recurrent

    def settle(self) -> None:
        """Finish the copy, and free the device arrays."""
        self.pieces, self.row, self.recurrent = jax.tree.map(to_host, self._arrays)


class SlotMoves:
    """Moves for slots with their own memory, span by span, so that the cost is proportional to the length.

    The cache and row state are donated and returned.

    spans: of a slot.
    stale_is_harmless: the attention backend never reads beyond a row's own keys; otherwise the rest of a slot is
        cleared when its owner changes.
    """

    def __init__(
        self,
        inventory: Inventory,
        spans: int,
        transfers: Transfers,
        *,
        stale_is_harmless: bool,
    ) -> None:
        self._inventory = inventory
        self._transfers = transfers
        self._spans = spans
        self._stale_is_harmless = stale_is_harmless

    def reuse(self, state: State, reuse: Reuse) -> State:
        """Copy the first positions from another slot; if the source is the request's own slot, nothing moves."""
        target, length = reuse.slot.index, reuse.length
        first = length // KEY_SPAN if target == reuse.source else 0
        for span in range(first, self._last(length, moves=target != reuse.source)):
            state = self._inventory(
                COPY, *state, *self._transfers.scalars(reuse.source, target, span, length)
            )
        return state

    def park(self, state: State, swap: Swap, recurrent: States) -> ParkedState:
        """Read a slot and its row state. recurrent: the state of its recurrent layers."""
        spans, row = [], None
        for span in range(num_spans(swap.length)):
            moved, row = self._inventory(READ, *state, *self._transfers.scalars(swap.slot.index, span))
            spans.append(moved)
        return ParkedState(spans, row, recurrent)

    def resume(self, state: State, swap: Swap, parked: ParkedState) -> State:
        """Write a parked request into a slot."""
        row = self._transfers.whole(parked.row)
        for span in range(self._last(swap.length, moves=True)):
            moved = self._transfers.pieces(parked.pieces[min(span, len(parked.pieces) - 1)])
            scalars = self._transfers.scalars(swap.slot.index, span, swap.length)
            state = self._inventory(WRITE, *state, *scalars, moved, row)
        return state

    def warm_up(self, state: State, *, copies: bool, swaps: bool) -> State:
        """Run every program once so that no byte changes."""
        whole = self._spans * KEY_SPAN
        if copies:
            state = self._inventory(COPY, *state, *self._transfers.scalars(0, 0, 0, whole))
        if swaps:
            moved, row = self._inventory(READ, *state, *self._transfers.scalars(0, 0))
            state = self._inventory(WRITE, *state, *self._transfers.scalars(0, 0, whole), moved, row)
        return state

    def _last(self, length: int, *, moves: bool) -> int:
        """The end of the range of spans to write."""
        if self._stale_is_harmless:
            return num_spans(length) if moves else 0
        return self._spans


class BlockMoves:
    """Moves of blocks, a span's worth of them per call. The cache and row state are donated and returned."""

    def __init__(self, inventory: Inventory, block_size: int, transfers: Transfers) -> None:
        self._inventory = inventory
        self._transfers = transfers
        self._many = blocks_per_call(block_size)

    def copy(self, state: State, copies: Sequence[BlockCopy]) -> State:
        for start in range(0, len(copies), self._many):
            few = copies[start : start + self._many]
            source, target = (
                self._padded([each.source for each in few]),
                self._padded([each.target for each in few]),
            )
            state = self._inventory(COPY_BLOCKS, *state, source, target, *self._transfers.scalars(len(few)))
        return state

    def read(self, state: State, blocks: Sequence[int]) -> list[Any]:
        """The content of blocks, a group of `blocks_per_call` each, still on the device."""
        groups = [blocks[start : start + self._many] for start in range(0, len(blocks), self._many)]
        slot = self._transfers.scalars(0)
        found = [self._inventory(READ_BLOCKS, *state, *slot, self._padded(group))[0] for group in groups]
        for leaf in jax.tree.leaves(found):
            leaf.copy_to_host_async()
        return found

    def load(
        self, state: State, loads: Sequence[StoredBlock], content: Mapping[bytes, BlockContent]
    ) -> State:
        """Write blocks whose content came from outside, in order. content: by key."""
        for start in range(0, len(loads), self._many):
            group = loads[start : start + self._many]
            moved = stacked([content[each.key] for each in group], self._many)
            first, end = self._transfers.scalars(0, len(group))
            blocks = self._padded([each.block for each in group])
            state = self._inventory(LOAD_BLOCKS, *state, blocks, first, end, self._transfers.pieces(moved))
        return state

    def park(self, state: State, swap: Swap, recurrent: States) -> ParkedState:
        """Read a request's blocks and its row state. recurrent: the state of its recurrent layers."""
        groups, row = [], None
        for blocks in self._groups(swap):
            moved, row = self._inventory(
                READ_BLOCKS, *state, *self._transfers.scalars(swap.slot.index), self._padded(blocks)
            )
            groups.append(moved)
        return ParkedState(groups, row, recurrent)

    def resume(self, state: State, swap: Swap, parked: ParkedState) -> State:
        """Write a parked request's row state into a slot, and its blocks except for shared ones."""
        row = self._transfers.whole(parked.row)
        last = len(parked.pieces) - 1
        for index, (blocks, group) in enumerate(zip(self._groups(swap), parked.pieces, strict=True)):
            shared = sum(block < 0 for block in blocks)
            if shared == len(blocks) and index < last:
                continue
            slot, first, end = self._transfers.scalars(swap.slot.index, shared, len(blocks))
            state = self._inventory(
                WRITE_BLOCKS,
                *state,
                slot,
                self._padded(blocks),
                first,
                end,
                self._transfers.pieces(group),
                row,
            )
        return state

    def warm_up(self, state: State, *, swaps: bool, loads: bool) -> State:
        """Run every program once so that no byte changes."""
        blocks = self._padded([])
        state = self._inventory(COPY_BLOCKS, *state, blocks, blocks, *self._transfers.scalars(0))
        if swaps:
            slot, none = self._transfers.scalars(0, 0)
            moved, row = self._inventory(READ_BLOCKS, *state, slot, blocks)
            state = self._inventory(WRITE_BLOCKS, *state, slot, blocks, none, none, moved, row)
            if loads:
                state = self._inventory(LOAD_BLOCKS, *state, blocks, none, none, moved)
        return state

    def _groups(self, swap: Swap) -> list[Sequence[int]]:
        return [swap.blocks[start : start + self._many] for start in range(0, len(swap.blocks), self._many)]

    def _padded(self, blocks: Sequence[int]) -> jax.Array:
        padded = np.zeros(self._many, np.int32)
        padded[: len(blocks)] = blocks
        return self._transfers.whole(padded)


class StateMoves:
    """Moves recurrent states: between slots and the places of `state.saved`, and from both to the host and back.

    What is written is donated and returned.
    """

    def __init__(self, inventory: Inventory, state: DeviceState, transfers: Transfers) -> None:
        self._inventory = inventory
        self._state = state
        self._transfers = transfers

    def save(self, slot: int, place: int) -> None:
        """Save the state of a slot."""
        state, scalars = self._state, self._transfers.scalars(place, slot)
        (state.saved,) = self._inventory(SAVE_STATE, state.saved, states_of(state.cache), *scalars)

    def restore(self, slot: int, place: int) -> None:
        """Give a slot the state saved at the end of the prefix that it reuses."""
        state, scalars = self._state, self._transfers.scalars(slot, place)
        (states,) = self._inventory(RESTORE_STATE, states_of(state.cache), state.saved, *scalars)
        state.cache = with_states(state.cache, states)

    def read(self, slot: int) -> States:
        """The state of a slot, still on the device; empty without recurrent layers."""
        if not (states := states_of(self._state.cache)):
            return []
        (found,) = self._inventory(READ_STATE, states, *self._transfers.scalars(slot))
        moved: States = found
        return moved

    def write(self, slot: int, moved: States) -> None:
        """Give a slot the state of a parked request."""
        if not moved:
            return
        state, scalars = self._state, self._transfers.scalars(slot)
        states, placed = states_of(state.cache), self._transfers.states(moved)
        (states,) = self._inventory(WRITE_STATE, states, *scalars, placed)
        state.cache = with_states(state.cache, states)

    def read_saved(self, place: int) -> States:
        """The state saved at a place, still on the device."""
        (found,) = self._inventory(READ_SAVED, self._state.saved, *self._transfers.scalars(place))
        for leaf in jax.tree.leaves(found):
            leaf.copy_to_host_async()
        moved: States = found
        return moved

    def load(self, place: int, content: BlockContent) -> None:
        """Save a state that came from outside."""
        state, moved = self._state, self._transfers.states(stacked([content], 1))
        (state.saved,) = self._inventory(WRITE_SAVED, state.saved, *self._transfers.scalars(place), moved)

    def warm_up(self, *, swaps: bool, loads: bool) -> None:
        """Run every program once, before any row is live. swaps: requests park. loads: states come from outside."""
        if self._state.saved:
            self.save(0, 0)
            self.restore(0, 0)
        if swaps:
            self.write(0, self.read(0))
        if loads and self._state.saved:
            self.load(0, jax.tree.map(lambda leaf: np.asarray(leaf)[0], self.read_saved(0)))
