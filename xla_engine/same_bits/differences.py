"""Where two answers to one request first differ, and the likely cause.

A difference by rounding moves log-probabilities a little, and changes a token only where two candidates were nearly
equal. One that changes a token which was far ahead is not rounding: stale keys and values, or another request's
answer.
"""

import math
from dataclasses import dataclass

from xla_engine.same_bits.target import Choice

NOT_REPEATABLE, SEED_IGNORED = "not repeatable", "seed ignored"
ROUNDING, NOT_ROUNDING, UNCLEAR = "rounding", "not rounding", "unclear"
WORST_FIRST = (NOT_REPEATABLE, NOT_ROUNDING, SEED_IGNORED, UNCLEAR, ROUNDING)
LARGE = 0.5  # nats: more than rounding moves a log-probability


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """position: of the first other token, or character if only text is visible; None if only log-probabilities differ.
    left, right: what stands there. delta: largest difference of log-probabilities before it, in nats; None if they
    are not visible. gap: between the two likeliest tokens there, the larger of both answers'."""

    position: int | None
    left: str
    right: str
    delta: float | None
    gap: float | None

    def cause(self, largest: float) -> str:
        """largest: the largest `delta` of all comparisons of this kind."""
        if self.delta is not None and self.delta > LARGE:
            return NOT_ROUNDING
        if self.position is None:
            return ROUNDING
        if self.delta is None or self.gap is None:
            return UNCLEAR
        if self.gap <= 2 * largest:
            return ROUNDING
        return NOT_ROUNDING if self.gap > max(10 * largest, LARGE) else UNCLEAR


def compare(left: Choice, right: Choice, *, begins: bool = False) -> Difference | None:
    """The first difference of two answers, or None. begins: `right` may go on where `left` ends."""
    of_tokens = bool(left.tokens or right.tokens)
    one, two = (left.tokens, right.tokens) if of_tokens else (left.text, right.text)
    shared = min(len(one), len(two))
    first = next((place for place in range(shared) if one[place] != two[place]), shared)
    ended = len(one) == first and (begins or len(two) == first)
    delta = _delta(left.logprobs, right.logprobs, first) if of_tokens else None
    if ended and not delta and (begins or not of_tokens or left.text == right.text):
        return None
    if ended and not delta:  # equal tokens with other text
        left_text, right_text = repr(left.text[-20:]), repr(right.text[-20:])
        return Difference(position=None, left=left_text, right=right_text, delta=None, gap=None)
    gaps = [each.gaps[first] for each in (left, right) if each.gaps and first < len(each.gaps)]
    return Difference(
        position=None if ended else first,
        left="" if ended else _shown(one, first),
        right="" if ended else _shown(two, first),
        delta=delta,
        gap=None if ended or not gaps else max(gaps),
    )


def _delta(left: tuple[float, ...] | None, right: tuple[float, ...] | None, count: int) -> float | None:
    """The largest difference of the first `count`; infinite where only one of two is a number."""
    if left is None or right is None:
        return None
    pairs = (
        zip(left[:count], right[:count], strict=True)
        if min(len(left), len(right)) >= count
        else [(0.0, math.inf)]
    )
    return max(
        (0.0 if a == b or (a != a and b != b) else _or_infinite(abs(a - b)) for a, b in pairs), default=0.0
    )


def _or_infinite(value: float) -> float:
    return value if value == value else math.inf


def _shown(sequence: str | tuple[int | str, ...], place: int) -> str:
    return repr(sequence[place]) if place < len(sequence) else "the end"


def digits(value: float) -> int:
    """Significant decimal digits in which a number is written."""
    return len(repr(abs(value)).partition("e")[0].replace(".", "").strip("0"))
