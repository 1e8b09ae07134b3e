"""Two answers to one request, compared to the bit: what a sample, a difference and a comparison are in every check.

The start-up check, the shadow probe, `verify`, records and their replays, audits, and the checks of servers all find
differences by `first_difference`. It needs the standard library only.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Generic, TypeVar

Sampled = TypeVar("Sampled")


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """A token with its log-probability, and those of the most likely tokens by id; None: they were not requested.

    Two samples are equal if their tokens are, and all float32 bits of their log-probabilities.
    """

    token_id: int
    logprob: float | None = None
    top: Mapping[int, float] | None = None

    @property
    def bits(self) -> tuple[int, int | None, tuple[tuple[int, int], ...] | None]:
        """What is equal for two samples that are the same."""
        bits = None if self.logprob is None else logprob_bits(self.logprob)
        top = None if self.top is None else tuple(sorted((at, logprob_bits(x)) for at, x in self.top.items()))
        return self.token_id, bits, top

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSample) and self.bits == other.bits

    def __hash__(self) -> int:
        return hash(self.bits)

    def __str__(self) -> str:
        known = "" if self.logprob is None else f" logprob {self.logprob:.9g}"
        return f"token {self.token_id}{known}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Generic[Sampled]):
    """Where an answer first differs from the one expected.

    position: of the first other sample; None if all tokens are equal.
    expected, found: what stands there; None is the end of an answer.
    delta: largest difference of the log-probabilities before it, in nats; None if it is not known.
    gap: between the log-probabilities or logits of the two likeliest tokens there; None if it is not known.
    """

    position: int | None
    expected: Sampled | None = None
    found: Sampled | None = None
    delta: float | None = None
    gap: float | None = None


def first_difference(
    expected: Sequence[Sampled], found: Sequence[Sampled], start: int = 0
) -> Difference[Sampled] | None:
    """The first place at which two sequences differ, the end of the shorter one included; None if they are equal.

    start: the position of their first elements.
    """
    shared = min(len(expected), len(found))
    place = next((at for at in range(shared) if expected[at] != found[at]), shared)
    if place == len(expected) == len(found):
        return None
    return Difference(
        position=start + place,
        expected=expected[place] if place < len(expected) else None,
        found=found[place] if place < len(found) else None,
    )


@dataclass(slots=True, kw_only=True)
class ComparedAnswers:
    """Answers to the same requests, compared.

    requests, tokens: compared ones.
    differing_tokens: tokens whose id differs, or that one answer lacks.
    differing_bits: equal tokens whose log-probabilities differ in their float32 bits; None if they are not compared.
    differences: the first of each request that differs, by its name.
    """

    requests: int = 0
    tokens: int = 0
    differing_tokens: int = 0
    differing_bits: int | None = 0
    differences: dict[str, Difference[TokenSample]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.differences

    def add(
        self, name: str, expected: Sequence[TokenSample], found: Sequence[TokenSample], *, ends: bool = True
    ) -> Difference[TokenSample] | None:
        """Count one pair of answers, and keep its first difference. ends: whether they ended for the same reason."""
        self.requests += 1
        self.tokens += len(expected)
        difference = first_difference(expected, found)
        if difference is None:
            if ends:
                return None
            difference = Difference(position=len(expected))
        for one, other in zip_longest(expected, found):
            if one is None or other is None or one.token_id != other.token_id:
                self.differing_tokens += 1
            elif one != other and self.differing_bits is not None:
                self.differing_bits += 1
        self.differences[name] = difference
        return difference


def logprob_bits(value: float) -> int:
    """The float32 bits of a log-probability."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def logprob_of(bits: int) -> float:
    """The log-probability with these float32 bits."""
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(value)
