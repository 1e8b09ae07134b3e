"""The prompts in slots that are not wholly planned yet."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler import policy
from scheduler.plan import Chunk, Decision
from scheduler.state import RequestState


class Prefilling:
    """Prompts in order of admission: the oldest is served first, and no other before it has all it needs.

    chunk_size, max_num_batched_tokens: as in `SchedulerConfig`.
    """

    def __init__(self, chunk_size: int, max_num_batched_tokens: int) -> None:
        self._chunk_size = chunk_size
        self._limit = max_num_batched_tokens
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def join(self, state: RequestState) -> None:
        """Take a request that was just admitted."""
        self._states[state.request_id] = state

    def leave(self, state: RequestState) -> None:
        """Take a request out. Raises KeyError when it is not here."""
        del self._states[state.request_id]

    def plan(
        self, decode_rows: int, decisions: list[Decision]
    ) -> tuple[tuple[Chunk, ...], list[RequestState]]:
        """Grant this step's chunks beside `decode_rows`.

        Returns the chunks in lane order and the requests whose prompt is wholly planned now; these have
        left. Appends the decisions, ending with the first prompt that did not get all it needs.
        """
        chunks: list[Chunk] = []
        complete: list[RequestState] = []
        budget = policy.prompt_budget(self._limit, decode_rows)
        for state in self:
            left = policy.num_chunks(state.prompt_tokens - state.prefilled, self._chunk_size)
            joins = state.request.max_tokens > 1
            granted = policy.grant(left, budget, self._chunk_size, joins_decode=joins, first=not chunks)
            chunks.extend(self._cut(state, granted))
            budget -= policy.chunk_cost(granted, self._chunk_size, joins_decode=joins and granted == left)
            reason = f"{granted} of the {left} chunks left; "
            if granted and budget < 0:
                reason += f"one runs in every step, here beyond the token budget {self._limit}"
            elif granted == left:
                reason += f"within the token budget {self._limit}"
            else:
                reason += (
                    f"token budget {self._limit} used up by {decode_rows} decode rows and {len(chunks)} "
                    f"chunks of {self._chunk_size}"
                )
            decisions.append(state.decide("prefill" if granted else "hold", reason))
            if granted < left:
                break
            complete.append(state)
        for state in complete:
            self.leave(state)
        return tuple(chunks), complete

    def _cut(self, state: RequestState, count: int) -> Iterator[Chunk]:
        """The next `count` chunks of a prompt; they count as planned."""
        prompt = state.request.prompt_token_ids
        for start, stop in policy.next_cuts(state.prefilled, len(prompt), self._chunk_size, count):
            state.prefilled = stop
            yield Chunk(
                slot=state.slot,
                request_id=state.request_id,
                start=start,
                tokens=prompt[start:stop],
                is_last=stop == len(prompt),
            )
