"""Judging greedy streams by float32 logits: the rate of an engine whose streams are wrong is void."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

Ids = Sequence[Sequence[int]]

# A token that float32 would not choose is excused while its logit lies this close to the best one, in standard
# deviations of its row of logits. Some 30 roundings to bf16 (2^-9 each) that do not help each other leave 0.05.
NEAR_TIE = {"bfloat16": 0.2, "float32": 0.001}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one engine's greedy streams.

    judged: tokens the judge looked at.
    off: share of them float32 would not have chosen.
    worst: largest regret, in standard deviations of the logits.
    same: share of tokens equal to the reference engine's, position by position; None where it did not run.
    beyond: the largest regret as a multiple of what is excused at its token; the streams are wrong above 1.
    """

    judged: int
    off: float
    worst: float
    same: float | None
    beyond: float

    def record(self) -> dict[str, float | int | None]:
        same = None if self.same is None else round(self.same, 4)
        return {
            "judged": self.judged,
            "off": round(self.off, 4),
            "worst_regret": round(self.worst, 4),
            "same": same,
            "beyond": round(self.beyond, 3),
        }


def verdict(
    regrets: Sequence[Sequence[float]], streams: Ids, reference: Ids | None, bounds: Sequence[float]
) -> Verdict:
    """Sum up the judge's regrets of some streams, `bounds` for each token, and compare all with the reference's."""
    flat = list(chain.from_iterable(regrets))
    same = None
    if reference is not None:
        pairs = [
            a == b
            for ours, theirs in zip(streams, reference, strict=True)
            for a, b in zip(ours, theirs, strict=False)
        ]
        same = sum(pairs) / len(pairs)
    return Verdict(
        judged=len(flat),
        off=sum(x > 0 for x in flat) / len(flat),
        worst=max(flat),
        same=same,
        beyond=max(regret / bound for regret, bound in zip(flat, bounds, strict=True)),
    )


def near_tie(dtype: str, reference: Sequence[Sequence[float]] | None) -> float:
    """The regret that counts as none: of roundings to `dtype`, or the worst of the reference's own."""
    return max(NEAR_TIE[dtype], *chain.from_iterable(reference or [[0.0]]))


def eight_bit_bounds(errors: Sequence[float], vocabulary: int) -> list[float]:
    """What an engine in eight bits may regret at each token: one that rounds as its model does keeps to it with 99 %.

    The model is the judge's own float32 network whose matrices, and the rows that they multiply, are rounded to 255
    steps of each row's largest value: the plainest eight bits there are (LLM.int8() without its outliers); finer
    schemes, such as the blocks of 32 of Q8_0, err less. What is not in eight bits is in the dtype of the run, keys and
    values for one, and errs as the reference engine does in it. `errors`: how far logits lie from float32's at each
    token of the streams by both, root of the mean square in deviations of the logits.

    An engine takes a token for the best one if its errors of the two differ by the regret at least. Errors of other
    roundings of the same size are normal and independent, so that their difference has sqrt(2) times the deviation
    and exceeds z of these with a probability below exp(-z^2 / 2) (Chernoff). Over all tokens of the streams times
    the vocabulary that is one in a hundred for z = sqrt(2 ln(100 tokens vocabulary)). Nothing is measured on the
    engine that is judged.
    """
    z = math.sqrt(2 * math.log(100 * len(errors) * vocabulary))
    return [z * math.sqrt(2) * error for error in errors]


def void_reason(found: Verdict) -> str | None:
    """Why the rate of these streams does not count: a regret beyond what is excused."""
    if found.beyond <= 1:
        return None
    return (
        f"wrong streams: a token lies {found.beyond:.2g} times as far below float32's choice as is excused, "
        f"the worst {found.worst:.2g} deviations"
    )
