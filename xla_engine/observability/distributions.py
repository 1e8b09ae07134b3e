"""How the times and sizes of requests and steps are spread, over the life of an engine.

Nothing here is done for a token of a row that decodes in every step: such rows are counted together, once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from xla_engine.observability.histogram import (
    FEW,
    LONG_TIMES,
    POWERS_OF_TWO,
    RATES,
    SHARES,
    SHORT_TIMES,
    Distribution,
    Histogram,
)

EMPTY = Distribution()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributions:
    """What was counted so far. A sequence is one of a request's n; it is counted where it comes to the point named.

    queue_seconds: of sequences that got a slot, from their arrival to their first one.
    first_token_seconds: of sequences with a token, from their arrival to it.
    inter_token_seconds: between consecutive tokens of a sequence, as the host read them. Tokens of one step have 0
        between them: the first two of a sequence, and those that speculation brings.
    request_seconds: of sequences that ended, from arrival to end.
    output_tokens: of sequences that ended, the tokens they had.
    tokens_per_second: of sequences that ended with two tokens or more, between the first and the last.
    preemptions: of sequences that ended, how often each had lost its slot.
    failed_steps: of sequences that ended, how many failed steps each was in.
    prefix_hit_tokens: of prompts that began with cached tokens, how many these were.
    prefill_padding: of prefill calls, the share of their positions that held no prompt token.
    decode_rows: of steps with a row that decodes, how many there were.
    blocks_used: of the same steps, KV blocks that requests held; without values where slots have memory of their own.
    accepted_drafts: of rows that had drafts checked, how many of these were right in a step.
    """

    queue_seconds: Distribution = EMPTY
    first_token_seconds: Distribution = EMPTY
    inter_token_seconds: Distribution = EMPTY
    request_seconds: Distribution = EMPTY
    output_tokens: Distribution = EMPTY
    tokens_per_second: Distribution = EMPTY
    preemptions: Distribution = EMPTY
    failed_steps: Distribution = EMPTY
    prefix_hit_tokens: Distribution = EMPTY
    prefill_padding: Distribution = EMPTY
    decode_rows: Distribution = EMPTY
    blocks_used: Distribution = EMPTY
    accepted_drafts: Distribution = EMPTY


class Histograms:
    """Where an engine counts. Attributes as in `Distributions`."""

    def __init__(self) -> None:
        self.queue_seconds = Histogram(LONG_TIMES)
        self.first_token_seconds = Histogram(SHORT_TIMES)
        self.inter_token_seconds = Histogram(SHORT_TIMES)
        self.request_seconds = Histogram(LONG_TIMES)
        self.output_tokens = Histogram(POWERS_OF_TWO)
        self.tokens_per_second = Histogram(RATES)
        self.preemptions = Histogram(FEW)
        self.failed_steps = Histogram(FEW)
        self.prefix_hit_tokens = Histogram(POWERS_OF_TWO)
        self.prefill_padding = Histogram(SHARES)
        self.decode_rows = Histogram(POWERS_OF_TWO)
        self.blocks_used = Histogram(POWERS_OF_TWO)
        self.accepted_drafts = Histogram(FEW)

    def count_end(self, seconds: float, token_times: Sequence[float], preemptions: int, faults: int) -> None:
        """Count a sequence at its end: how long it took, when its tokens were read, what it met."""
        self.request_seconds.add(seconds)
        self.output_tokens.add(len(token_times))
        self.preemptions.add(preemptions)
        self.failed_steps.add(faults)
        if len(token_times) > 1 and token_times[-1] > token_times[0]:
            self.tokens_per_second.add((len(token_times) - 1) / (token_times[-1] - token_times[0]))

    def now(self) -> Distributions:
        """What was counted so far."""
        return Distributions(**{each.name: getattr(self, each.name).now() for each in fields(Distributions)})
