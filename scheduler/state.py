"""One request's progress, from submit to its end."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.plan import Decision, Slot
from scheduler.request import FinishReason, Request, Status


@dataclass(slots=True, kw_only=True, eq=False)
class RequestState:
    """One life of a request id; a later request under the same id has another state.

    arrival: how many requests were submitted before it.
    tenancy: the slot the request was admitted to. It stays when the slot is handed over, because tokens
        still in flight are credited by it.
    holds_slot: whether the slot of `tenancy` is still this request's.
    prefilled: prompt tokens planned.
    last_step: the plan that plans this request's last token; known once the whole prompt is planned. None in lockstep.
    lockstep_planned: new tokens planned, of a request in lockstep.
    credited: tokens received by commits.
    decision: the latest about it, None before the first.
    """

    request: Request
    arrival: int
    status: Status = Status.WAITING
    tenancy: Slot | None = None
    holds_slot: bool = False
    prefilled: int = 0
    last_step: int | None = None
    lockstep_planned: int = 0
    credited: int = 0
    finish_reason: FinishReason | None = None
    decision: Decision | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def slot(self) -> Slot:
        """The tenancy of a request that was admitted."""
        assert self.tenancy is not None, f"request {self.request_id!r} was never admitted"
        return self.tenancy

    def planned(self, next_step: int) -> int:
        """New tokens planned by the plans before `next_step`, in flight or credited.

        From the plan of the last chunk on, each plan adds one token (that one two: the first and a decoded
        one), so the count follows from `last_step` and no step has to count.
        """
        if self.last_step is None:
            return self.lockstep_planned
        return self.request.max_tokens - max(self.last_step + 1 - next_step, 0)

    def position(self, next_step: int) -> int:
        """KV entries written by the plans before `next_step`, which is the row's next write index."""
        return self.prefilled + max(self.planned(next_step) - 1, 0)

    def decide(self, action: str, reason: str) -> Decision:
        """Record a decision about this request, and return it."""
        self.decision = Decision(request_id=self.request_id, action=action, reason=reason)
        return self.decision
