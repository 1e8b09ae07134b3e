"""Saved states of recurrent layers by prefix: a prompt can begin after a prefix only where such a state exists.

A recurrent state exists at the current end of a request alone, so copies are saved at the multiples of
`mamba_block_size`, in a fixed number of places on the device. These are also multiples of the chunk size, where every
prompt is cut whatever the load; therefore neither saving a state nor beginning with it changes a bit.

A state gets its key when the plan that saves it has been made. Within a plan, states are restored before chunks run
and saved after them, so a lookup never finds a state that is not there yet or is overwritten first.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator

from xla_engine.scheduler.kv.block_hashes import BlockHashes
from xla_engine.scheduler.plan import SavedState
from xla_engine.scheduler.request_state import RequestState


class PrefixStates:
    """At most `places` saved states, one at each multiple of `interval` tokens; the least recently used goes first.

    hashes: those of the prefix cache. interval: a multiple of their block size.
    """

    def __init__(self, places: int, interval: int, hashes: BlockHashes) -> None:
        self._interval = interval
        self._hashes = hashes
        self._free = list(range(places))
        self._places: OrderedDict[bytes, int] = OrderedDict()  # by key, least recently used first
        self._count = places

    def usable(self, state: RequestState, cached: int, coming: Collection[bytes] = ()) -> int:
        """How many of a context's first `cached` tokens can be reused: up to the last saved state among them.

        The last token of the context is never among them, nor is any beyond `max_cached_tokens`. coming: keys that
        count as saved.
        """
        most = state.request.max_cached_tokens
        last = min(cached, state.context_tokens - 1, *(() if most is None else (most,)))
        for length in range(last // self._interval * self._interval, 0, -self._interval):
            key = self._key(state, length)
            if key in self._places or key in coming:
                return length
        return 0

    def restore(self, state: RequestState, length: int) -> int:
        """The place of the state after a context's first `length` tokens, which were found `usable`."""
        self._use(state, length)
        return self._places[self._key(state, length)]

    def keys(self, state: RequestState, begun: int) -> list[bytes]:
        """Keys of the states that a context passes between its first `begun` tokens and those prefilled."""
        return [self._key(state, length) for length in self._lengths(begun, state.prefilled)]

    def save(self, state: RequestState, begun: int) -> Iterator[SavedState]:
        """Let the plan being made save the states after which a context has moved from its first `begun` tokens to
        those prefilled, unless they are saved already."""
        for length in self._lengths(begun, state.prefilled):
            key = self._key(state, length)
            if key not in self._places:
                place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
                self._places[key] = place
                yield SavedState(slot=state.slot, length=length, place=place)
        self._use(state, state.prefilled)

    def discard(self, state: RequestState) -> None:
        """Forget the states of a failed request's context."""
        for length in self._lengths(0, state.context_tokens):
            if (place := self._places.pop(self._key(state, length), None)) is not None:
                self._free.append(place)

    def clear(self) -> None:
        """Forget everything."""
        self._free = list(range(self._count))
        self._places.clear()

    def check(self) -> None:
        """Raise AssertionError unless every place is free or has one key."""
        if sorted((*self._free, *self._places.values())) != list(range(self._count)):
            raise AssertionError(f"free places {self._free} and {list(self._places.values())} are not all")

    def _use(self, state: RequestState, length: int) -> None:
        """Note that a context's states up to `length` tokens are in use. Of them, the longest is overwritten first,
        because fewer prompts share it."""
        for shorter in reversed(self._lengths(0, length)):
            if (key := self._key(state, shorter)) in self._places:
                self._places.move_to_end(key)

    def _lengths(self, begun: int, end: int) -> range:
        """The multiples of the interval above `begun`, up to `end`."""
        return range((begun // self._interval + 1) * self._interval, end + 1, self._interval)

    def _key(self, state: RequestState, length: int) -> bytes:
        return self._hashes.of_context(state)[length // self._hashes.block_size - 1]
