"""Prefix caching for slots with their own memory: finds the slot that holds the longest prefix of a prompt.

A slot's content is a sequence of tokens (and numbers for pictures, see `Request.content`) whose keys and values are
at its first positions. It is indexed by the keys of its blocks (`scheduler.kv.block_hashes`); the tokens after the
last full block are compared one by one.

Content is entered when the plan that writes it has been made, and removed when the plan that overwrites it is being
made. The device runs plans in order, and within a plan copies run first. A hit is used in the plan that looks it up,
so it cannot be stale and needs no pin.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xla_engine.scheduler.kv.block_hashes import BlockHashes
from xla_engine.scheduler.plan import Slot
from xla_engine.scheduler.request_state import RequestState

_HOLDERS_COMPARED = 4  # slots with the same last block whose remaining tokens are compared


@dataclass(slots=True)
class _Content:
    """A slot holds `tokens[:length]`, written in `occupancy`; `keys` are those of its full blocks."""

    tokens: Sequence[int] = ()
    length: int = 0
    keys: tuple[bytes, ...] = ()
    occupancy: Slot | None = None


class SlotPrefixCache:
    """The contents of `slots` slots, by the blocks of `hashes`."""

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
        held = {(key, index) for index, content in enumerate(self._contents) for key in content.keys}
        if entries != held or not all(self._holders.values()):
            raise AssertionError(f"the index and the slots differ in {len(entries ^ held)} blocks")
        for index, content in enumerate(self._contents):
            if len(content.keys) != content.length // self._hashes.block_size or content.length > len(
                content.tokens
            ):
                raise AssertionError(f"slot {index} holds {content}")
