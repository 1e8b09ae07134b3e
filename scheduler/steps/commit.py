"""Credits the tokens of a step to the requests of its plan, and ends those that are complete."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from xla_engine.scheduler.plan import Chunk, Plan, ResultMismatchError, Row, StepResult, VerifyRow
from xla_engine.scheduler.request import FinishReason
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.samples import NO_CHOICE, NO_TOKEN, Decoded, Sample
from xla_engine.scheduler.steps.decode import Batch, Decoding


class TokenEvent(NamedTuple):
    """One token credited to a request; `finish_reason` is set on its last one. If it is ERROR, there is no token."""

    request_id: str
    sample: Sample
    finish_reason: FinishReason | None


class Events:
    """The tokens of a step: first tokens in lane order, then decoded ones in row order.

    Only decoded tokens that end a request exist as objects; iterating makes the others.

    first: the first tokens. ended: the decoded tokens that end their request.
    several: tokens of speculating requests, row by row in order; they come last.
    verified: for each of these rows, how many tokens it sampled, including dropped ones, and how many drafts it had.
    """

    def __init__(
        self,
        first: Sequence[TokenEvent] = (),
        rows: Sequence[Row] = (),
        decoded: Decoded | None = None,
        *,
        dropped: Collection[int] = (),
        ended: Mapping[int, TokenEvent] | None = None,
    ) -> None:
        """dropped: slots whose sample belongs to no live request. ended: by slot, in row order."""
        self.first = first
        self.several: Sequence[TokenEvent] = ()
        self.verified: Sequence[tuple[int, int]] = ()
        self._rows = rows
        self._decoded = decoded or Decoded()
        self._dropped = dropped
        self._ended = ended or {}

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of the decode step that were credited: the plan's own tuple if these are all."""
        if not self._dropped:
            return self._rows
        return [row for row in self._rows if row.slot.index not in self._dropped]

    @property
    def ended(self) -> Collection[TokenEvent]:
        return self._ended.values()

    def __len__(self) -> int:
        return len(self.first) + len(self._rows) - len(self._dropped) + len(self.several)

    def __iter__(self) -> Iterator[TokenEvent]:
        yield from self.first
        yield from self._of(self._rows)
        yield from self.several

    def of_latest(self, count: int) -> Iterator[TokenEvent]:
        """First tokens, and the decoded ones of the `count` rows that joined last."""
        yield from self.first
        yield from self._of(self._rows[len(self._rows) - min(count, len(self._rows)) :])

    def _of(self, rows: Sequence[Row]) -> Iterator[TokenEvent]:
        for row in rows:
            slot = row.slot.index
            if slot in self._ended:
                yield self._ended[slot]
            elif slot not in self._dropped:
                yield TokenEvent(row.request_id, self._decoded.sample(slot), None)


