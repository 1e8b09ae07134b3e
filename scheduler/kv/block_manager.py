"""How KV blocks are assigned to requests: how many, when, and which are shared.

A request is admitted with blocks for its context plus one position. A decoding row gets its next block in the plan
that first writes to it. With prefix caching, blocks are found by the keys of `scheduler.kv.prefix_cache`: full blocks
are shared, and a block that matches in part is copied. So each block has one writer, and none once it is full.

When blocks run out, the last request in line is preempted. The first in line therefore keeps its blocks, and since
each request fits alone, some request makes lasting progress in every step. No request passes the head of the queue:
with k requests before it, a request waits for at most k + max_num_seqs others to run from beginning to end.

A block gets its key when the plan that fills it has been made. The device runs plans in order, and within a plan
copies run before writes, so a lookup never finds stale content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import islice

from xla_engine.scheduler import policy
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.block_pool import BlockPool
from xla_engine.scheduler.kv.prefix_cache import BlockHashes, state_after
from xla_engine.scheduler.kv.prefix_states import PrefixStates
from xla_engine.scheduler.moves import BlockCopy, BlockTable, Slot, StoredBlock, Swap
from xla_engine.scheduler.request import Request, Status
from xla_engine.scheduler.request_state import RequestState

_WATERMARK = 100  # admission leaves one block in so many free, as vLLM does by default


class BlockManager:
    """The pool, the blocks of requests, and the steps in which rows need more.

    hashes: with keys for tails. states: the saved states of recurrent layers, which limit what can be reused of cached
        blocks; None if there are none.

    Raises ValueError for invalid sizes.
    """

    def __init__(
        self, config: SchedulerConfig, hashes: BlockHashes, states: PrefixStates | None = None
    ) -> None:
        assert config.num_blocks is not None
        self.pool = BlockPool(config.num_blocks, config.block_size, config.num_blocks // _WATERMARK)
        self._config = config
        self._block_size = config.block_size
        self._hashes = hashes
        self._states = states
        self._due: dict[int, list[tuple[RequestState, Slot]]] = {}  # by step; some entries are stale
        self._copies: list[BlockCopy] = []
        self._tables: list[BlockTable] = []
        self._stores: list[StoredBlock] = []  # written before the plan being made
        self._later_stores: list[StoredBlock] = []  # perhaps written by it
        self._loads: list[StoredBlock] = []
        self._known_outside: set[bytes] = set()  # keys that were stored or loaded

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have enough blocks, with the arithmetic; None if it fits alone."""
        return self.pool.never_fits(prompt_tokens + max_tokens - 1)

    def missing(self, state: RequestState) -> str | None:
        """Why a waiting request cannot have its blocks now; None if it can."""
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
        """Whether a request would have enough blocks, even without sharing, if all of `others` gave up theirs."""
        gained = self.pool.freed_by(other.blocks for other in others)
        return self._first_blocks(state) + self.pool.watermark <= self.pool.num_free + gained

    def enter(self, state: RequestState) -> None:
        """Give a request that got a slot its blocks: cached ones that it can reuse, and new ones."""
        needed, shared, length = self._first_blocks(state), self._found(state), self._usable(state)
        whole = length // self._block_size
        for block in shared[:whole]:
            self.pool.share(block)
        state.blocks = (*shared[:whole], *self.pool.allocate(needed - whole))
        state.settled, state.ready, state.left = whole, length, ()
        if self._states is not None and state.status is Status.WAITING:
            self._states.hold(state, length)
        self._store(state, self._stores)
        self._copy_part(state, shared, length)
        self._show(state)

    def resume(self, state: RequestState, length: int) -> Swap:
        """The move of a request's state from the host to its blocks, except those it shares."""
        own = state.blocks[state.settled : self.pool.blocks_for(length)]
        blocks = (*(-1 for _ in range(state.settled)), *own)
        return Swap(slot=state.slot, request_id=state.request_id, length=length, blocks=blocks)

    def left_by(self, state: RequestState) -> list[int] | None:
        """The blocks of a finished request, in order, if all still hold what it wrote; otherwise None."""
        count = self.pool.blocks_for(state.prompt_tokens + state.credited - 1)
        first = min(state.left[0][0] if state.left else count, count)
        keys = self._hashes.of_all(state)[:first] if first else ()
        shared = [block for key in keys if (block := self.pool.find(key)) is not None]
        own = [
            block for at, block, taken in state.left if at < count and self.pool.times_taken(block) == taken
        ]
        return [*shared, *own] if (len(shared), len(own)) == (first, count - first) else None

    def go_on(self, state: RequestState) -> None:
        """Give a request that continues in its slot the blocks it had, and more to write to."""
        left = self.left_by(state)
        assert left is not None, f"the blocks of {state.request_id!r} were overwritten"
        for block in left:
            self.pool.take_again(block)
        state.blocks = (*left, *self.pool.allocate(self._first_blocks(state) - len(left)))
        state.settled = (state.prompt_tokens + state.credited - 1) // self._block_size
        state.ready, state.left = 0, ()
        self._show(state)

    def runs(self, state: RequestState, step: int) -> None:
        """Note when a request that decodes from `step` on, one position a step, will need its next block."""
        room = len(state.blocks) * self._block_size
        if room < _positions(state):
            self._due.setdefault(step + room - state.position(step), []).append((state, state.slot))

    def due(self, step: int) -> list[RequestState]:
        """The requests that would write past their blocks in `step`."""
        candidates = {
            id(state): state
            for state, slot in self._due.pop(step, ())
            if state.holds_slot and state.slot is slot and state.last_step is not None
        }
        return [state for state in candidates.values() if self.is_short(state, step)]

    def is_short(self, state: RequestState, step: int) -> bool:
        """Whether a request would write past its blocks in `step`."""
        return self.room(state, step) < 1

    def room(self, state: RequestState, step: int) -> int:
        """How many positions a request can write in `step` without another block."""
        return len(state.blocks) * self._block_size - min(state.position(step), _positions(state) - 1)

    def can_use_more(self, state: RequestState) -> bool:
        """Whether a request will write to more blocks than it has."""
        return len(state.blocks) * self._block_size < _positions(state)

    @property
    def next_due(self) -> int | None:
        """The first step in which a running request may need a block; None if none will."""
        return min(self._due, default=None)

    def grow(self, state: RequestState, step: int) -> bool:
        """Give a request one more block, which it first writes to in `step`; False if none is free."""
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
        """Release a request's blocks, so that those at the end of the sequence are reused first."""
        if (self._config.keeps_tokens or self._config.keeps_finished) and state.status is Status.RUNNING:
            state.left = tuple(
                (at, block, self.pool.times_taken(block))
                for at, block in enumerate(state.blocks[state.settled :], state.settled)
            )
        self.pool.release(reversed(state.blocks))
        self._tables = [table for table in self._tables if table.slot != state.slot]
        state.blocks, state.settled = (), 0

    def take_moves(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockTable, ...]]:
        """Remove and return the copies and new table entries for the plan being made."""
        moves = tuple(self._copies), tuple(self._tables)
        self._copies.clear()
        self._tables.clear()
        return moves

    def take_stored(self) -> tuple[tuple[StoredBlock, ...], tuple[StoredBlock, ...]]:
        """Remove and return the stores and loads for the plan being made, which must not be empty."""
        moves = tuple(self._stores), tuple(self._loads)
        self._stores, self._later_stores = self._later_stores, []
        self._loads.clear()
        return moves

    def full_blocks(self, request: Request) -> Iterable[StoredBlock]:
        """The full blocks of a prompt, in order."""
        return self._hashes.full_blocks(request)

    def missing_blocks(self, request: Request, count: int) -> list[StoredBlock]:
        """Those of the first `count` full blocks of a prompt that the pool lacks, from the first such on; before them
        the state that follows, without which recurrent layers cannot use them, if it is not saved."""
        wanted = list(islice(self.full_blocks(request), count))
        have = next((at for at, block in enumerate(wanted) if self.pool.find(block.key) is None), count)
        missing = wanted[have:]
        if self._states is not None and wanted and self._states.pool.find(wanted[-1].key) is None:
            missing.insert(0, state_after(wanted[-1].key))
        return missing

    def load(self, request: Request, keys: Collection[bytes]) -> tuple[StoredBlock, ...]:
        """Take free blocks for a prompt's `stored_blocks`, and a place for the state after them, which the next plan
        loads; see `Scheduler.load`.

        They are not held: like other cached content, they may be found, or overwritten later. Ends early when only
        the watermark is free.
        """
        taken, before = [], len(self._loads)
        for stored in islice(self.full_blocks(request), request.stored_blocks):
            if (block := self.pool.find(stored.key)) is not None:
                self.pool.share(block)
            elif stored.key in keys and self.pool.can_admit(1):
                block = self.pool.take()
                self.pool.name(block, stored.key)
                self._loads.append(replace(stored, block=block))
                self._known_outside.add(stored.key)
            else:
                break
            taken.append(block)
        else:
            if self._states is not None and taken:
                self._load_state(self._states, stored.key, keys)
        self.pool.release(reversed(taken))
        return tuple(self._loads[before:])

    def _load_state(self, states: PrefixStates, block: bytes, keys: Collection[bytes]) -> None:
        """Take a place for the state after a block, if it is one of `keys`."""
        state = state_after(block)
        if state.key in keys and (place := states.make_place(block)) is not None:
            self._loads.append(replace(state, block=place))
            self._known_outside.add(state.key)

    def _store(self, state: RequestState, stores: list[StoredBlock]) -> None:
        """Let the cached blocks that a request shares be copied out of the pool, once."""
        keys, shared = self._hashes.of_context(state), state.blocks[: state.settled]
        if not self._config.stores_blocks or all(key in self._known_outside for key in keys[: len(shared)]):
            return
        for block, stored in zip(shared, self.full_blocks(state.request), strict=False):
            if stored.key not in self._known_outside:
                self._known_outside.add(stored.key)
                stores.append(replace(stored, block=block))

    def _store_state(self, states: PrefixStates, state: RequestState, length: int) -> None:
        """Let the saved state after a request's first `length` tokens be copied out of its place, once."""
        if not self._config.stores_blocks or length > self._hashes.storable(state.request):
            return
        stored = state_after(self._hashes.of_context(state)[length // self._block_size - 1])
        if stored.key not in self._known_outside:
            self._known_outside.add(stored.key)
            self._stores.append(replace(stored, block=states.place(state, length)))

    def match(self, state: RequestState, own: int | None = None) -> tuple[int, int]:
        """(-1, tokens): how many tokens of a request's context are in cached blocks, or in those it shares already."""
        return -1, min(len(self._found(state)) * self._block_size, state.context_tokens)

    def known(self, state: RequestState, coming: Collection[bytes]) -> int:
        """How many tokens of a request's context are in cached blocks, or in those whose keys are `coming`."""
        keys = self._hashes.of_context(state)
        count = state.settled
        while count < len(keys) and (keys[count] in coming or self.pool.find(keys[count]) is not None):
            count += 1
        return min(count * self._block_size, state.context_tokens)

    def written(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks that the plans so far fill; at the end of the context, also of a partly filled one."""
        return self._hashes.of_context(state)[: self._filled(state, state.prefilled)]

    def begin(self, state: RequestState, length: int) -> None:
        """Begin prefill after the first `length` tokens, which are cached; more may be cached now than at `enter`."""
        if self._states is not None and length:
            self._store_state(self._states, state, length)
        if length == state.ready:
            return
        shared, blocks, whole = self._found(state), list(state.blocks), length // self._block_size
        for at in range(state.settled, whole):
            self.pool.share(shared[at])
            self.pool.release([blocks[at]])
            blocks[at] = shared[at]
        state.blocks, state.settled = tuple(blocks), whole
        self._store(state, self._later_stores)
        self._copy_part(state, shared, length)
        self._show(state)

    def extend(self, state: RequestState, length: int) -> None:
        """Give keys to the blocks that are full once the plan being made has written `length` tokens of a context."""
        keys = self._hashes.of_context(state)
        for at in range(state.settled, self._filled(state, length)):
            self.pool.name(state.blocks[at], keys[at])
        state.settled = length // self._block_size

    def end(self, state: RequestState) -> None:
        """Give keys to the blocks that a leaving request filled with generated tokens, unless they were reused.

        The last token does not count, because its KV entry is only written when the next one is sampled.
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
        """Remove the keys of a failed request's blocks: their content must not be reused."""
        for block in (*state.blocks[: state.settled], *(block for _, block in self._own(state))):
            self.pool.forget(block)

    def check(self, states: Iterable[RequestState], step: int) -> None:
        """Raise AssertionError unless every block is accounted for and rows have the blocks they write to."""
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
        """How many blocks a request needs to enter: one position more than its context, because the step that
        completes the context may write it.

        A preempted request gets as many blocks as it had, so that it is not preempted again for the same block.
        """
        known = max(state.parked, state.prompt_tokens + state.credited, state.reached)
        return self.pool.blocks_for(min(known + 1, _positions(state)))

    def _found(self, state: RequestState) -> list[int]:
        """The blocks with the beginning of a request's context: those that it shares already, then cached ones."""
        blocks = list(state.blocks[: state.settled])
        for key in self._hashes.of_context(state)[len(blocks) :]:
            block = self.pool.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _usable(self, state: RequestState) -> int:
        """How many cached tokens a waiting request could reuse if it entered now."""
        config, context = self._config, state.context_tokens
        most = state.request.max_cached_tokens
        if not config.enable_prefix_caching or most == 0:
            return 0
        cached = min(len(self._found(state)) * self._block_size, context, context if most is None else most)
        if state.status is Status.PARKED:
            return cached // self._block_size * self._block_size
        if self._states is not None:
            return self._states.usable(state, cached)
        return policy.usable_prefix(
            cached,
            context,
            config.chunk_size,
            cut_invariant=config.cut_invariant,
            most=most,
            groups=config.groups(state.request),
        )

    def _copy_part(self, state: RequestState, shared: list[int], length: int) -> None:
        """Copy a block that matches only in part, because the request writes the rest of it.

        The copy runs first in the plan, so it does not matter if the source is overwritten.
        """
        whole, part = divmod(length, self._block_size)
        if part and shared[whole] != state.blocks[whole]:
            self._copies.append(BlockCopy(source=shared[whole], target=state.blocks[whole]))

    def _filled(self, state: RequestState, length: int) -> int:
        """How many blocks have a key once `length` tokens of the context are written."""
        return self.pool.blocks_for(length) if length == state.context_tokens else length // self._block_size

    def _own(self, state: RequestState) -> list[tuple[int, int]]:
        """(index, block) of the blocks that this request has written, without those that were reused since."""
        if state.blocks:
            return list(enumerate(state.blocks))[state.settled :]
        return [(at, block) for at, block, taken in state.left if self.pool.times_taken(block) == taken]

    def _show(self, state: RequestState) -> None:
        self._tables.append(BlockTable(slot=state.slot, request_id=state.request_id, blocks=state.blocks))


def _positions(state: RequestState) -> int:
    """All positions that a request writes: those of all its tokens except the last."""
    return state.prompt_tokens + state.request.max_tokens - 1
