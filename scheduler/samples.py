"""What the device sampled: a token with its other numbers, and the columns of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Values in place of a token id:
NO_TOKEN = -1  # the row did not decode, or had stopped
NO_CHOICE = -2  # no token could be sampled because the logits were NaN


class Sample(NamedTuple):
    """One sampled token, or NO_CHOICE, and its log-probability (natural; None if not requested).

    extra: other outputs of the device for this token; passed through.
    """

    token_id: int
    logprob: float | None = None
    extra: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The samples of a decode step as columns, indexed by slot; `sample` makes the object for one row.

    tokens: ids, NO_TOKEN or NO_CHOICE. logprobs: as in `Sample`, one per slot or empty. extra: by slot.
    """

    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    extra: Mapping[int, object] = field(default_factory=dict)

    def sample(self, slot: int) -> Sample:
        """The sample of a slot's row."""
        return Sample(self.tokens[slot], self.logprobs[slot] if self.logprobs else None, self.extra.get(slot))


NONE_DECODED = Decoded()
