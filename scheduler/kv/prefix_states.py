"""Saved states of recurrent layers by prefix, for prompts in slots and in blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from xla_engine.scheduler.kv.block_pool import BlockPool
from xla_engine.scheduler.kv.prefix_cache import BlockHashes, state_after
from xla_engine.scheduler.moves import SavedState, StoredBlock
from xla_engine.scheduler.request_state import RequestState


class PrefixStates:
    """A prompt can begin after a prefix only where a state was saved.

    A recurrent state exists at the current end of a request alone, so copies are saved at the multiples of `interval`
    (`mamba_block_size`), in `places` places on the device; the least recently used goes first. The multiples are also
    multiples of the chunk size, where every prompt is cut whatever the load; therefore neither saving a state nor
    beginning with it changes a bit.

    A state gets its key, that of the block which ends there, when the plan that saves it has been made. Within a plan,
    states are restored before chunks run and saved after them, so a lookup never finds a state that is not there yet
    or is overwritten first. A request that gets cached blocks before it begins holds the state that it will begin
    with, as it holds these blocks. If all places are held, no state is saved.

    pool: the places, by the keys of their states.
    hashes: those of the prefix cache. interval: a multiple of their block size.
    """

    def __init__(self, places: int, interval: int, hashes: BlockHashes) -> None:
        self.pool = BlockPool(places, interval)
        self._interval = interval
        self._hashes = hashes

    def usable(self, state: RequestState, cached: int, coming: Collection[bytes] = ()) -> int:
        """How many of a context's first `cached` tokens can be reused: up to the last saved state among them.

        The last token of the context is never among them, nor is any beyond `max_cached_tokens`. coming: keys that
        count as saved.
        """
        most = state.request.max_cached_tokens
        last = min(cached, state.context_tokens - 1, *(() if most is None else (most,)))
        for length in reversed(self._lengths(0, last)):
            key = self._key(state, length)
            if key in coming or self.pool.find(key) is not None:
                return length
        return 0

    def hold(self, state: RequestState, length: int) -> None:
        """Keep the state after a context's first `length` tokens, which were found `usable`, until the request begins
        or leaves; nothing if there are none."""
        if length:
            state.place = self.place(state, length)
            self.pool.share(state.place)

    def place(self, state: RequestState, length: int) -> int:
        """The place of the state after a context's first `length` tokens, which were found `usable`."""
        if state.place >= 0 and length == state.ready:
            return state.place
        place = self.pool.find(self._key(state, length))
        assert place is not None, f"no state is saved after {length} tokens of {state.request_id!r}"
        return place

    def restore(self, state: RequestState, length: int) -> int:
        """`place`, for the last time: the state is held no longer."""
        place = self.place(state, length)
        self.release(state)
        self._use(state, length)
        return place

    def release(self, state: RequestState) -> None:
        """Let go of the state that a request holds, if it holds one."""
        if state.place >= 0:
            self.pool.release([state.place])
            state.place = -1

    def keys(self, state: RequestState, begun: int) -> list[bytes]:
        """Keys of the states that a context passes between its first `begun` tokens and those prefilled."""
        return [self._key(state, length) for length in self._lengths(begun, state.prefilled)]

    def save(self, state: RequestState, begun: int) -> Iterator[SavedState]:
        """Let the plan being made save the states after which a context has moved from its first `begun` tokens to
        those prefilled, unless they are saved already."""
        for length in self._lengths(begun, state.prefilled):
            key = self._key(state, length)
            if (place := self.make_place(key)) is not None:
                yield SavedState(slot=state.slot, length=length, place=place)
        self._use(state, state.prefilled)

    def make_place(self, key: bytes) -> int | None:
        """A place for the state with this key; None if it has one, or if all are held."""
        if self.pool.find(key) is not None or not self.pool.num_free:
            return None
        place = self.pool.take()
        self.pool.name(place, key)
        self.pool.release([place])
        return place

    def last(self, blocks: Sequence[StoredBlock], end: int, has: Callable[[StoredBlock], bool]) -> int:
        """How many of a prompt's first blocks come before the last state, after at most `end` tokens, that is saved or
        that `has` a place elsewhere."""
        size = self._hashes.block_size
        for length in reversed(self._lengths(0, min(end, size * len(blocks)))):
            key = blocks[length // size - 1].key
            if self.pool.find(key) is not None or has(state_after(key)):
                return length // size
        return 0

    def discard(self, state: RequestState) -> None:
        """Forget the states of a failed request's context."""
        for length in self._lengths(0, state.context_tokens):
            if (place := self.pool.find(self._key(state, length))) is not None:
                self.pool.forget(place)

    def check(self, states: Iterable[RequestState]) -> None:
        """Raise AssertionError unless every place is accounted for."""
        self.pool.check([state.place] for state in states if state.place >= 0)

    def _use(self, state: RequestState, length: int) -> None:
        """Note that a context's states up to `length` tokens are in use. Of them, the longest is overwritten first,
        because fewer prompts share it."""
        for shorter in reversed(self._lengths(0, length)):
            if (place := self.pool.find(self._key(state, shorter))) is not None:
                self.pool.use(place)

    def _lengths(self, begun: int, end: int) -> range:
        """The multiples of the interval above `begun`, up to `end`."""
        return range((begun // self._interval + 1) * self._interval, end + 1, self._interval)

    def _key(self, state: RequestState, length: int) -> bytes:
        return self._hashes.of_context(state)[length // self._hashes.block_size - 1]
