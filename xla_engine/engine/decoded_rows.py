"""The sequences that decode, as `Delivery` gives them the tokens of a step: most only append them."""

import math
from collections.abc import Mapping, Sequence

from xla_engine.engine.requests.sampled_tokens import Sink
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.observability.histogram import Histogram
from xla_engine.scheduler import Decoded, Row


class DecodedRows:
    """The sequences of a decode step's rows, sorted by what they do with a token.

    Kept from step to step as long as the scheduler plans the same rows.

    rows: as planned. step, now: their latest step, and when it was read.
    sinks: slot and `LiveSequence.sink` of those that only keep the token. scored: slot and sequence of those that keep
    log-probabilities, too. immediate: of those that look at each token.
    kept: the sequences in `sinks` and `scored`.
    """

    def __init__(self, rows: Sequence[Row], live: Mapping[str, LiveSequence]) -> None:
        self.rows = rows
        self.step, self.now = -2, 0.0  # before any step
        self.sinks: list[tuple[int, Sink]] = []
        self.scored: list[tuple[int, LiveSequence]] = []
        self.immediate: list[tuple[int, LiveSequence]] = []
        self.kept: list[LiveSequence] = []
        for row in rows:
            if (sequence := live.get(row.request_id)) is None:
                continue  # it has just failed
            if (sink := sequence.sink) is not None:
                self.sinks.append((row.slot.index, sink))
                self.kept.append(sequence)
            elif sequence.immediate:
                self.immediate.append((row.slot.index, sequence))
            else:
                self.scored.append((row.slot.index, sequence))
                self.kept.append(sequence)
        self.lasts = not any(sequence.is_repeating for _, sequence in self.immediate)

    def keep(
        self,
        step: int,
        decoded: Decoded,
        now: float,
        histogram: Histogram,
        before: "DecodedRows | None" = None,
    ) -> None:
        """Append the tokens of a step, and add the times since the tokens before them to the histogram.

        before: the rows of the step before, if they were others.
        """
        tokens, latest, count = decoded.tokens, self.now, len(self.kept)
        if self.step + 1 != step:  # these rows are new, but most of them had a token in the step before
            latest = -math.inf if before is None else before.now
            times = [sequence.last_token_time for sequence in self.kept]
            count = times.count(latest)
            for time in times if count < len(times) else ():
                if time is not None and time != latest:
                    histogram.add(now - time)
        if count:
            histogram.add(now - latest, count)
        for slot, (take, stamp) in self.sinks:
            take(tokens[slot])
            stamp(now)
        for slot, sequence in self.scored:
            sequence.keep(decoded.sample(slot), now)
        self.step, self.now = step, now
