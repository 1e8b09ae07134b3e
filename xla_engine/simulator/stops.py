"""Which steps sample a stop token: those after which a request has the tokens that its trace says."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from scheduler import Chunk, Decoded, Plan, Row, Sample, StepResult
from xla_engine.simulator.trace import Arrival

TOKEN, STOP = Sample(0), Sample(1)
STOPS = frozenset({STOP.token_id})


@dataclass(slots=True)
class _Request:
    """step: the one that samples its stop token, None while it does not decode. tokens: sampled, in lockstep."""

    number: int
    arrival: Arrival
    step: int | None = None
    tokens: int = 0


class StopTokens:
    """Samples in the place of a device with `slots` rows."""

    def __init__(self, slots: int) -> None:
        self._nobody_stops = Decoded(tokens=[TOKEN.token_id] * slots)
        self._requests: dict[str, _Request] = {}  # live ones that get fewer tokens than they ask for
        self._lockstep = 0  # of these
        self._heap: list[tuple[int, int, str]] = []  # (step, number, request), stale ones among them

    @property
    def next_step(self) -> int | None:
        """No stop token is sampled before it."""
        return self._heap[0][0] if self._heap else None

    def submit(self, number: int, arrival: Arrival) -> None:
        """A request comes, the `number`-th."""
        if arrival.new_tokens < arrival.max_tokens:
            self._requests[arrival.name] = _Request(number, arrival)
            self._lockstep += arrival.lockstep

    def begin(self, name: str, step: int, sampled: int) -> None:
        """A request decodes from `step` on; it has `sampled` tokens before."""
        request = self._requests.get(name)
        if request is not None and not request.arrival.lockstep:
            request.step = step + max(request.arrival.new_tokens - sampled - 1, 0)
            heapq.heappush(self._heap, (request.step, request.number, name))

    def lose_slot(self, name: str, step: int) -> None:
        """A request does not decode from `step` on; what it sampled before is on its way all the same."""
        request = self._requests.get(name)
        if request is not None and request.step is not None and request.step >= step:
            request.step = None

    def end(self, name: str) -> None:
        """A request is over."""
        if (request := self._requests.pop(name, None)) is not None:
            self._lockstep -= request.arrival.lockstep

    def result(self, plan: Plan) -> StepResult:
        """What a step samples."""
        stopping = self._stopping(plan)
        first = [TOKEN] * len(plan.first_rows)
        decode = self._nobody_stops
        if stopping:
            for at, chunk in enumerate(plan.first_rows):
                name = chunk.request_id
                if name in stopping and self._requests[name].arrival.new_tokens == chunk.generated + 1:
                    first[at] = STOP
            stops = {row.slot.index for row in plan.decode if row.request_id in stopping}
            tokens = (STOP if slot in stops else TOKEN for slot in range(len(decode.tokens)))
            decode = Decoded(tokens=[token.token_id for token in tokens])
        return StepResult(first=first, decode=decode)

    def _stopping(self, plan: Plan) -> set[str]:
        stopping = set()
        while self._heap and self._heap[0][0] <= plan.step:
            step, number, name = heapq.heappop(self._heap)
            request = self._requests.get(name)
            if request is not None and (request.number, request.step) == (number, step):
                stopping.add(name)
        if self._lockstep:
            stopping.update(self._lockstep_stops(plan))
        return stopping

    def _lockstep_stops(self, plan: Plan) -> Iterator[str]:
        """Requests in lockstep, which do not decode in every step: their tokens are counted."""
        parts: tuple[Chunk | Row, ...] = (*plan.first_rows, *plan.decode)
        for part in parts:
            request = self._requests.get(part.request_id)
            if request is not None and request.arrival.lockstep:
                request.tokens += 1
                if request.tokens == request.arrival.new_tokens:
                    yield part.request_id
