"""Distributions of the times and sizes of requests and steps over the life of an engine.

Rows that decode in every step cost nothing per token here: they are counted together, once a step.
"""

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
    """The distributions so far. A request has n sequences; each is counted when the named event happens.

    queue_seconds: from a sequence's arrival to its first slot.
    first_token_seconds: from a sequence's arrival to its first token.
    inter_token_seconds: between consecutive tokens of a sequence, as read by the host. Tokens of the same step are 0
        apart: the first two of a sequence, and accepted drafts.
    request_seconds: from a sequence's arrival to its end.
    output_tokens: tokens of each ended sequence.
    tokens_per_second: of ended sequences with at least two tokens, from the first to the last.
    preemptions: how often each ended sequence was preempted.
    failed_steps: how many failed steps each ended sequence was in.
    prefix_hit_tokens: cached tokens of each prompt that began with any.
    prefill_padding: fraction of each prefill call's positions that are padding.
    decode_rows: decoding rows of each step with any.
    blocks_used: KV blocks held in these steps; empty if slots have their own memory.
    accepted_drafts: accepted drafts of each row and step in which drafts were verified.
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
    """The histograms in which an engine counts. Attributes as in `Distributions`."""

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
        """Count a sequence at its end: its time, when its tokens were read, its preemptions and failed steps."""
        self.request_seconds.add(seconds)
        self.output_tokens.add(len(token_times))
        self.preemptions.add(preemptions)
        self.failed_steps.add(faults)
        if len(token_times) > 1 and token_times[-1] > token_times[0]:
            self.tokens_per_second.add((len(token_times) - 1) / (token_times[-1] - token_times[0]))

    def now(self) -> Distributions:
        """The distributions so far."""
        return Distributions(**{each.name: getattr(self, each.name).now() for each in fields(Distributions)})
