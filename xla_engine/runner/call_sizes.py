"""Programs have fixed sizes: which size a call uses, and how the chunks of a plan are spread over calls."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from xla_engine.scheduler import Chunk, SavedState


class Sizes(NamedTuple):
    """The sizes of programs that calls choose from, ascending.

    lanes: of prefill calls. keys: key lengths. few: numbers of rows for which there are separate decode programs.
    """

    lanes: tuple[int, ...]
    keys: tuple[int, ...]
    few: tuple[int, ...]

    def keys_for(self, positions: int) -> int:
        """The key length of a call whose rows have at most so many positions."""
        return smallest(self.keys, positions)


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


def decode_work(slots: np.ndarray, total: int, few: int | None) -> np.ndarray:
    """The rows that a decode program runs: bool `[total]`, or the slots i32 `[few]` for a program of few rows."""
    if few is None:
        work = np.zeros(total, np.bool_)
        work[slots] = True
    else:
        work = np.full(few, -1, np.int32)
        work[: len(slots)] = slots
    return work


def smallest(sizes: Sequence[int], needed: int) -> int:
    """The smallest of the ascending `sizes` that is at least `needed`."""
    return next(size for size in sizes if size >= needed)
