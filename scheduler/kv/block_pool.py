"""A pool of equal blocks that are counted, found by keys of their content, and reused, least recently used first.

A block is held, with a count of its holders; free and blank; or free and cached. A cached block can be found by the
keys of its content until it is reused (as in vLLM's block pool).
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Iterable


class OutOfBlocksError(RuntimeError):
    """Too few blocks are free; nothing was allocated."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens.

    watermark: blocks that admission leaves free, so that running rows can grow.

    Raises ValueError for invalid sizes.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: int = 0) -> None:
        if block_size < 1 or not 0 <= watermark < num_blocks:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens with a watermark of {watermark}: give a block of at "
                "least 1 token, and a watermark below the number of blocks"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.watermark = watermark
        self._holders = [0] * num_blocks
        self._taken = [0] * num_blocks
        self._keys: list[tuple[bytes, ...]] = [()] * num_blocks
        self._by_key: dict[bytes, int] = {}
        # Least recently used first, so that the content of a blank block, which may still get a key, stays longest.
        self._blank: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, object]) -> BlockPool:
        twin = copy.copy(self)
        twin._holders, twin._taken, twin._keys = self._holders.copy(), self._taken.copy(), self._keys.copy()
        twin._by_key, twin._blank, twin._kept = self._by_key.copy(), self._blank.copy(), self._kept.copy()
        return twin

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return len(self._blank) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.num_free

    def blocks_for(self, tokens: int) -> int:
        """How many blocks `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def never_fits(self, tokens: int) -> str | None:
        """Why a request of `tokens` tokens in all can never run, with the arithmetic; None if it can."""
        most = self.num_blocks - self.watermark
        needed = self.blocks_for(tokens)
        if needed <= most:
            return None
        return (
            f"{tokens} tokens take {needed} blocks of {self.block_size}; the pool has {self.num_blocks} and keeps "
            f"{self.watermark} free, so {most * self.block_size} tokens are the most"
        )

    def can_admit(self, blocks: int, kept: Iterable[int] = ()) -> bool:
        """Whether a new request may take `blocks` blocks and share those in `kept`, some of which may be free."""
        revived = sum(1 for block in kept if not self._holders[block])
        return self.num_free - revived - blocks >= self.watermark

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, blank ones first; each gets one holder. Raises OutOfBlocksError."""
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} blocks are wanted and {self.num_free} of {self.num_blocks} are free"
            )
        return [self.take() for _ in range(count)]

    def take(self) -> int:
        """Take one free block, a blank one first; there must be one."""
        block, _ = (self._blank or self._kept).popitem(last=False)
        if self._keys[block]:
            self._remove_keys(block)
        self._holders[block] = 1
        self._taken[block] += 1
        return block

    def holders(self, block: int) -> int:
        """How many requests hold a block."""
        return self._holders[block]

    def times_taken(self, block: int) -> int:
        """How often a block was taken. While this stays the same, no other request has written to the block."""
        return self._taken[block]

    def freed_by(self, tables: Iterable[Iterable[int]]) -> int:
        """How many blocks would become free if the holders of these tables gave up theirs."""
        count = Counter(block for table in tables for block in table)
        return sum(1 for block, own in count.items() if own == self._holders[block])

    def find(self, key: bytes) -> int | None:
        """The block with this key, held or free; None if there is none."""
        return self._by_key.get(key)

    def share(self, block: int) -> None:
        """Add a holder to a block that is held or cached."""
        if not self._holders[block]:
            del self._kept[block]  # KeyError if it is blank: a blank block has nothing to share
        self._holders[block] += 1

    def take_again(self, block: int) -> None:
        """Add a holder to any block, even a blank one, whose content the caller knows to be intact."""
        if not self._holders[block]:
            del (self._kept if self._keys[block] else self._blank)[block]
        self._holders[block] += 1

    def use(self, block: int) -> None:
        """Note that the content of a block was used: if it is free, it is reused last."""
        if block in self._kept:
            self._kept.move_to_end(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block. The last one released is reused last, so pass a sequence's in reverse."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is released more often than it was taken"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            (self._kept if self._keys[block] else self._blank)[block] = None

    def name(self, block: int, key: bytes) -> None:
        """Give a block another key; its content must not change any more. Does nothing if the key is in use."""
        if key in self._by_key:
            return
        self._by_key[key] = block
        self._keys[block] += (key,)
        if block in self._blank:
            del self._blank[block]
            self._kept[block] = None

    def forget(self, block: int) -> None:
        """Remove the keys of a block; if it is held, it stays held."""
        self._remove_keys(block)
        if block in self._kept:
            del self._kept[block]
            self._blank[block] = None

    def forget_all(self) -> None:
        """Remove the keys of all blocks."""
        for block in range(self.num_blocks):
            self.forget(block)

    def _remove_keys(self, block: int) -> None:
        for key in self._keys[block]:
            del self._by_key[key]
        self._keys[block] = ()

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless every block is in one place, and its holders are those of `tables`."""
        count = [0] * self.num_blocks
        for table in tables:
            for block in table:
                count[block] += 1
        if count != self._holders:
            raise AssertionError(f"holders are {count}, counted are {self._holders}")
        free = sorted([*self._blank, *self._kept])
        if free != [block for block in range(self.num_blocks) if not count[block]]:
            raise AssertionError(f"free are {free}, with holders {count}")
        if any(self._keys[block] for block in self._blank):
            raise AssertionError("a blank block has a key")
        named = {key: block for block, keys in enumerate(self._keys) for key in keys}
        if named != self._by_key or not all(self._keys[block] for block in self._kept):
            raise AssertionError(f"blocks are named {named}, found by {self._by_key}")
