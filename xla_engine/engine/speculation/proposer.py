"""What a proposer is: on the host, it guesses how a sequence goes on. It knows no device, and is free to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

CERTAIN = 1 << 20  # tokens of a match that can hardly be wrong


class Proposal(NamedTuple):
    """Tokens expected behind all that a proposer was told of a sequence. match: how many tokens at the sequence's end
    they were found by; 0 where the proposer works otherwise, CERTAIN where nothing else can come."""

    tokens: Sequence[int] = ()
    match: int = 0


class Proposer(Protocol):
    """Guesses for many sequences, each by its name. What it says changes how fast tokens come, never which."""

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None:
        """A sequence with a prompt of `tokens`. group: it may learn from sequences of the same group only."""
        ...

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        """The sequence goes on with `tokens`."""
        ...

    def propose(self, name: str, most: int) -> Proposal:
        """Up to `most` tokens that may come next."""
        ...

    def end(self, name: str) -> None:
        """The sequence is over. A name that is unknown is none of its own."""
        ...


class NoProposer:
    """Proposes nothing: the device guesses for itself."""

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None: ...

    def extend(self, name: str, tokens: Sequence[int]) -> None: ...

    def propose(self, name: str, most: int) -> Proposal:
        return Proposal()

    def end(self, name: str) -> None: ...
