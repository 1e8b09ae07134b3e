"""Blocks: adversarial sequences of requests that grow, fork, share prefixes, end and return in a small pool."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from xla_engine.scheduler.kv.block_pool import BlockPool, OutOfBlocksError


def keys(tokens: Sequence[int], size: int) -> list[bytes]:
    key, found = b"", []
    for start in range(0, len(tokens) - size + 1, size):
        key = hashlib.sha256(key + repr(tuple(tokens[start : start + size])).encode()).digest()
        found.append(key)
    return found


@dataclass
class Held:
    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


class Store:
    """Sequences over a pool with real memory behind it: reading a table gives the sequence's tokens."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.memory: list[list[int]] = [[] for _ in range(pool.num_blocks)]
        self.live: list[Held] = []
        self.hits = self.copies = self.refused = 0

    def admit(self, prompt: list[int]) -> bool:
        pool, size = self.pool, self.pool.block_size
        shared = []
        for key in keys(prompt[:-1], size):
            block = pool.find(key)
            if block is None:
                break
            shared.append(block)
        needed = pool.blocks_for(len(prompt)) - len(shared)
        if not pool.can_admit(needed, shared):
            self.refused += 1
            return False
        for block in shared:
            pool.share(block)
        self.hits += len(shared)
        sequence = Held(prompt[: len(shared) * size], list(shared))
        self.check(sequence)
        sequence.table += pool.allocate(needed)
        self.live.append(sequence)
        for token in prompt[len(shared) * size :]:
            self.write(sequence, token)
        return True

    def grow(self, sequence: Held, token: int) -> bool:
        """Append a token in a private block; False, without any change, if the pool has none."""
        try:
            at, inside = divmod(len(sequence.tokens), self.pool.block_size)
            if not inside:
                sequence.table += self.pool.allocate(1)
            else:
                old = sequence.table[at]
                if self.pool.holders(old) > 1:
                    (sequence.table[at],) = self.pool.allocate(1)
                    self.pool.release([old])
                    self.copies += 1
                    self.memory[sequence.table[at]] = list(self.memory[old])
        except OutOfBlocksError:
            return False
        self.write(sequence, token)
        return True

    def write(self, sequence: Held, token: int) -> None:
        at, inside = divmod(len(sequence.tokens), self.pool.block_size)
        block = sequence.table[at]
        self.memory[block] = [*self.memory[block][:inside], token]
        sequence.tokens.append(token)
        if inside + 1 == self.pool.block_size:
            self.pool.name(block, keys(sequence.tokens, self.pool.block_size)[at])

    def fork(self, sequence: Held) -> None:
        for block in sequence.table:
            self.pool.share(block)
        self.live.append(Held(list(sequence.tokens), list(sequence.table)))

    def end(self, sequence: Held) -> None:
        self.live.remove(sequence)
        self.pool.release(reversed(sequence.table))

    def check(self, sequence: Held) -> None:
        read = [token for block in sequence.table for token in self.memory[block]]
        assert read[: len(sequence.tokens)] == sequence.tokens, "a block was overwritten, or a hit was stale"


def adversary(draw: random.Random, steps: int = 60) -> Store:
    pool = BlockPool(draw.randint(2, 12), draw.choice((1, 2, 4)), draw.choice((0, 1)))
    store = Store(pool)
    stems = [[draw.randrange(3) for _ in range(20)] for _ in range(2)]
    for _ in range(steps):
        match draw.choice(("admit", "admit", "grow", "grow", "grow", "fork", "end", "forget")):
            case "admit":
                prompt = [*draw.choice(stems)[: draw.randint(0, 20)], draw.randrange(3)]
                if pool.never_fits(len(prompt)) is None:
                    store.admit(prompt)
            case "grow" if store.live:
                grown = draw.choice(store.live)
                if not store.grow(grown, draw.randrange(3)):
                    assert pool.num_free == 0
                    store.end(store.live[-1])  # the last in line makes room
            case "fork" if store.live:
                store.fork(draw.choice(store.live))
            case "end" if store.live:
                store.end(draw.choice(store.live))
            case "forget" if draw.random() < 0.1:
                pool.forget_all()
        pool.check(sequence.table for sequence in store.live)
        for sequence in store.live:
            store.check(sequence)
    return store


def check_all(seeds: range) -> None:
    stores = []
    for seed in seeds:
        store = adversary(random.Random(seed))
        for sequence in list(store.live):
            store.end(sequence)
        store.pool.check([])
        assert store.pool.num_free == store.pool.num_blocks, "a block leaked"
        stores.append(store)
    assert sum(store.hits for store in stores) > len(stores)
    assert sum(store.copies for store in stores) > len(stores) / 4
    assert sum(store.refused for store in stores) > len(stores)


def test_no_page_is_lost_shared_unawares_or_found_stale() -> None:
    check_all(range(1500))


@pytest.mark.release
def test_ten_thousand_sequences_of_pages() -> None:
    check_all(range(10_000, 20_000))


def test_the_longest_unused_page_goes_first_and_blank_ones_before() -> None:
    pool = BlockPool(3, 4)
    first, second = pool.allocate(2)
    pool.name(first, b"first")
    pool.name(second, b"second")
    pool.release([first])
    pool.release([second])
    (blank,) = pool.allocate(1)
    assert pool.find(b"first") == first and blank not in (first, second)
    assert pool.allocate(1) == [first] and pool.find(b"first") is None and pool.find(b"second") == second


def test_a_page_that_is_held_is_never_given_out() -> None:
    pool = BlockPool(2, 4)
    held = pool.allocate(2)
    for block, key in zip(held, (b"a", b"b"), strict=True):
        pool.name(block, key)
    with pytest.raises(OutOfBlocksError, match="1 blocks are wanted and 0 of 2 are free"):
        pool.allocate(1)
    pool.check([held])


def test_sharing_adds_a_holder_and_releasing_takes_one() -> None:
    """Once, sharing set the count to one, and the eviction of one owner freed the block of all."""
    pool = BlockPool(2, 4)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([block])


def test_what_can_never_fit_is_said_with_the_arithmetic() -> None:
    pool = BlockPool(10, 16, watermark=2)
    assert pool.never_fits(128) is None
    assert pool.never_fits(129) == (
        "129 tokens take 9 blocks of 16; the pool has 10 and keeps 2 free, so 128 tokens are the most"
    )
    with pytest.raises(ValueError, match="a watermark below the number of blocks"):
        BlockPool(4, 16, watermark=4)
