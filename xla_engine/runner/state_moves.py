"""Saves the recurrent state of slots on the device, and restores it."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.kv_cache.recurrent_states import states_of, with_states
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.programs import RESTORE_STATE, SAVE_STATE
from xla_engine.scheduler import Chunk, Reuse, SavedState


class StateMoves:
    """Moves states between slots and the places of `state.saved`. What is written is donated and returned.

    put: copies host arrays to the devices.
    """

    def __init__(self, inventory: Inventory, state: DeviceState, put: Callable[..., Any]) -> None:
        self._inventory = inventory
        self._state = state
        self._put = put

    def save(self, saves: Iterable[SavedState]) -> None:
        """Save the states of slots, in order."""
        for each in saves:
            self._save(each.slot.index, each.place)

    def restore(self, reuse: Reuse) -> None:
        """Give a slot the state saved at the end of the prefix that it reuses."""
        self._restore(reuse.slot.index, reuse.place)

    def warm_up(self) -> None:
        """Run both programs once, before any row is live."""
        self._save(0, 0)
        self._restore(0, 0)

    def _save(self, slot: int, place: int) -> None:
        state, scalars = self._state, self._put([np.int32(place), np.int32(slot)])
        (state.saved,) = self._inventory(SAVE_STATE, state.saved, states_of(state.cache), *scalars)

    def _restore(self, slot: int, place: int) -> None:
        state, scalars = self._state, self._put([np.int32(slot), np.int32(place)])
        (states,) = self._inventory(RESTORE_STATE, states_of(state.cache), state.saved, *scalars)
        state.cache = with_states(state.cache, states)


def prefill_calls(
    chunks: Sequence[Chunk], most: int, saves: Sequence[SavedState], joined: Collection[int] = ()
) -> Iterator[tuple[Sequence[Chunk], list[SavedState]]]:
    """The chunks of each prefill call, at most `most`, and the states to save after it.

    A state exists at the end of a call alone, so a prompt's next chunk after a saved state is in another call.
    joined: indices of chunks that run in the call of the chunk before.
    """
    wanted = {(each.slot.index, each.length): each for each in saves}
    begin, due = 0, list[SavedState]()
    for at, chunk in enumerate(chunks):
        follows = any(each.slot == chunk.slot for each in due)
        if at - begin == most or follows:
            while at in joined:
                at -= 1
            assert at > begin, "a call has too few lanes for a picture"
            yield chunks[begin:at], due
            begin, due = at, []
        if (save := wanted.get((chunk.slot.index, chunk.start + len(chunk.tokens)))) is not None:
            due.append(save)
    if begin < len(chunks):
        yield chunks[begin:], due
