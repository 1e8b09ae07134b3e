"""The scheduler's state as frozen records, for people and tests; does not touch the device."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape

from xla_engine.scheduler.kv.allocator import Slots
from xla_engine.scheduler.plan import Decision, Slot
from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState

SHOWN_WAITING = 8  # queued requests that the table in notebooks shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of a request in seconds, on the engine's clock; the scheduler has none.

    age: since it was submitted. queued: until it got its first slot, or so far. first_token: until its first token was
    read; None before that.
    """

    age: float
    queued: float
    first_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One live request.

    priority, arrival: determine its place in the queue, see `scheduler.policy.place`.
    prompt_tokens, max_tokens: as in the request.
    prefilled: prompt tokens planned so far.
    planned: new tokens planned so far.
    credited: new tokens received.
    decision: the latest about it; None if no plan was made since it arrived.
    quantum_left: steps until its quantum is over, 0 if it is; None without "round_robin", or if it does not run.
    times: None if the caller provides none.
    """

    request_id: str
    status: Status
    priority: int
    arrival: int
    prompt_tokens: int
    max_tokens: int
    prefilled: int
    planned: int
    credited: int
    decision: Decision | None
    quantum_left: int | None = None
    times: Times | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """One slot.

    position: KV entries that the plans so far have written.
    request: None if the slot is free.
    blocks: the KV blocks of its request, with a block pool.
    """

    slot: Slot
    position: int
    request: RequestView | None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since start-up. `submitted` counts the live requests and all of `finished`.

    Each of the n sequences of a caller's request counts as one request.
    """

    steps_planned: int
    steps_committed: int
    submitted: int
    finished: Mapping[FinishReason, int]
    tokens_credited: int
    tokens_dropped: int  # sampled for an occupancy that had ended
    preemptions: int = 0
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All live requests.

    slots: by index. waiting: the queue, first in line first.
    draining: requests that have handed over their slot and have tokens in flight, oldest first.
    """

    slots: tuple[SlotView, ...]
    waiting: tuple[RequestView, ...]
    draining: tuple[RequestView, ...]
    counters: Counters

    def _repr_html_(self) -> str:
        """A table for notebooks: the slots and the head of the queue."""
        rows = [(str(view.slot.index), view.request, str(view.position)) for view in self.slots]
        rows += [("waiting", view, "") for view in self.waiting[:SHOWN_WAITING]]
        if len(self.waiting) > SHOWN_WAITING:
            rows.append((f"{len(self.waiting) - SHOWN_WAITING} more", None, ""))
        rows += [("draining", view, "") for view in self.draining]
        head = ("slot", "request", "status", "KV entries", "tokens", "why")
        body = [head, *((place, *_cells(view, entries)) for place, view, entries in rows)]
        return "<table>" + "".join(_html_row(cells) for cells in body) + "</table>"


def _cells(view: RequestView | None, entries: str) -> tuple[str, ...]:
    if view is None:
        return ("",) * 5
    why = view.decision.reason if view.decision else ""
    return view.request_id, view.status.value, entries, f"{view.credited} of {view.max_tokens}", why


def _html_row(cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def take(
    slots: Slots,
    waiting: Iterable[RequestState],
    admitted: Iterable[RequestState],
    counters: Counters,
    times: Callable[[str], Times | None],
    *,
    takes_turns: bool,
) -> Snapshot:
    """Take a snapshot.

    admitted: every live request that has left the queue, oldest first. times: returns those of a request.
    takes_turns: whether the policy is "round_robin".
    """

    def view_of(state: RequestState, decision: Decision | None) -> RequestView:
        runs = takes_turns and state.holds_slot and state.status is Status.RUNNING
        return RequestView(
            request_id=state.request_id,
            status=state.status,
            priority=state.request.priority,
            arrival=state.arrival,
            prompt_tokens=state.prompt_tokens,
            max_tokens=state.request.max_tokens,
            prefilled=state.prefilled,
            planned=state.planned(step),
            credited=state.credited,
            decision=decision,
            quantum_left=max(state.turn_ends - step, 0) if runs else None,
            times=times(state.request_id),
        )

    def free(index: int) -> SlotView:
        return SlotView(slot=slots.current(index), position=0, request=None)

    step = counters.steps_planned
    held: dict[int, SlotView] = {}
    draining = []
    oldest_prompt: RequestState | None = None
    for state in admitted:
        decision = state.decision
        if state.status is Status.PREFILLING:
            if oldest_prompt is not None:
                decision = _hold_behind(state, oldest_prompt)
            oldest_prompt = oldest_prompt or state
        view = view_of(state, decision)
        if state.holds_slot:
            held[state.slot.index] = SlotView(
                slot=state.slot, position=state.position(step), request=view, blocks=state.blocks
            )
        else:
            draining.append(view)
    return Snapshot(
        slots=tuple(held.get(index) or free(index) for index in range(len(slots))),
        waiting=tuple(
            view_of(state, _wait_behind(state, ahead) if ahead else state.decision)
            for ahead, state in enumerate(waiting)
        ),
        draining=tuple(draining),
        counters=counters,
    )


# A plan has decisions only about the head of the queue and the oldest prompts, so that its cost does not grow with the
# queue. The decisions about the others are made here.


def _wait_behind(state: RequestState, ahead: int) -> Decision:
    reason = f"{ahead} {'goes' if ahead == 1 else 'go'} first"
    return Decision(request_id=state.request_id, action="wait", reason=reason)


def _hold_behind(state: RequestState, oldest: RequestState) -> Decision:
    reason = f"the prompt of {oldest.request_id!r} is older and goes first"
    return Decision(request_id=state.request_id, action="hold", reason=reason)
