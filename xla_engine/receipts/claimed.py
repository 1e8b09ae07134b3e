"""Proposes claimed answers to the engine, and notes where the engine samples something else."""

from __future__ import annotations

from collections.abc import Sequence

from xla_engine.engine.speculation.proposer import CERTAIN, Proposal
from xla_engine.utils.comparison import Difference, first_difference


class ClaimedAnswers:
    """A proposer that knows the claimed tokens of each sequence.

    Since proposals change no result, the engine samples what it would without them; it only takes fewer steps.

    different: by sequence, where it left its claim.
    """

    def __init__(self) -> None:
        self.different: dict[str, Difference[int]] = {}
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
            claimed = self._claims[name][start : start + len(tokens)]
            found = first_difference(claimed, tokens, start)
            if found is not None:
                self.different[name] = found

    def propose(self, name: str, most: int) -> Proposal:
        if name in self.different:
            return Proposal()
        start = self._known[name]
        return Proposal(self._claims.get(name, ())[start : start + most], CERTAIN)

    def end(self, name: str) -> None:
        self._known.pop(name, None)
