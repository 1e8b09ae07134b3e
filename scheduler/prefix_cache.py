"""What slots hold, found by the tokens it belongs to: requests that begin alike prefill only the rest.

A slot's content is a sequence of tokens whose keys and values lie at its first positions. It is known by keys of its
pages: the SHA-256 of the key of the page before and of the page's own tokens, where what comes before the first page
names model and tenant. Equal keys so mean equal tokens from the beginning on, and what lies behind the last whole page
is compared token by token.

Content is entered when the plan that writes it has been made and struck out when the plan that overwrites it is being
made. The device runs plans in order, and in each the copies before all else; so a hit, which is used in the plan that
looks it up, cannot be stale, and needs no pin.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.plan import Slot
from scheduler.state import RequestState

_HOLDERS_COMPARED = 4  # of one page, for what follows it


@dataclass(slots=True)
class _Content:
    """`tokens[:length]` are in the slot, written under `tenancy`; `keys` are those of its whole pages."""

    tokens: Sequence[int] = ()
    length: int = 0
    keys: tuple[bytes, ...] = ()
    tenancy: Slot | None = None


class PrefixCache:
    """Contents of `slots` slots by pages of `page` tokens. `key`: the model's name."""

    def __init__(self, slots: int, page: int, key: str) -> None:
        self.page = page
        self._key = key
        self._contents = [_Content() for _ in range(slots)]
        self._holders: dict[bytes, dict[int, None]] = {}  # page key to slots, in the order they got it

    def page_keys(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the whole pages of a request's context."""
        if state.page_keys is None:
            state.page_keys = tuple(self._chain(self._root(state), state.context))
        return state.page_keys

    def _root(self, state: RequestState) -> bytes:
        return hashlib.sha256(
            f"{self._key}\0{state.request.cache_salt}".encode(errors="surrogatepass")
        ).digest()

    def _chain(self, key: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """The keys of the whole pages of `tokens`, which follow the page of `key`."""
        for start in range(0, len(tokens) - self.page + 1, self.page):
            page = array("q", tokens[start : start + self.page]).tobytes()
            key = hashlib.sha256(key + page).digest()
            yield key

    def match(self, state: RequestState, own: int | None = None) -> tuple[int, int]:
        """The slot that holds most of a request's context, `own` among equals, and how many tokens of it; (-1, 0)
        where none holds a page."""
        key = None
        pages = 0
        for candidate in self.page_keys(state):
            if candidate not in self._holders:
                break
            key, pages = candidate, pages + 1
        if key is None:
            return -1, 0
        holders = list(self._holders[key])[:_HOLDERS_COMPARED]
        if own is not None and own in self._holders[key]:
            holders.insert(0, own)
        context, known = state.context, pages * self.page
        best, longest = -1, 0
        for index in holders:
            content = self._contents[index]
            end = min(len(context), content.length)
            same = known
            while same < end and context[same] == content.tokens[same]:
                same += 1
            if same > longest:
                best, longest = index, same
        return best, longest

    def length(self, index: int) -> int:
        """Tokens a slot holds."""
        return self._contents[index].length

    def pages_known(self, keys: Sequence[bytes], coming: set[bytes]) -> int:
        """How many of the first pages are held, or among those `coming`."""
        for count, key in enumerate(keys):
            if key not in self._holders and key not in coming:
                return count
        return len(keys)

    def begin(self, state: RequestState, length: int) -> None:
        """A request takes its slot over. `length` tokens of its context are in there, or copied before all else."""
        self.drop(state.slot.index)
        self._contents[state.slot.index] = _Content(tenancy=state.slot)
        self.extend(state, length)

    def extend(self, state: RequestState, length: int) -> None:
        """The first `length` tokens of a request's context are in its slot once the plan being made has run."""
        self._hold(state.slot, state.context, length, self.page_keys(state))

    def end(self, state: RequestState) -> None:
        """A request left its slot: enter what it generated as well, unless the slot has been taken over since.

        The last token is left out, as its keys and values are written when the next one is sampled.
        """
        content = self._contents[state.slot.index]
        if content.tenancy != state.slot or content.length < state.context_tokens:
            return
        tokens = (*state.request.prompt_token_ids, *state.generated)
        keys = self.page_keys(state)
        rest = self._chain(keys[-1] if keys else self._root(state), tokens[len(keys) * self.page :])
        self._hold(state.slot, tokens, max(content.length, len(tokens) - 1), (*keys, *rest))

    def _hold(self, tenancy: Slot, tokens: Sequence[int], length: int, keys: tuple[bytes, ...]) -> None:
        content = self._contents[tenancy.index]
        kept = keys[: length // self.page]
        for key in kept[len(content.keys) :]:
            self._holders.setdefault(key, {})[tenancy.index] = None
        self._contents[tenancy.index] = _Content(tokens, length, kept, tenancy)

    def discard(self, state: RequestState) -> None:
        """Nothing that a request has left is fit for use, if it is there still."""
        if self._contents[state.slot.index].tenancy == state.slot:
            self.drop(state.slot.index)

    def drop(self, index: int) -> None:
        """A slot's content is overwritten."""
        for key in self._contents[index].keys:
            del self._holders[key][index]
            if not self._holders[key]:
                del self._holders[key]
        self._contents[index] = _Content()

    def clear(self) -> None:
        """Forget everything."""
        for index in range(len(self._contents)):
            self.drop(index)

    def check(self) -> None:
        """Raise AssertionError unless index and contents agree."""
        entries = {(key, index) for key, holders in self._holders.items() for index in holders}
        held = {(key, index) for index, content in enumerate(self._contents) for key in content.keys}
        if entries != held or not all(self._holders.values()):
            raise AssertionError(f"the index and the slots differ in {len(entries ^ held)} pages")
        for index, content in enumerate(self._contents):
            if len(content.keys) != content.length // self.page or content.length > len(content.tokens):
                raise AssertionError(f"slot {index} holds {content}")
