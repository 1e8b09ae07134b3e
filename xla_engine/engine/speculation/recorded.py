"""A proposer that replays the output of an earlier run, with a given share of errors: for checks and measurements."""

import random
from collections.abc import Mapping, Sequence

from xla_engine.engine.speculation.proposer import Proposal


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
