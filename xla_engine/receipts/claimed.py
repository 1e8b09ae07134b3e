"""Proposes claimed answers to the engine, and notes where the engine samples something else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_engine.engine.speculation.proposer import CERTAIN, Proposal


@dataclass(frozen=True, slots=True)
class Departure:
    """The first token of a sequence that differs. claimed: None if the claim has ended."""

    position: int
    claimed: int | None
    sampled: int


def first_departure(claimed: Sequence[int], sampled: Sequence[int], start: int = 0) -> Departure | None:
    """Where sampled tokens, of the position `start` on, leave the claimed ones; None if they are their beginning."""
    for position, token in enumerate(sampled, start):
        known = claimed[position] if position < len(claimed) else None
        if known != token:
            return Departure(position, known, token)
    return None


class ClaimedAnswers:
    """A proposer that knows the claimed tokens of each sequence.

    Since proposals change no result, the engine samples what it would without them; it only takes fewer steps.

    different: by sequence, where it left its claim.
    """

    def __init__(self) -> None:
        self.different: dict[str, Departure] = {}
        self._claims: dict[str, Sequence[int]] = {}
        self._known: dict[str, int] = {}

    def claim(self, name: str, tokens: Sequence[int]) -> None:
        """Say what a sequence should sample, before it begins."""
        self._claims[name] = tokens

    def forget(self, name: str) -> None:
        self._claims.pop(name, None)
        self.different.pop(name, None)

    def begin(self, name: str, tokens: Sequence[int], group: str) -> None:
        self._known[name] = 0

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        start = self._known[name]
        self._known[name] = start + len(tokens)
        if name in self._claims and name not in self.different:
            found = first_departure(self._claims[name], tokens, start)
            if found is not None:
                self.different[name] = found

    def propose(self, name: str, most: int) -> Proposal:
        if name in self.different:
            return Proposal()
        start = self._known[name]
        return Proposal(self._claims.get(name, ())[start : start + most], CERTAIN)

    def end(self, name: str) -> None:
        self._known.pop(name, None)
