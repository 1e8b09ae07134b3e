"""The interface of a proposer, which drafts on the host how sequences continue."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

CERTAIN = 1 << 20  # the `match` of a proposal that can hardly be wrong


class Proposal(NamedTuple):
    """The tokens expected next in a sequence.

    match: how many tokens at the end of the sequence matched where the proposal was found; 0 if the proposer does not
        match, CERTAIN if no other tokens can come.
    """

    tokens: Sequence[int] = ()
    match: int = 0

    def first(self, most: int) -> Proposal:
        return Proposal(self.tokens[:most], self.match)


class Proposer(Protocol):
    """Proposes tokens for many sequences, by name. Proposals change how fast tokens come, never which tokens."""

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None:
        """Begin a sequence with a prompt of `tokens`. group: it may learn only from sequences of the same group."""
        ...

    def extend(self, name: str, tokens: Sequence[int]) -> None: ...

    def propose(self, name: str, most: int) -> Proposal:
        """Propose up to `most` next tokens."""
        ...

    def end(self, name: str) -> None:
        """End a sequence; ignores unknown names."""
        ...


class NoProposer:
    """Proposes nothing; used when the drafts are made on the device."""

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None: ...

    def extend(self, name: str, tokens: Sequence[int]) -> None: ...

    def propose(self, name: str, most: int) -> Proposal:
        return Proposal()

    def end(self, name: str) -> None: ...


class Recorded:
    """Proposes what an earlier run sampled; each token is replaced by a wrong one with probability 1 - `right`.

    Since proposals do not change results, this gives any acceptance rate with the same output.

    outputs: the tokens that each sequence will sample.
    """

    def __init__(self, outputs: Mapping[str, Sequence[int]], right: float = 1.0, seed: int = 0) -> None:
        self._outputs = outputs
        self._right = right
        self._draw = random.Random(seed)
        self._known: dict[str, int] = {}

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None:
        self._known[name] = 0

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        self._known[name] += len(tokens)

    def propose(self, name: str, most: int) -> Proposal:
        known = self._known[name]
        ahead = self._outputs[name][known : known + most]
        return Proposal([token if self._draw.random() < self._right else token ^ 1 for token in ahead], 9)

    def end(self, name: str) -> None:
        self._known.pop(name, None)
