"""Long work on the event loop, a millisecond at a time, so that steps and other clients go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator

PIECE_S = 1e-3  # of work between two turns of the loop
PART_BYTES = 64 << 10  # of an answer that are handed on together


class Turns:
    """Lets one long answer work at a time, each for `PIECE_S`, in rotation."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def parts(self, pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        """The pieces, joined into parts of about `PART_BYTES`.

        Each piece must be little work. Work that is over within `PIECE_S` waits for nothing.
        """
        iterator, held = iter(pieces), bytearray()
        more = _work(iterator, held)
        while more:
            if len(held) >= PART_BYTES:
                yield bytes(held)
                held.clear()
            async with self._lock:
                await asyncio.sleep(0)  # while the lock is held: nobody else works in this turn of the loop
                more = _work(iterator, held)
        if held:
            yield bytes(held)


def _work(iterator: Iterator[bytes], held: bytearray) -> bool:
    """Take pieces for a while; false once there are no more."""
    until = time.perf_counter() + PIECE_S
    for piece in iterator:
        held += piece
        if len(held) >= PART_BYTES or time.perf_counter() >= until:
            return True
    return False
