"""Predicts the next plan without changing the scheduler."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape

from xla_engine.scheduler.kv.readiness import MASK
from xla_engine.scheduler.moves import Swap
from xla_engine.scheduler.plan import Chunk, Plan, Row, Speculation, VerifyRow
from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.scheduler import Scheduler
from xla_engine.scheduler.snapshot import RequestView, Snapshot, wait_behind


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """A prediction.

    plan: the next plan.
    then: the snapshot after it.
    expired: the requests that would pass their deadlines before.
    """

    plan: Plan
    then: Snapshot
    expired: tuple[tuple[str, FinishReason], ...] = ()

    @property
    def why_not(self) -> dict[str, str]:
        """Why requests that are not in the plan wait, by id: those with a slot first, then the queue in order."""
        plan = self.plan
        parts: tuple[Chunk | Row | VerifyRow | Swap, ...]
        parts = (*plan.chunks, *plan.decode, *plan.verify, *plan.moves.resumes)
        busy = {part.request_id for part in parts}
        with_slots = [view.request for view in self.then.slots if view.request is not None]
        told = {decision.request_id: decision.reason for decision in plan.decisions}
        reasons = {view.request_id: _reason(view) for view in (*with_slots, *self.then.draining)}
        for ahead, view in enumerate(self.then.waiting):
            behind = wait_behind(view.request_id, ahead) if ahead else view.decision
            reasons[view.request_id] = told.get(view.request_id) or ("" if behind is None else behind.reason)
        return {
            name: MASK if name in plan.blocked else reason
            for name, reason in reasons.items()
            if name not in busy
        }

    def _repr_html_(self) -> str:
        """A table for notebooks: which requests would run, and why the others would not."""
        plan = self.plan
        rows = [(part.request_id, "prefill", f"slot {part.slot.index}") for part in plan.chunks]
        decoding: tuple[Row | VerifyRow, ...] = (*plan.decode, *plan.verify)
        rows += [(row.request_id, "decode", f"slot {row.slot.index}") for row in decoding]
        rows += [(name, "", why) for name, why in self.why_not.items()]
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        return f"<table><caption>step {plan.step}</caption>{body}</table>"


def peek(
    scheduler: Scheduler,
    speculation: Speculation | None = None,
    *,
    blocked: Collection[str] = (),
    now: float | None = None,
) -> Peek:
    """What `Scheduler.plan` would return, after `expire(now)` if `now` is given. The scheduler does not change.

    A deep copy of the scheduler makes the plan. It shares the requests that the plan cannot affect, so each waiting
    request costs only a few microseconds.
    """
    near = {id(state) for state in _near(scheduler, now)}
    far = [state for state in scheduler.states.values() if id(state) not in near]
    twin = copy.deepcopy(scheduler, {id(state): state for state in far})
    expired = () if now is None else tuple(twin.expire(now))
    plan = twin.plan(speculation, blocked)
    return Peek(plan=plan, then=twin.snapshot(), expired=expired)


def _near(scheduler: Scheduler, now: float | None) -> Iterator[RequestState]:
    """The requests that the next plan or an expired deadline may change."""
    states = scheduler.states.values()
    # Enough to fill all slots, preempt and fill them again, and the next in line.
    most = 2 * scheduler.config.max_num_seqs + 1
    yield from (state for state in states if state.status not in (Status.WAITING, Status.PARKED))
    yield from scheduler.waiting.near(most)
    if now is not None:
        for state in states:
            times = state.request.deadline, state.request.queue_deadline
            if any(time is not None and time <= now for time in times):
                yield state


def _reason(view: RequestView) -> str:
    if view.status is Status.RUNNING:
        if view.planned == view.max_tokens:
            return "all its tokens are planned"
        return "its next token waits until its last one is read"
    return "" if view.decision is None else view.decision.reason
