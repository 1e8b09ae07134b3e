"""Judges greedy streams. If streams are wrong, or could hide that they are, the engine's rate is void."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

Ids = Sequence[Sequence[int]]

# A token that float32 would not choose is excused while its logit lies this close to the best one, in standard
# deviations of its row of logits. Some 30 roundings to bf16 (2^-9 each) that do not help each other leave 0.05.
NEAR_TIE = {"bfloat16": 0.2, "float32": 0.001}

_LOOKED_AT = 48  # tokens from the beginning of a stream; later ones may repeat
_LEAST_TOKENS = 16  # shorter streams are not called dull
_LEAST_DISTINCT = 0.25  # of the tokens looked at
_HEAD = 8  # tokens by which streams are told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one engine's greedy streams.

    judged: tokens the judge looked at.
    off: share of them float32 would not have chosen.
    worst: largest regret, in standard deviations of the logits.
    same: share of tokens equal to the reference engine's, position by position; None if it did not run.
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


def dull_reason(streams: Ids) -> str | None:
    """Why a fault could pass these streams unseen; None if it could not.

    If a stream repeats a few tokens, a position that is off by one chooses the same tokens. If requests with different
    prompts begin alike, a row that reads the slot of another goes unnoticed.
    """
    looked = [stream[:_LOOKED_AT] for stream in streams if len(stream) >= _LEAST_TOKENS]
    remedy = "use a model with more varied streams, such as the random ones that this command writes"
    if looked:
        distinct = [len(set(stream)) for stream in looked]
        if statistics.median(d / len(s) for d, s in zip(distinct, looked, strict=True)) < _LEAST_DISTINCT:
            return (
                f"dull streams: half of them hold at most {statistics.median_low(distinct)} distinct tokens of "
                f"{len(looked[0])}, so that a wrong position would pass; {remedy}"
            )
    heads = {tuple(stream[:_HEAD]) for stream in streams}
    if len(heads) < len(streams) / 2:
        return (
            f"dull streams: {len(streams)} requests begin in {len(heads)} ways, so that a swapped slot would pass; "
            f"{remedy}"
        )
    return None


def near_tie(dtype: str, reference: Sequence[Sequence[float]] | None) -> float:
    """The regret that counts as none: of roundings to `dtype`, or the worst of the reference's own."""
    return max(NEAR_TIE[dtype], *chain.from_iterable(reference or [[0.0]]))


_PLAINEST = 4.0  # errors of eight bits by row to those of rotated groups


def eight_bit_bounds(errors: Sequence[float], vocabulary: int) -> list[float]:
    """What an engine in eight bits may regret at each token: one that rounds as its model does keeps to it with 99 %.

    The model is one whose matrices, and the rows that they multiply, are rounded to 255 steps of each row's largest
    value: the plainest eight bits there are (LLM.int8() without its outliers); finer schemes, such as the blocks of
    32 of Q8_0, err less. The judge's own network rounds rotated groups of 64, and errs a quarter as much
    (findings/int8.md). What is not in eight bits is in the dtype of the run, keys and values for one, and errs as the
    reference engine does in it. `errors`: how far logits of both lie from float32's at each token of the streams,
    root of the mean square in deviations of the logits.

    An engine takes a token for the best one if its errors of the two differ by the regret at least. Errors of other
    roundings of the same size are normal and independent, so that their difference has sqrt(2) times the deviation
    and exceeds z of these with a probability below exp(-z^2 / 2) (Chernoff). Over all tokens of the streams times
    the vocabulary that is one in a hundred for z = sqrt(2 ln(100 tokens vocabulary)). Nothing is measured on the
    engine that is judged.
    """
    z = math.sqrt(2 * math.log(100 * len(errors) * vocabulary))
    return [z * math.sqrt(2) * _PLAINEST * error for error in errors]


def void_reason(found: Verdict) -> str | None:
    """Why the rate of these streams does not count: a regret beyond what is excused."""
    if found.beyond <= 1:
        return None
    return (
        f"wrong streams: a token lies {found.beyond:.2g} times as far below float32's choice as is excused, "
        f"the worst {found.worst:.2g} deviations"
    )
