"""The interface of a proposer, which guesses on the host how sequences continue."""

from __future__ import annotations

from collections.abc import Sequence
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
