"""How many tokens a step checks: by what steps of each width cost, and by how many drafts were right."""

from __future__ import annotations

from collections.abc import Sequence

from xla_engine.engine.speculation.proposer import CERTAIN
from xla_engine.runner.step_costs import StepCosts

GAIN = 1.05  # a wider step must promise so much more a second
PATIENCE = 4  # steps without a gain after which rows do not speculate
PROBE = 16  # steps at most between two looks at what proposers would propose, while rows do not speculate
_MEMORY = 0.9  # weight of what was known, at each new observation
# (n, acceptance to begin with) of matches below n tokens.
_FIRST = ((1, 0.4), (5, 0.2), (9, 0.6), (CERTAIN, 0.8), (CERTAIN + 1, 0.99))


class Acceptance:
    """The chance that a draft is right if all before it are, by the length of the match that proposed it."""

    def __init__(self) -> None:
        self._by_match = [chance for _, chance in _FIRST]

    def of(self, match: int) -> float:
        """For proposals by a match of so many tokens."""
        return self._by_match[self._place(match)]

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Of `drafted` drafts, checked by a step or held against what came anyway, the first `accepted` were right."""
        tried = min(accepted + 1, drafted)
        if not tried:
            return
        place = self._place(match)
        for _ in range(tried):
            self._by_match[place] *= _MEMORY
        # As many looks, of which `accepted` were good, weigh as much as each in turn.
        self._by_match[place] += accepted / tried * (1 - _MEMORY**tried)

    @staticmethod
    def _place(match: int) -> int:
        return next(place for place, (bound, _) in enumerate(_FIRST) if match < bound)


class WidthChooser:
    """Chooses the width of each step, 0 for rows that had better not speculate.

    Since the width changes no bit of a result it may depend on anything.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.acceptance = Acceptance()
        self._costs = costs
        self._idle = 0  # steps in a row without a gain, while rows speculate
        self._on = False
        self._wait = 0  # steps until the next look, while rows do not speculate
        self._pause = 1  # of these, after a look that promised no gain; each doubles it

    @property
    def is_on(self) -> bool:
        """Whether rows speculate."""
        return self._on

    @property
    def looks(self) -> bool:
        """Whether this step is to be chosen by proposals; counts as a step. While rows do not speculate, looks
        are 2, 3, 5 and 9 steps apart and then PROBE, until one promises a gain."""
        if not self._on and self._wait:
            self._wait -= 1
            return False
        return True

    def choose(self, rows: int, proposals: Sequence[tuple[int, int]]) -> int:
        """The width for so many rows, of which some have proposals: (tokens, match)."""
        best, width = self._best(rows, proposals)
        if best >= GAIN:
            self._on, self._idle, self._pause = True, 0, 1
            return width
        if self._on:
            self._idle += 1
            self._on = self._idle < PATIENCE
        if self._on:
            return 1
        self._wait = self._pause
        self._pause = min(2 * self._pause, PROBE - 1)
        return 0

    def _best(self, rows: int, proposals: Sequence[tuple[int, int]]) -> tuple[float, int]:
        plain = rows / self._costs.decode_of(rows) if rows else 0.0
        best, width = 0.0, 1
        if not proposals or not rows:
            return best, width
        for (lanes, wide), seconds in self._costs.verify.items():
            if lanes < rows or any(
                fewer >= rows and fewer < lanes and other == wide for fewer, other in self._costs.verify
            ):
                continue
            tokens = rows - len(proposals) + sum(self._expected(wide, *each) for each in proposals)
            if tokens / seconds / plain > best:
                best, width = tokens / seconds / plain, wide
        return best, width

    def _expected(self, width: int, tokens: int, match: int) -> float:
        """Tokens that a row's step brings."""
        chance = min(self.acceptance.of(match), 0.99)
        drafts = min(width - 1, tokens)
        return (1 - chance ** (drafts + 1)) / (1 - chance)
