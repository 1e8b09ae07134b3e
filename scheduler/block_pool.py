"""Pages of KV shared by requests: who holds each, which are free, and what the free ones still hold.

A page is in one of three places: held, with a count of its holders; free and blank; or free and kept, still found by
the key of its content until it is given out again, the longest unused first (the scheme of vLLM's block pool). Every
operation on a page takes constant time. The pool does not touch memory: what is to be copied it says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class OutOfBlocksError(RuntimeError):
    """Too few pages are free; nothing was taken."""


class BlockPool:
    """`num_blocks` pages of `block_size` tokens. watermark: pages that admission leaves free, for rows to grow into.

    Raises ValueError for sizes that make no pool.
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
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._blank = list(reversed(range(num_blocks)))  # a stack
        self._kept: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._blank) + len(self._kept)

    def blocks_for(self, tokens: int) -> int:
        """Pages that `tokens` take."""
        return -(-tokens // self.block_size)

    def never_fits(self, tokens: int) -> str | None:
        """Why a request of `tokens` in all can never run, with the arithmetic; None if it can."""
        most = self.num_blocks - self.watermark
        needed = self.blocks_for(tokens)
        if needed <= most:
            return None
        return (
            f"{tokens} tokens take {needed} blocks of {self.block_size}; the pool has {self.num_blocks} and keeps "
            f"{self.watermark} free, so {most * self.block_size} tokens are the most"
        )

    def can_admit(self, blocks: int, kept: Iterable[int] = ()) -> bool:
        """Whether a newcomer may take `blocks` pages, of which it would share `kept` free ones as they are."""
        revived = sum(1 for block in kept if not self._holders[block])
        return self.num_free - revived - blocks >= self.watermark

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, blank ones first; each has one holder. Raises OutOfBlocksError."""
        if count > self.num_free:
            raise OutOfBlocksError(
                f"{count} blocks are wanted and {self.num_free} of {self.num_blocks} are free"
            )
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def find(self, key: bytes) -> int | None:
        """The page that holds what `key` names, held or free."""
        return self._by_key.get(key)

    def share(self, block: int) -> None:
        """One more holder of a page that was found or is held."""
        if not self._holders[block]:
            del self._kept[block]  # KeyError: a blank page holds nothing to share
        self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder fewer of each. Freed last is kept longest, so give the pages of a sequence from its end."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is released more often than it was taken"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if self._key[block] is None:
                self._blank.append(block)
            else:
                self._kept[block] = None

    def name(self, block: int, key: bytes) -> None:
        """A page that is held is full now and will not change: find it by `key`. A key that is taken stays."""
        assert self._holders[block] > 0, f"block {block} is nobody's"
        if key not in self._by_key:
            self._forget(block)
            self._by_key[key], self._key[block] = block, key

    def own(self, block: int) -> tuple[int, bool]:
        """The page to write in place of one that is held: itself, or a copy if others hold it or may find it.

        Returns the page and whether the content has to be copied there first. Raises OutOfBlocksError.
        """
        if self._holders[block] == 1 and self._key[block] is None:
            return block, False
        (fresh,) = self.allocate(1)
        self.release([block])
        return fresh, True

    def forget_all(self) -> None:
        """No page is found any more; what is held stays held."""
        for block in range(self.num_blocks):
            self._forget(block)
        self._blank.extend(self._kept)
        self._kept.clear()

    def _forget(self, block: int) -> None:
        key, self._key[block] = self._key[block], None
        if key is not None:
            del self._by_key[key]

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Raise AssertionError unless every page is in one place, with the holders that the tables in `held` say."""
        count = [0] * self.num_blocks
        for table in held:
            for block in table:
                count[block] += 1
        if count != self._holders:
            raise AssertionError(f"holders are {count}, counted are {self._holders}")
        free = sorted([*self._blank, *self._kept])
        if free != [block for block in range(self.num_blocks) if not count[block]]:
            raise AssertionError(f"free are {free}, with holders {count}")
        if any(self._key[block] is not None for block in self._blank):
            raise AssertionError("a blank page has a key")
        named = {key: block for block, key in enumerate(self._key) if key is not None}
        if named != self._by_key or any(self._key[block] is None for block in self._kept):
            raise AssertionError(f"pages are named {named}, found by {self._by_key}")
