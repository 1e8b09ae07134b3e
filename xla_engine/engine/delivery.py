"""Handing requests the tokens that a step has sampled for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby

from xla_engine.engine.requests.masks import MaskMaker
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.engine.requests.sequence import LiveSequence
from xla_engine.engine.shadow import ShadowProbe
from xla_engine.engine.speculation import Speculator
from xla_engine.engine.waiter import StepRunner
from xla_engine.scheduler import (
    NO_CHOICE,
    Chunk,
    Continuation,
    Events,
    FinishReason,
    Plan,
    Scheduler,
    StepResult,
    Swap,
    TokenEvent,
)
from xla_engine.scheduler.continuation import forget

NO_NUMBERS = "no token could be chosen: the logits were not numbers"


class Delivery:
    """Gives the requests of a table their tokens and their ends; the first of the layers of an engine.

    on_end: called for each sequence as it ends.
    masks: makes those of host-gated rows.
    """

    scheduler: Scheduler
    runner: StepRunner
    clock: Callable[[], float]
    on_end: Callable[[str, FinishReason], None] | None
    _table: RequestTable
    masks: MaskMaker
    _speculator: Speculator | None
    _shadow: ShadowProbe | None
    _heard: float

    def _begin_decoding(self, plan: Plan) -> None:
        """Tell the token buffer in which slots requests decode from this step on, or the next."""
        table, step = self._table, plan.step
        parts: tuple[Chunk | Swap | Continuation, ...] = (*plan.first_rows, *plan.resumes, *plan.continues)
        for part in (*parts, *plan.to_decode):
            request = table[part.request_id]
            if not request.host_gated:
                self._give(request, request.take, None)  # tokens of the slot it had before
                # Those that may have several in a step are given them when it is read.
                if not request.finished and plan.width == 0:
                    table.token_buffer.begin(request, part.slot.index, plan.joins)
        for row in reversed(plan.decode):  # host_gated rows come last, and may not decode in the next step
            one = table.get(row.request_id)
            if one is None or not one.host_gated:
                break
            table.token_buffer.begin(one, row.slot.index, step, step + 1)

    def _deliver(self, plan: Plan, result: StepResult, events: Events) -> None:
        """Give requests their first token, and eager requests their next one; lazy requests take theirs later."""
        now, token_buffer = self.clock(), self._table.token_buffer
        self._heard = now
        for event in events.first:
            request = self._table[event.request_id]
            if event.sample.token_id == NO_CHOICE:
                self._end(event.request_id, FinishReason.ERROR, NO_NUMBERS)
            else:
                self._give(request, partial(request.add, event.sample, now), event.finish_reason)
        ends = {event.request_id: event.finish_reason for event in events.ended}
        for name in [name for name, reason in ends.items() if reason is FinishReason.ERROR]:
            del ends[name]
            self._end(name, FinishReason.ERROR, NO_NUMBERS)
        for name, several in groupby(events.several, key=lambda event: event.request_id):
            self._give_several(name, list(several), now)
        token_buffer.append(plan.step, result.decode, now)
        for request in token_buffer.eager():
            self._give(request, request.take, ends.pop(request.request_id, None))
            if not (request.finished or request.eager):
                token_buffer.make_lazy(request)
        for name, reason in ends.items():
            if reason is not None and self._table.get(name) is not None:  # no stop string has ended it before
                self._end(name, reason)
        for request in token_buffer.streamed():
            request.collector.put(request.reader)
        for request in token_buffer.next_to_flush():
            self._give(request, request.take, None)

    def _give_several(self, name: str, events: list[TokenEvent], now: float) -> None:
        """Give a request the tokens that it has of one step."""
        if (request := self._table.get(name)) is None:
            return  # the text of its first token, of the same step, could not be made
        *_, last = events
        reason, failed = last.finish_reason, last.sample.token_id == NO_CHOICE
        samples = [event.sample for event in events[: len(events) - failed]]
        if samples:
            self._give(request, partial(request.extend, samples, now), None if failed else reason)
        if failed and self._table.get(name) is not None:
            self._end(name, FinishReason.ERROR, NO_NUMBERS)

    def _give(self, request: LiveSequence, take: Callable[[], bool], reason: FinishReason | None) -> None:
        """Let a request take its tokens, and end it for `reason`, for a stop string or for a failure of its text."""
        error, by_scheduler, tokens = None, reason is not None, request.num_tokens
        try:
            if take():
                reason = FinishReason.STOP
        except Exception as failure:  # its text cannot be made; no other request is concerned
            reason, error = FinishReason.ERROR, str(failure)
        if reason is not None:
            if not by_scheduler:
                self.scheduler.finish(request.request_id, reason)
            self._end(request.request_id, reason, error)
            return
        if request.host_gated:
            self.masks.add(request)
        if request.num_tokens > tokens and request.collector.every_token:
            request.collector.put(request.reader)

    def _hold(self) -> frozenset[str]:
        """Make masks; the requests that sit out this step as theirs is not there yet. One that has none ends."""
        held = self.masks.make()
        for row, error in self.masks.take_failed():
            held -= {row.request_id}
            self.scheduler.finish(row.request_id, FinishReason.ERROR)
            self._end(row.request_id, FinishReason.ERROR, str(error))
        return held

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Deliver the terminal result of a sequence that the scheduler has ended."""
        ended = None if self._shadow is None else (self._table[request_id], self._table.settings[request_id])
        if self._speculator is not None:
            self._speculator.end(request_id)
        reason = self._table.end(request_id, reason, self.clock(), error)
        if self._table.kept is not None:
            for name in self._table.kept.take_forgotten():
                forget(self.scheduler, name)
        if self._shadow is not None and ended is not None:
            self._shadow.ended(*ended, reason)
        self.runner.discard(request_id)
        if self.on_end is not None:
            self.on_end(request_id, reason)