class Committer:
    """Credits the samples of steps, in the order of the plans, to the occupancies of the plan.

    Fast path: every row still belongs to its request, except for those known to have ended, and reaches `max_tokens`
    in the step known in advance. So a row costs little, and only rows that join or leave cost more.

    live: every live request by id, kept up to date by the caller.
    end: called with each request that ends.
    steps: steps credited so far.
    credited, dropped: tokens so far.
    """

    def __init__(
        self,
        live: Mapping[str, RequestState],
        decoding: Decoding,
        end: Callable[[RequestState, FinishReason], None],
        *,
        keeps_tokens: bool = False,
    ) -> None:
        self._live = live
        self._decoding = decoding
        self._end = end
        self._keeps_tokens = keeps_tokens
        self.steps = 0
        self.credited = 0
        self.dropped = 0
        # Tokens that end a row, and for how many rows.
        self._stops = Counter({NO_CHOICE: 1})
        # About steps that were planned and not yet credited:
        self._ending: dict[int, list[RequestState]] = {}  # by step: requests that have their last token in it
        self._gone: list[tuple[int, int, int]] = []  # rows whose request has ended: slot, first and last step
        self._unlike = 0  # steps before this one are credited row by row

    def joined(self, state: RequestState) -> None:
        """Note that a request decodes from now on."""
        if _decodes(state):
            for token_id in state.request.stop_token_ids:
                self._stops[token_id] += 1

    def handed_over(self, state: RequestState) -> None:
        """Note that the last token of a request that joined is planned."""
        if _decodes(state) and state.last_step is not None:
            self._ending.setdefault(state.last_step, []).append(state)

    def taken_away(self, state: RequestState, next_step: int) -> None:
        """Note that a request that joined was preempted: credit the steps before `next_step` row by row."""
        self._forget(state)
        self.differ(next_step)

    def take_back(self, state: RequestState) -> None:
        """Count a request's credited tokens as dropped, because it will sample them again."""
        self.credited -= state.credited
        self.dropped += state.credited

    def ended(self, state: RequestState, next_step: int) -> None:
        """Drop the uncredited tokens of a request that joined and has ended."""
        assert state.last_step is not None
        self._forget(state)
        first, last = max(state.first_step, self.steps), min(state.last_step, next_step - 1)
        if first <= last:
            self._gone.append((state.slot.index, first, last))

    def differ(self, next_step: int) -> None:
        """Credit the steps before `next_step` row by row, because they do not fit the fast path."""
        self._unlike = next_step

    def _forget(self, state: RequestState) -> None:
        if _decodes(state):
            for token_id in state.request.stop_token_ids:
                self._stops[token_id] -= 1
                if not self._stops[token_id]:
                    del self._stops[token_id]

    def credit(self, plan: Plan, result: StepResult) -> Events:
        """Credit the next step. Raises ResultMismatchError if the result does not match the plan."""
        assert plan.step == self.steps, f"step {plan.step} committed in place of {self.steps}"
        first_rows = plan.first_rows if plan.chunks else ()
        if len(result.first) != len(first_rows):
            raise ResultMismatchError(
                f"step {plan.step} samples {len(first_rows)} first tokens; the result has {len(result.first)}"
            )
        first = [self._credit(chunk, sample) for chunk, sample in zip(first_rows, result.first, strict=True)]
        known = [event for event in first if event is not None]
        ending, over = self._ending.pop(plan.step, ()), set()
        if self._gone:
            over = {slot for slot, first_step, last in self._gone if first_step <= plan.step <= last}
            self._gone = [gone for gone in self._gone if gone[2] > plan.step]
        batch = None if plan.step < self._unlike else self._decoding.batch(plan.decode)
        try:
            if not plan.decode:
                events = Events(known)
            elif batch is None:
                events = self._credit_each(known, plan.decode, result.decode)
            else:
                events = self._credit_all(known, batch, result.decode, ending, over)
        except IndexError:
            raise ResultMismatchError(
                f"step {plan.step} decodes slots {sorted(row.slot.index for row in plan.decode)}; the result has "
                f"{len(result.decode.tokens)} slots"
            ) from None
        if plan.verify:
            events.several = self._credit_verified(plan, result)
            drafted = result.drafted or [0] * len(plan.verify)
            events.verified = [
                (len(samples), drafts) for samples, drafts in zip(result.verify, drafted, strict=True)
            ]
        self.steps += 1
        return events

    def _credit_all(
        self,
        first: list[TokenEvent],
        batch: Batch,
        decoded: Decoded,
        ending: Sequence[RequestState],
        over: set[int],
    ) -> Events:
        """Fast path: credit the step's token to every row except those of the slots `over`."""
        column, slots = decoded.tokens, batch.slots
        tokens = itemgetter(*slots)(column) if len(slots) > 1 else (column[slots[0]],)
        late = sum(column[slot] != NO_TOKEN for slot in over)
        if tokens.count(NO_TOKEN) != len(over) - late:
            row = next(
                row for row in batch.rows if row.slot.index not in over and column[row.slot.index] == NO_TOKEN
            )
            raise _silent(row)
        if self._keeps_tokens:
            for keep, token in zip(batch.keep, tokens, strict=True):
                keep(token)
        at = {slots.index(state.slot.index) for state in ending if self._live.get(state.request_id) is state}
        if not self._stops.keys().isdisjoint(tokens):
            at.update(place for place, token in enumerate(tokens) if token in self._stops)
        self.credited += len(slots) - len(over)
        self.dropped += late
        ended = {}
        for place in sorted(at):
            slot, name = slots[place], batch.rows[place].request_id
            if slot in over:
                continue
            state = self._live[name]
            if (
                reason := self._reason(state, tokens[place], capped=state.last_step == self.steps)
            ) is not None:
                self.credited -= reason is FinishReason.ERROR
                ended[slot] = TokenEvent(name, decoded.sample(slot), reason)
                self._end(state, reason)
        return Events(first, batch.rows, decoded, dropped=over, ended=ended)

    def _credit_each(self, first: list[TokenEvent], rows: Sequence[Row], decoded: Decoded) -> Events:
        """Slow path: credit the step's tokens row by row."""
        dropped, ended = set(), {}
        for row in rows:
            slot = row.slot.index
            event = self._credit(row, decoded.sample(slot))
            if event is None:
                dropped.add(slot)
            elif event.finish_reason is not None:
                ended[slot] = event
        return Events(first, rows, decoded, dropped=dropped, ended=ended)

    def _credit_verified(self, plan: Plan, result: StepResult) -> list[TokenEvent]:
        if len(result.verify) != len(plan.verify):
            raise ResultMismatchError(
                f"step {plan.step} verifies {len(plan.verify)} rows; the result has {len(result.verify)}"
            )
        events: list[TokenEvent] = []
        for row, samples in zip(plan.verify, result.verify, strict=True):
            if len(samples) > row.width:
                raise ResultMismatchError(
                    f"{len(samples)} samples for {row.request_id!r} in slot {row.slot.index}; {row.width} were planned"
                )
            events.extend(self._credit_several(row, samples))
        return events

    def _credit_several(self, part: VerifyRow, samples: Sequence[Sample]) -> Iterator[TokenEvent]:
        """Credit the tokens of a row of a verify step, up to the one that ends its request."""
        state = self._live.get(part.request_id)
        if state is None or state.goes_on or state.occupancy != part.slot:
            self.dropped += len(samples)  # `goes_on`: the step was planned before the request was extended
            return
        if not samples:
            raise _silent(part)
        state.widths.pop(0)
        cap = state.request.max_tokens
        for place, sample in enumerate(samples, 1):
            if sample.token_id != NO_CHOICE:
                state.credited += 1
                self.credited += 1
                if self._keeps_tokens:
                    state.generated.append(sample.token_id)
            reason = self._reason(state, sample.token_id, capped=state.credited == cap)
            if reason is not None:
                self.dropped += len(samples) - place
                self._end(state, reason)
            yield TokenEvent(part.request_id, sample, reason)
            if reason is not None:
                return
        state.planned_before += len(samples) - 1

    def _credit(self, part: Chunk | Row, sample: Sample) -> TokenEvent | None:
        """Credit one sample; None if it belongs to no live request.

        The occupancy in the plan decides this, not the request that holds the slot now.
        """
        state, token_id = self._live.get(part.request_id), sample.token_id
        if state is None or (state.occupancy is not part.slot and state.occupancy != part.slot):
            self.dropped += token_id != NO_TOKEN
            return None
        if token_id == NO_TOKEN:
            raise _silent(part)
        if token_id != NO_CHOICE:
            if isinstance(part, Row) and state.last_step is not None:
                state.settle(self.steps + 1)
            else:
                state.credited += 1
            self.credited += 1
            if self._keeps_tokens:
                state.generated.append(token_id)
        reason = self._reason(state, token_id, capped=state.credited == state.request.max_tokens)
        if reason is not None:
            self._end(state, reason)
        return TokenEvent(part.request_id, sample, reason)

    @staticmethod
    def _reason(state: RequestState, token_id: int, *, capped: bool) -> FinishReason | None:
        """Why a request ends with this token; None if it does not."""
        if token_id == NO_CHOICE:
            return FinishReason.ERROR
        if token_id in state.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if capped else None


def _decodes(state: RequestState) -> bool:
    """Whether a request that joined has tokens beyond its first."""
    return state.last_step is not None and state.first_step <= state.last_step


def _silent(part: Chunk | Row | VerifyRow) -> ResultMismatchError:
    return ResultMismatchError(
        f"no sample for {part.request_id!r} in slot {part.slot.index}; a row that did not stop samples one "
        "token a step"
    )
