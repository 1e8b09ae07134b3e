"""Chooses how many tokens a step verifies, from the cost of each width and the acceptance of drafts."""

from collections.abc import Sequence

from xla_engine.engine.speculation.proposer import CERTAIN
from xla_engine.runner.step_costs import StepCosts

GAIN = 1.05  # by this factor a wider step must promise more tokens a second
PATIENCE = 4  # consecutive steps without a gain after which speculation is switched off
PROBE = 16  # the most steps between two looks at proposals while speculation is off
_MEMORY = 0.9  # weight of the old value at each new observation
# (n, initial acceptance) for matches of fewer than n tokens.
_FIRST = ((1, 0.4), (5, 0.2), (9, 0.6), (CERTAIN, 0.8), (CERTAIN + 1, 0.99))


class Acceptance:
    """The probability that a draft token is right if all before it are, by the length of the proposal's match."""

    def __init__(self) -> None:
        self._by_match = [chance for _, chance in _FIRST]

    def of(self, match: int) -> float:
        """The acceptance of proposals with a match of `match` tokens."""
        return self._by_match[self._place(match)]

    def observe(self, match: int, drafted: int, accepted: int) -> None:
        """Learn that of `drafted` draft tokens the first `accepted` were right."""
        tried = min(accepted + 1, drafted)
        if not tried:
            return
        place = self._place(match)
        for _ in range(tried):
            self._by_match[place] *= _MEMORY
        # `tried` observations at once weigh as much as one after the other.
        self._by_match[place] += accepted / tried * (1 - _MEMORY**tried)

    @staticmethod
    def _place(match: int) -> int:
        return next(place for place, (bound, _) in enumerate(_FIRST) if match < bound)


class WidthChooser:
    """Chooses the width of each step; 0 for plain decode.

    Since the width changes no bit of a result, the choice may depend on anything.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.acceptance = Acceptance()
        self._costs = costs
        self._idle = 0  # consecutive steps without a gain while speculation is on
        self._on = False
        self._wait = 0  # steps until the next look while speculation is off
        self._pause = 1  # the next value of `_wait`; each look without a gain doubles it

    @property
    def is_on(self) -> bool:
        """Whether speculation is on."""
        return self._on

    @property
    def looks(self) -> bool:
        """Whether to look at proposals in this step; each call counts as a step.

        While speculation is off, looks are 2, 3, 5, 9 and then PROBE steps apart, until one promises a gain.
        """
        if not self._on and self._wait:
            self._wait -= 1
            return False
        return True

    def choose(self, rows: int, proposals: Sequence[tuple[int, int]]) -> int:
        """The width for `rows` rows. proposals: (tokens, match) of those rows that have one."""
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
        """The expected tokens of a row in a verify step."""
        chance = min(self.acceptance.of(match), 0.99)
        drafts = min(width - 1, tokens)
        return (1 - chance ** (drafts + 1)) / (1 - chance)
