"""Delivers sampled tokens to their requests, and ends requests."""

from collections.abc import Callable
from functools import partial
from itertools import groupby

from xla_engine.engine.decoded_rows import DecodedRows
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.state import EngineState
from xla_engine.scheduler import (
    NO_CHOICE,
    Events,
    FinishReason,
    Plan,
    StepResult,
    TokenEvent,
)

NO_NUMBERS = "no token could be sampled: the logits are not finite"


class Delivery:
    """Delivers tokens to the requests of a table, and ends them."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._decoded: DecodedRows | None = None

    def deliver(self, plan: Plan, result: StepResult, events: Events) -> None:
        """Deliver the tokens of a step, and end the requests that have their last one."""
        state = self._state
        table, now = state.table, state.clock()
        state.last_answer = now
        for event in events.first:
            request = table[event.request_id]
            if event.sample.token_id == NO_CHOICE:
                self.end(event.request_id, FinishReason.ERROR, NO_NUMBERS)
            else:
                self._give(request, partial(request.add, event.sample, now), event.finish_reason)
        ends = {event.request_id: event.finish_reason for event in events.ended}
        failed = [name for name, reason in ends.items() if reason is FinishReason.ERROR]
        for name in failed:
            del ends[name]
            self.end(name, FinishReason.ERROR, NO_NUMBERS)
        for name, several in groupby(events.several, key=lambda event: event.request_id):
            self._give_several(name, list(several), now)
        rows, before = events.rows, self._decoded
        decoded = before
        if decoded is None or decoded.rows is not rows or not decoded.lasts or failed:
            decoded = DecodedRows(rows, table.live)
        decoded.keep(plan.step, result.decode, now, table.histograms.inter_token_seconds, before)
        self._decoded = decoded if table else None
        for slot, request in decoded.immediate:
            if not request.finished:
                sample = result.decode.sample(slot)
                self._give(request, partial(request.add, sample, now), ends.pop(request.request_id, None))
        for name, reason in ends.items():
            if reason is not None and table.get(name) is not None:  # a stop string may have ended it already
                self.end(name, reason)
        for sequence in decoded.kept:
            if not sequence.collector.every_token or sequence.finished:
                continue
            if sequence.failure is not None:
                self._give(sequence, sequence.decode_text, None)
            else:
                sequence.collector.put(sequence.reader)

    def _give_several(self, name: str, events: list[TokenEvent], now: float) -> None:
        """Deliver all tokens that one step has for a request."""
        if (request := self._state.table.get(name)) is None:
            return  # decoding its first token, of the same step, has failed and ended it
        *_, last = events
        reason, failed = last.finish_reason, last.sample.token_id == NO_CHOICE
        samples = [event.sample for event in events[: len(events) - failed]]
        if samples:
            self._give(request, partial(request.extend, samples, now), None if failed else reason)
        if failed and self._state.table.get(name) is not None:
            self.end(name, FinishReason.ERROR, NO_NUMBERS)

    def _give(self, request: LiveSequence, take: Callable[[], bool], reason: FinishReason | None) -> None:
        """Let a request take its tokens; end it if there is a `reason`, a stop string, or an error in its text."""
        error, by_scheduler, tokens = None, reason is not None, request.num_tokens
        try:
            if take():
                reason = FinishReason.STOP
        except Exception as failure:  # its tokens cannot be decoded; this ends no other request
            reason, error = FinishReason.ERROR, str(failure)
        if reason is not None:
            if not by_scheduler:
                self._state.scheduler.finish(request.request_id, reason)
            self.end(request.request_id, reason, error)
            return
        if request.constrained:
            self._state.masks.add(request)
        if request.num_tokens > tokens and request.collector.every_token:
            request.collector.put(request.reader)

    def blocked(self) -> frozenset[str]:
        """Compute masks; returns the requests that must skip this step because theirs is not ready.

        A request whose mask fails ends with reason "error".
        """
        masks = self._state.masks
        if not masks:
            return frozenset()
        waits = masks.make(overlaps=bool(self._state.pipeline.in_flight))
        for row, error in masks.take_failed():
            waits -= {row.request_id}
            self._state.scheduler.finish(row.request_id, FinishReason.ERROR)
            self.end(row.request_id, FinishReason.ERROR, str(error))
        return waits

    def expire(self) -> None:
        """End the requests whose deadline has passed."""
        state, now = self._state, self._state.clock()
        for name, reason in state.scheduler.expire(now):
            self.end(name, reason)
            state.note_expired()
        for name, one in list(state.table.pending.items()):
            if (late := one.expired(now)) is not None:
                self.end_pending(name, late)
                state.note_expired()

    def end(self, name: str, reason: FinishReason, error: str | None = None) -> None:
        """Deliver the end of a sequence that the scheduler has ended."""
        state, table = self._state, self._state.table
        sequence = table[name]
        if state.speculator is not None:
            state.speculator.end(name)
        reason = table.end(name, reason, state.clock(), error)
        if state.shadow is not None:
            state.shadow.ended(sequence, reason)
        state.runner.discard(name)
        state.observers.ended(name, reason)
        state.ready.set()

    def end_pending(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request whose constraint is still being compiled."""
        state, one = self._state, self._state.table.pending.pop(request_id)
        for request in one.open(mask=None):
            state.observers.queued(request)
            self.end(request.request_id, reason, error)
