"""Blocks of KV that slots borrow: how many a request gets when, and which of them it shares.

A request is admitted with blocks for its context and one position more; a row that decodes gets its next block in the
plan that first writes to it. With the prefix cache, blocks are found by the keys of `scheduler.kv.block_hashes`: whole
ones are shared, and one that is of use in part is copied. So each block has one writer, and none once it is full.

When blocks run out, the last in line loses its own. So the first in line of those that hold any keeps them, and since
each request can have all it needs when it is alone, in every step some request gets nearer to its end for good. No
request goes before the head of the queue: with k requests before it in line, one waits for at most k + max_num_seqs
others to run from beginning to end.

A block is named when the plan that fills it has been made. The device runs plans in order, and in each the copies
before all that writes; so what is found cannot be stale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.block_hashes import BlockHashes
from xla_engine.scheduler.kv.block_pool import BlockPool
from xla_engine.scheduler.plan import BlockCopy, BlockTable, Slot, Swap
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState

_WATERMARK = 100  # one block in so many is left free by admission, as by default in vLLM


class BlockManager:
    """The pool, what requests hold of it, and the steps in which rows need more.

    Raises ValueError for sizes that make no pool.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.num_blocks is not None
        self.pool = BlockPool(config.num_blocks, config.block_size, config.num_blocks // _WATERMARK)
        self._config = config
        self._block_size = config.block_size
        self._hashes = BlockHashes(config.block_size, config.cache_key, tails=True)
        self._due: dict[int, list[tuple[RequestState, Slot]]] = {}  # by step, stale ones among them
        self._copies: list[BlockCopy] = []
        self._tables: list[BlockTable] = []

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have blocks enough, with the arithmetic; None if it can when it is alone."""
        return self.pool.never_fits(prompt_tokens + max_tokens - 1)

    def missing(self, state: RequestState) -> str | None:
        """Why a request that waits cannot have its blocks now, in words; None if it can."""
        needed = self._first_blocks(state)
        if state.goes_on:
            left = self.left_by(state) or []
            short = not self.pool.can_admit(needed - len(left), left)
            return f"needs {needed - len(left)} blocks beside those it has left" if short else None
        if self.pool.can_admit(needed):
            return None
        shared = self._found(state)[: self._usable(state) // self._block_size]
        if self.pool.can_admit(needed - len(shared), shared):
            return None
        return f"needs {needed - len(shared)} blocks; {self.pool.num_free} of {self.pool.num_blocks} are free"

    def suffices_without(self, others: Iterable[RequestState], state: RequestState) -> bool:
        """Whether there would be blocks enough for a request, shared or not, if all of `others` gave theirs up."""
        gained = self.pool.freed_by(other.blocks for other in others)
        return self._first_blocks(state) + self.pool.watermark <= self.pool.num_free + gained

    def enter(self, state: RequestState) -> None:
        """Give a request that got a slot its blocks: those found that are of use, and fresh ones."""
        needed, found, length = self._first_blocks(state), self._found(state), self._usable(state)
        whole = length // self._block_size
        for block in found[:whole]:
            self.pool.share(block)
        state.blocks = (*found[:whole], *self.pool.allocate(needed - whole))
        state.settled, state.ready, state.left = whole, length, ()
        self._copy_part(state, found, length)
        self._show(state)

    def resume(self, state: RequestState, length: int) -> Swap:
        """Where the state of a request that has entered comes back to: all its blocks but those it shares."""
        own = state.blocks[state.settled : self.pool.blocks_for(length)]
        blocks = (*(-1 for _ in range(state.settled)), *own)
        return Swap(slot=state.slot, request_id=state.request_id, length=length, blocks=blocks)

    def left_by(self, state: RequestState) -> list[int] | None:
        """The blocks of a request that has ended, in order, where all hold what it wrote; None where one does not."""
        count = self.pool.blocks_for(state.prompt_tokens + state.credited - 1)
        first = min(state.left[0][0] if state.left else count, count)
        keys = self._hashes.of_all(state)[:first] if first else ()
        shared = [block for key in keys if (block := self.pool.find(key)) is not None]
        own = [
            block for at, block, taken in state.left if at < count and self.pool.times_taken(block) == taken
        ]
        return [*shared, *own] if (len(shared), len(own)) == (first, count - first) else None

    def go_on(self, state: RequestState) -> None:
        """Give a request that goes on in its slot the blocks it has left, and more to write to."""
        left = self.left_by(state)
        assert left is not None, f"the blocks of {state.request_id!r} were overwritten"
        for block in left:
            self.pool.take_again(block)
        state.blocks = (*left, *self.pool.allocate(self._first_blocks(state) - len(left)))
        state.settled = (state.prompt_tokens + state.credited - 1) // self._block_size
        state.ready, state.left = 0, ()
        self._show(state)

    def runs(self, state: RequestState, step: int) -> None:
        """Note when a request, which decodes from `step` on, one position in each step, needs its next block."""
        room = len(state.blocks) * self._block_size
        if room < _positions(state):
            self._due.setdefault(step + room - state.position(step), []).append((state, state.slot))

    def due(self, step: int) -> list[RequestState]:
        """The requests that write behind their blocks in `step`."""
        found = {
            id(state): state
            for state, slot in self._due.pop(step, ())
            if state.holds_slot and state.slot is slot and state.last_step is not None
        }
        return [state for state in found.values() if self.is_short(state, step)]

    def is_short(self, state: RequestState, step: int) -> bool:
        """Whether a request would write behind its blocks in `step`."""
        return self.room(state, step) < 1

    def room(self, state: RequestState, step: int) -> int:
        """How many positions a request can write in `step`."""
        return len(state.blocks) * self._block_size - min(state.position(step), _positions(state) - 1)

    def can_use_more(self, state: RequestState) -> bool:
        """Whether a request will write to more blocks than it has."""
        return len(state.blocks) * self._block_size < _positions(state)

    @property
    def next_due(self) -> int | None:
        """The first step in which a running request may need a block; None when none will."""
        return min(self._due, default=None)

    def grow(self, state: RequestState, step: int) -> bool:
        """Give a request one block more, to which it writes first in `step`; False where none is free."""
        if not self.pool.num_free:
            return False
        start = len(state.blocks)
        fresh = (self.pool.take(),)
        self._tables.append(
            BlockTable(slot=state.slot, request_id=state.request_id, blocks=fresh, start=start)
        )
        state.blocks += fresh
        if state.last_step is not None and (start + 1) * self._block_size < _positions(state):
            self._due.setdefault(step + self._block_size, []).append((state, state.slot))
        return True

    def leave(self, state: RequestState) -> None:
        """Take back a request's blocks; the end of a sequence is given out again first."""
        if (self._config.keeps_tokens or self._config.keeps_finished) and state.status is Status.RUNNING:
            state.left = tuple(
                (at, block, self.pool.times_taken(block))
                for at, block in enumerate(state.blocks[state.settled :], state.settled)
            )
        self.pool.release(reversed(state.blocks))
        self._tables = [table for table in self._tables if table.slot != state.slot]
        state.blocks, state.settled = (), 0

    def take_moves(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockTable, ...]]:
        """The copies of the plan being made, and the tables that are new in it."""
        moves = tuple(self._copies), tuple(self._tables)
        self._copies.clear()
        self._tables.clear()
        return moves

    def match(self, state: RequestState, own: int | None = None) -> tuple[int, int]:
        """(-1, tokens): how many tokens of a request's context are in blocks that are found, or shared already."""
        return -1, min(len(self._found(state)) * self._block_size, state.context_tokens)

    def known(self, state: RequestState, coming: Collection[bytes]) -> int:
        """How many tokens of a request's context are in blocks that are found, or among those `coming`."""
        keys = self._hashes.of_context(state)
        count = state.settled
        while count < len(keys) and (keys[count] in coming or self.pool.find(keys[count]) is not None):
            count += 1
        return min(count * self._block_size, state.context_tokens)

    def written(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks that the plans so far fill, or the context fills in part."""
        return self._hashes.of_context(state)[: self._filled(state, state.prefilled)]

    def begin(self, state: RequestState, length: int) -> None:
        """A request begins behind `length` tokens of its context: what was found when it entered, or more by now."""
        if length == state.ready:
            return
        found, blocks, whole = self._found(state), list(state.blocks), length // self._block_size
        for at in range(state.settled, whole):
            self.pool.share(found[at])
            self.pool.release([blocks[at]])
            blocks[at] = found[at]
        state.blocks, state.settled = tuple(blocks), whole
        self._copy_part(state, found, length)
        self._show(state)

    def extend(self, state: RequestState, length: int) -> None:
        """The first `length` tokens of a request's context are in its blocks once the plan being made has run."""
        keys = self._hashes.of_context(state)
        for at in range(state.settled, self._filled(state, length)):
            self.pool.name(state.blocks[at], keys[at])
        state.settled = length // self._block_size

    def end(self, state: RequestState) -> None:
        """A request has left or is about to: name the blocks it filled by what it generated, if they are untouched.

        The last token is left out, as its keys and values are written when the next one is sampled.
        """
        if state.status is Status.PREFILLING:
            return
        full = (state.prompt_tokens + len(state.generated) - 1) // self._block_size
        blocks = [block for block in self._own(state) if block[0] < full]
        if blocks:
            keys = self._hashes.of_all(state)
            for at, block in blocks:
                self.pool.name(block, keys[at])

    def discard(self, state: RequestState) -> None:
        """Forget what a request has left: it is not fit for use."""
        for block in (*state.blocks[: state.settled], *(block for _, block in self._own(state))):
            self.pool.forget(block)

    def check(self, states: Iterable[RequestState], step: int) -> None:
        """Raise AssertionError unless every block is accounted for, and rows have what they write to."""
        states = list(states)
        self.pool.check(state.blocks for state in states)
        due = {id(state) for day, dated in self._due.items() if day >= step for state, slot in dated}
        for state in states:
            if state.holds_slot != bool(state.blocks) or state.settled > len(state.blocks):
                raise AssertionError(f"has a slot or blocks, not both: {state}")
            if any(self.pool.holders(block) != 1 for block in state.blocks[state.settled :]):
                raise AssertionError(f"a block that it writes to is shared: {state}")
            if state.status is not Status.RUNNING or not state.holds_slot:
                continue
            room = len(state.blocks) * self._block_size
            if state.position(step) > room:
                raise AssertionError(f"wrote behind its blocks: {state}")
            if state.last_step is not None and room < _positions(state) and id(state) not in due:
                raise AssertionError(f"is not due to get more blocks: {state}")

    def _first_blocks(self, state: RequestState) -> int:
        """Blocks to begin or go on with: one position is written in the very step that the context is complete.

        A request that lost its slot gets all it had, so that it does not lose it again for the same block.
        """
        known = max(state.parked, state.prompt_tokens + state.credited, state.reached)
        return self.pool.blocks_for(min(known + 1, _positions(state)))

    def _found(self, state: RequestState) -> list[int]:
        """The blocks that hold the beginning of a request's context; those that it shares already come first."""
        found = list(state.blocks[: state.settled])
        for key in self._hashes.of_context(state)[len(found) :]:
            block = self.pool.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def _usable(self, state: RequestState) -> int:
        """How many tokens of a request that waits are found and need not come from elsewhere, if it gets in now."""
        config, context = self._config, state.context_tokens
        most = state.request.max_cached_tokens
        if not config.enable_prefix_caching or most == 0:
            return 0
        cached = min(len(self._found(state)) * self._block_size, context, context if most is None else most)
        if state.status is Status.PARKED:
            return cached // self._block_size * self._block_size
        return policy.usable_prefix(
            cached, context, config.chunk_size, cut_invariant=config.cut_invariant, most=most
        )

    def _copy_part(self, state: RequestState, found: list[int], length: int) -> None:
        """Copy a block that is of use in part, since the request writes the rest of it.

        The copy is made before anything else in the plan, whatever becomes of the source.
        """
        whole, part = divmod(length, self._block_size)
        if part and found[whole] != state.blocks[whole]:
            self._copies.append(BlockCopy(source=found[whole], target=state.blocks[whole]))

    def _filled(self, state: RequestState, length: int) -> int:
        """How many blocks have a key when `length` tokens of the context are written."""
        return self.pool.blocks_for(length) if length == state.context_tokens else length // self._block_size

    def _own(self, state: RequestState) -> list[tuple[int, int]]:
        """(index, block) of the blocks that only this request has written, without those written by others since."""
        if state.blocks:
            return list(enumerate(state.blocks))[state.settled :]
        return [(at, block) for at, block, taken in state.left if self.pool.times_taken(block) == taken]

    def _show(self, state: RequestState) -> None:
        self._tables.append(BlockTable(slot=state.slot, request_id=state.request_id, blocks=state.blocks))


def _positions(state: RequestState) -> int:
    """Positions that a request writes in all: those of all its tokens but the last."""
    return state.prompt_tokens + state.request.max_tokens - 1
