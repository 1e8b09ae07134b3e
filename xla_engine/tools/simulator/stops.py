"""Which steps sample a stop token: a request ends with the number of tokens in its trace."""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xla_engine.scheduler import NO_CHOICE, Decoded, Plan, Sample, StepResult
from xla_engine.tools.simulator.trace import Arrival

TOKEN, STOP, NONE = Sample(0), Sample(1), Sample(NO_CHOICE)
STOPS = frozenset({STOP.token_id})


@dataclass(slots=True)
class _Request:
    """A running request that ends before its max_tokens.

    step: the one that samples its stop token, None while it does not decode.

    Of one whose tokens are counted: the step from which it decodes, and the tokens it has sampled.
    """

    number: int
    arrival: Arrival
    step: int | None = None
    tokens: int = 0


class StopTokens:
    """Samples in place of a device with `slots` rows.

    apart: whether each request gets distinct tokens, so that no answer is found in the cache for another.
    verified: of a run with speculation, how many tokens the rows of `Plan.verify` sampled and how many drafts they
        had, step by step. The tokens of all requests are counted then, else those of constrained ones.
    """

    def __init__(
        self, slots: int, *, apart: bool, verified: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> None:
        self._own: dict[str, Sample] | None = {} if apart else None  # what each live request samples
        self._no_stop = Decoded(tokens=[TOKEN.token_id] * slots)
        self._requests: dict[str, _Request] = {}  # live ones that get fewer tokens than they ask for
        self._verified = verified
        self._counted = 0  # of these
        self._heap: list[tuple[int, int, str]] = []  # (step, number, request), stale ones among them

    @property
    def next_step(self) -> int | None:
        """The earliest step that may sample a stop token, None if none will."""
        return self._heap[0][0] if self._heap else None

    def submit(self, number: int, arrival: Arrival) -> None:
        """Add a request, the `number`-th."""
        if self._own is not None:
            self._own[arrival.name] = Sample(number + 2)
        if arrival.new_tokens < arrival.max_tokens or arrival.fails:
            self._requests[arrival.name] = _Request(number, arrival)
            self._counted += self._is_counted(arrival)

    def begin(self, name: str, step: int, sampled: int) -> None:
        """Let a request decode from `step` on; it has `sampled` tokens before."""
        request = self._requests.get(name)
        if request is not None and self._is_counted(request.arrival):
            request.step, request.tokens = step, sampled
        elif request is not None:
            request.step = step + max(request.arrival.new_tokens - sampled - 1, 0)
            heapq.heappush(self._heap, (request.step, request.number, name))

    def lose_slot(self, name: str, step: int) -> None:
        """Take a request's slot: it does not decode from `step` on. What it sampled before still comes."""
        request = self._requests.get(name)
        if request is not None and not self._is_counted(request.arrival) and (request.step or 0) >= step:
            request.step = None

    def end(self, name: str) -> None:
        if self._own is not None:
            del self._own[name]
        if (request := self._requests.pop(name, None)) is not None:
            self._counted -= self._is_counted(request.arrival)

    def result(self, plan: Plan) -> StepResult:
        stopping = self._stopping(plan)
        first = [self._usual(chunk.request_id) for chunk in plan.first_rows]
        decode = self._no_stop
        if stopping:
            for at, chunk in enumerate(plan.first_rows):
                name = chunk.request_id
                if name in stopping and self._requests[name].arrival.new_tokens == chunk.generated + 1:
                    first[at] = self._last(name)
        if stopping or self._own is not None:
            column = list(decode.tokens)
            for row in plan.decode:
                name = row.request_id
                sample = self._last(name) if name in stopping else self._usual(name)
                column[row.slot.index] = sample.token_id
            decode = Decoded(tokens=column)
        if not plan.verify:
            return StepResult(first=first, decode=decode)
        assert self._verified is not None
        counts = self._verified[plan.step] if plan.step < len(self._verified) else ()
        # If the run differs from the recorded one, rows sample one token each.
        counts = counts if len(counts) == len(plan.verify) else [(1, 0)] * len(plan.verify)
        return StepResult(
            first=first,
            decode=decode,
            verify=[
                self._several(row.request_id, min(tokens, row.width), plan.step)
                for row, (tokens, _) in zip(plan.verify, counts, strict=True)
            ],
            drafted=[drafts for _, drafts in counts],
        )

    def _several(self, name: str, tokens: int, step: int) -> list[Sample]:
        """What a row samples in one step; the last token of its request is a stop token."""
        samples = [self._usual(name)] * tokens
        request = self._requests.get(name)
        if request is None or request.step is None or step < request.step:
            return samples
        left = request.arrival.new_tokens - request.tokens
        request.tokens += tokens
        if 1 <= left <= tokens:
            samples[left - 1] = self._last(name)
        return samples

    def _is_counted(self, arrival: Arrival) -> bool:
        return arrival.constrained or self._verified is not None

    def _stopping(self, plan: Plan) -> set[str]:
        stopping = set()
        while self._heap and self._heap[0][0] <= plan.step:
            step, number, name = heapq.heappop(self._heap)
            request = self._requests.get(name)
            if request is not None and (request.number, request.step) == (number, step):
                stopping.add(name)
        if self._counted:
            stopping.update(self._counted_stops(plan))
        return stopping

    def _counted_stops(self, plan: Plan) -> Iterator[str]:
        """Requests that do not get one token in every step."""
        for chunk in plan.first_rows:
            request = self._requests.get(chunk.request_id)
            if (
                request is not None
                and self._is_counted(request.arrival)
                and request.arrival.new_tokens == chunk.generated + 1
            ):
                yield chunk.request_id
        for row in plan.decode:
            request = self._requests.get(row.request_id)
            if request is None or not self._is_counted(request.arrival):
                continue
            if plan.step >= (request.step or 0):
                request.tokens += 1
                if request.tokens == request.arrival.new_tokens:
                    yield row.request_id

    def _usual(self, name: str) -> Sample:
        return TOKEN if self._own is None else self._own.get(name, TOKEN)

    def _last(self, name: str) -> Sample:
        return NONE if self._requests[name].arrival.fails else STOP
