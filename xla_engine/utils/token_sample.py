"""One sampled token as every check compares it: to the float32 bits of its log-probability."""

import struct
from collections.abc import Sequence
from typing import NamedTuple


class TokenSample(NamedTuple):
    """A token and its log-probability; None: it was not requested."""

    token_id: int
    logprob: float | None

    @property
    def bits(self) -> tuple[int, int | None]:
        """What is equal for two samples that are the same."""
        return self.token_id, None if self.logprob is None else logprob_bits(self.logprob)

    def __str__(self) -> str:
        known = "" if self.logprob is None else f" logprob {self.logprob:.9g}"
        return f"token {self.token_id}{known}"


def logprob_bits(value: float) -> int:
    """The float32 bits of a log-probability."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def logprob_of(bits: int) -> float:
    """The log-probability with these float32 bits."""
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    return float(value)


def first_difference(one: Sequence[object], two: Sequence[object]) -> int | None:
    """The first place at which two sequences differ, the end of the shorter one included; None if they are equal."""
    shared = min(len(one), len(two))
    place = next((at for at in range(shared) if one[at] != two[at]), shared)
    return None if place == len(one) == len(two) else place
