"""Are the streams right? A rate whose streams are wrong is void."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

Ids = Sequence[Sequence[int]]

# A token that float32 would not choose is excused while its logit lies this close to the best one, in standard
# deviations of its row of logits. Some 30 roundings to bf16 (2^-9 each) that do not help each other leave 0.05.
NEAR_TIE = {"bfloat16": 0.2, "float32": 0.001}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Greedy streams of one engine, judged.

    judged: tokens the judge looked at.
    off: share of them float32 would not have chosen.
    worst: largest regret, in standard deviations of the logits.
    same: share of tokens equal to the reference engine's, position by position; None where it did not run.
    """

    judged: int
    off: float
    worst: float
    same: float | None

    def record(self) -> dict[str, float | int | None]:
        same = None if self.same is None else round(self.same, 4)
        return {
            "judged": self.judged,
            "off": round(self.off, 4),
            "worst_regret": round(self.worst, 4),
            "same": same,
        }


def verdict(regrets: Sequence[Sequence[float]], streams: Ids, reference: Ids | None) -> Verdict:
    """Sum up the judge's regrets of some streams, and compare all of them with the reference's."""
    flat = list(chain.from_iterable(regrets))
    same = None
    if reference is not None:
        pairs = [
            a == b
            for ours, theirs in zip(streams, reference, strict=True)
            for a, b in zip(ours, theirs, strict=False)
        ]
        same = sum(pairs) / len(pairs)
    return Verdict(judged=len(flat), off=sum(x > 0 for x in flat) / len(flat), worst=max(flat), same=same)


def void_reason(found: Verdict, dtype: str, reference: Verdict | None) -> str | None:
    """Why the rate of these streams does not count: regret beyond a near-tie and beyond the reference's own."""
    bound = max(NEAR_TIE[dtype], 0.0 if reference is None else reference.worst)
    if found.worst <= bound:
        return None
    return (
        f"wrong streams: a token lies {found.worst:.2g} deviations below float32's choice (bound {bound:.2g})"
    )
