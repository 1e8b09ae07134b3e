"""Prefix caching: keys of KV blocks by content, and what slots hold."""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from xla_engine.scheduler.moves import Slot, StoredBlock
from xla_engine.scheduler.request import Request
from xla_engine.scheduler.request_state import RequestState


class BlockHashes:
    """Keys of blocks of `block_size` tokens: the SHA-256 of the previous block's key and the block's content.

    The chain begins with a hash of model, cache salt and adapter. So equal keys mean equal tokens and pictures from
    the beginning on.

    model: names the model.

    tails: also give a key to the last block if it is only partly filled.
    """

    def __init__(self, block_size: int, model: str, *, tails: bool = False) -> None:
        self.block_size = block_size
        self._model = model
        self._tails = tails

    def of_context(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks of a request's context; computed once."""
        if state.block_hashes is None:
            state.block_hashes = tuple(self._chain(self._root(state.request), state.content))
        return state.block_hashes

    def full_blocks(self, request: Request) -> Iterator[StoredBlock]:
        """The full blocks of a prompt before its first picture, in order, with no place in the pool."""
        tokens, parent = request.prompt_token_ids, self._root(request)
        whole = self.storable(request)
        for at, key in enumerate(self._chain(parent, tokens[:whole])):
            own = tuple(tokens[at * self.block_size : (at + 1) * self.block_size])
            yield StoredBlock(key=key, parent=parent, tokens=own)
            parent = key

    def storable(self, request: Request) -> int:
        """How many tokens `full_blocks` have."""
        end = request.images[0].spans[0][0] if request.images else len(request.prompt_token_ids)
        return end // self.block_size * self.block_size

    def of_all(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks of context and generated tokens."""
        tokens = (*state.request.content, *state.generated)
        known = self.of_context(state)[: state.context_tokens // self.block_size]
        rest = tokens[len(known) * self.block_size :]
        return (*known, *self._chain(known[-1] if known else self._root(state.request), rest))

    def _root(self, request: Request) -> bytes:
        root = hashlib.sha256(f"{self._model}\0{request.cache_salt}".encode(errors="surrogatepass")).digest()
        if not request.adapter:
            return root
        return hashlib.sha256(root + request.adapter.encode(errors="surrogatepass")).digest()

    def _chain(self, key: bytes, tokens: Sequence[int]) -> Iterator[bytes]:
        """Keys of the blocks of `tokens`, which follow the block with this key."""
        end = len(tokens) if self._tails else len(tokens) - self.block_size + 1
        for start in range(0, end, self.block_size):
            key = hashlib.sha256(key + _bytes(tokens[start : start + self.block_size])).digest()
            yield key


def state_after(block: bytes) -> StoredBlock:
    """The state of recurrent layers after the block with this key, with no place."""
    return StoredBlock(key=hashlib.sha256(block + b"state").digest(), parent=block, tokens=())


def _bytes(content: Sequence[int]) -> bytes:
    if min(content) < 0:  # pictures; these letters are in no token id's eight bytes
        return repr(tuple(content)).encode()
    return array("q", content).tobytes()


_HOLDERS_COMPARED = 4  # slots with the same last block whose remaining tokens are compared


@dataclass(slots=True)
class _Content:
    """A slot holds `tokens[:length]`, written in `occupancy`; `keys` are those of its full blocks."""

    tokens: Sequence[int] = ()
    length: int = 0
    keys: tuple[bytes, ...] = ()
    occupancy: Slot | None = None


class SlotPrefixCache:
    """For slots with their own memory: finds the slot that holds the longest prefix of a prompt.

    A slot's content is a sequence of tokens (and numbers for pictures, see `Request.content`) whose keys and values
    are at its first positions. It is indexed by the keys of its blocks; the tokens after the last full block are
    compared one by one.

    Content is entered when the plan that writes it has been made, and removed when the plan that overwrites it is
    being made. The device runs plans in order, and within a plan copies run first. A hit is used in the plan that
    looks it up, so it cannot be stale and needs no pin.
    """

    def __init__(self, slots: int, hashes: BlockHashes) -> None:
        self._hashes = hashes
        self._contents = [_Content() for _ in range(slots)]
        self._holders: dict[bytes, dict[int, None]] = {}  # by block key: the slots that hold it, oldest first

    def __deepcopy__(self, memo: dict[int, object]) -> SlotPrefixCache:
        twin = copy.copy(self)
        twin._contents = self._contents.copy()  # its items are replaced and never changed
        twin._holders = {key: holders.copy() for key, holders in self._holders.items()}
        return twin

    def match(self, state: RequestState, own: int | None = None) -> tuple[int, int]:
        """(slot, tokens): the slot with the longest prefix of a request's context, and its length.

        Of equal slots, prefers `own`. (-1, 0) if no slot holds its first block.
        """
        key = None
        matched = 0
        for candidate in self._hashes.of_context(state):
            if candidate not in self._holders:
                break
            key, matched = candidate, matched + 1
        if key is None:
            return -1, 0
        holders = list(self._holders[key])[:_HOLDERS_COMPARED]
        if own is not None and own in self._holders[key]:
            holders.insert(0, own)
        context, known = state.content, matched * self._hashes.block_size
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
        """How many tokens a slot holds."""
        return self._contents[index].length

    def known(self, state: RequestState, coming: Collection[bytes]) -> int:
        """How many tokens of a request's context are in full blocks that slots hold, or whose keys are `coming`."""
        keys = self._hashes.of_context(state)
        count = 0
        while count < len(keys) and (keys[count] in self._holders or keys[count] in coming):
            count += 1
        return count * self._hashes.block_size

    def written(self, state: RequestState) -> tuple[bytes, ...]:
        """Keys of the blocks that the plans so far fill."""
        return self._hashes.of_context(state)[: state.prefilled // self._hashes.block_size]

    def begin(self, state: RequestState, length: int) -> None:
        """Begin a request in its slot. The first `length` tokens of its context are there, or copied first."""
        self.drop(state.slot.index)
        self._contents[state.slot.index] = _Content(occupancy=state.slot)
        self.extend(state, length)

    def extend(self, state: RequestState, length: int) -> None:
        """Note that the plan being made has written `length` tokens of a request's context."""
        self._hold(state.slot, state.content, length, self._hashes.of_context(state))

    def end(self, state: RequestState) -> None:
        """Also enter the generated tokens of a request that leaves, unless its slot has been reused since.

        The last token does not count, because its KV entry is only written when the next one is sampled.
        """
        content = self._contents[state.slot.index]
        if content.occupancy != state.slot or content.length < state.context_tokens:
            return
        tokens = (*state.request.content, *state.generated)
        self._hold(state.slot, tokens, max(content.length, len(tokens) - 1), self._hashes.of_all(state))

    def _hold(self, occupancy: Slot, tokens: Sequence[int], length: int, keys: tuple[bytes, ...]) -> None:
        content = self._contents[occupancy.index]
        kept = keys[: length // self._hashes.block_size]
        for key in kept[len(content.keys) :]:
            self._holders.setdefault(key, {})[occupancy.index] = None
        self._contents[occupancy.index] = _Content(tokens, length, kept, occupancy)

    def discard(self, state: RequestState) -> None:
        """Forget the content of a failed request's slot, unless it was reused: it must not be reused by others."""
        if self._contents[state.slot.index].occupancy == state.slot:
            self.drop(state.slot.index)

    def drop(self, index: int) -> None:
        """Forget a slot's content."""
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
        expected = {(key, index) for index, content in enumerate(self._contents) for key in content.keys}
        if entries != expected or not all(self._holders.values()):
            raise AssertionError(f"the index and the slots differ in {len(entries ^ expected)} blocks")
        for index, content in enumerate(self._contents):
            if len(content.keys) != content.length // self._hashes.block_size or content.length > len(
                content.tokens
            ):
                raise AssertionError(f"slot {index} holds {content}")
