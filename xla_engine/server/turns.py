"""Run long work on the event loop, a millisecond at a time, so that steps and other clients continue."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator

PIECE_S = 1e-3  # seconds of work before the loop runs other tasks
PART_BYTES = 64 << 10  # size of the parts of an answer


class Turns:
    """Lets long answers work one at a time, each for `PIECE_S`, in rotation."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def parts(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        """Join pieces into parts of about `PART_BYTES`.

        Each piece must take little time. Work shorter than `PIECE_S` is done at once.
        """
        iterator, held = iter(pieces), bytearray()
        more = _work(iterator, held)
        while more:
            if len(held) >= PART_BYTES:
                yield bytes(held)
                held.clear()
            async with self._lock:
                # with the lock held, so that only one answer works in this iteration of the loop
                await asyncio.sleep(0)
                more = _work(iterator, held)
        if held:
            yield bytes(held)


def _work(iterator: Iterator[bytes], held: bytearray) -> bool:
    """Take pieces for up to `PIECE_S`. Returns false when there are no more."""
    until = time.perf_counter() + PIECE_S
    for piece in iterator:
        held += piece
        if len(held) >= PART_BYTES or time.perf_counter() >= until:
            return True
    return False
