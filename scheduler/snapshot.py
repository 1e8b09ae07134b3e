"""The scheduler's state as frozen records, for people and tests; does not touch the device."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import takewhile

from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.kv.readiness import MASK, unready
from xla_engine.scheduler.moves import Slot
from xla_engine.scheduler.plan import Decision
from xla_engine.scheduler.queue import WaitingQueue
from xla_engine.scheduler.request import FinishReason, Status
from xla_engine.scheduler.request_state import RequestState

NEXT = "next"  # the action of a request that gets a slot in the next plan
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
    decision: what it does now, or what it waits for; None if no plan was made since it arrived. Its action may also be
        "decode", or "next": it gets a slot in the next plan.
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
    kv: KVAllocator,
    queue: WaitingQueue,
    admitted: Iterable[RequestState],
    counters: Counters,
    times: Callable[[str], Times | None],
    *,
    takes_turns: bool,
    masked: Collection[str],
) -> Snapshot:
    """Take a snapshot.

    admitted: every live request that has left the queue, oldest first. times: returns those of a request.
    takes_turns: whether the policy is "round_robin". masked: requests whose mask is not ready.
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

    slots, step, waiting = kv.slots, counters.steps_planned, list(queue)
    head, entering = _next_in_line(waiting, queue, kv, masked)
    occupied: dict[int, SlotView] = {}
    draining = []
    oldest_prompt: RequestState | None = None
    for state in admitted:
        decision = state.decision
        if state.status is Status.PREFILLING:
            if oldest_prompt is not None:
                decision = _hold_behind(state, oldest_prompt)
            oldest_prompt = oldest_prompt or state
        else:
            decision = _goes_on(state, masked)
        view = view_of(state, decision)
        if state.holds_slot:
            occupied[state.slot.index] = SlotView(
                slot=state.slot, position=state.position(step), request=view, blocks=state.blocks
            )
        else:
            draining.append(view)
    return Snapshot(
        slots=tuple(occupied.get(index) or free(index) for index in range(len(slots))),
        waiting=tuple(
            view_of(state, wait_behind(state.request_id, ahead, entering) if ahead else head)
            for ahead, state in enumerate(waiting)
        ),
        draining=tuple(draining),
        counters=counters,
    )


# A plan has decisions only about the head of the queue and the oldest prompts, so that its cost does not grow with the
# queue and with the rows. The decisions about the others are made here, and say what holds now.


def wait_behind(request_id: str, ahead: int, entering: int = 0) -> Decision:
    """What a request waits for that `ahead` others go before; the first `entering` of the queue get slots."""
    if ahead < entering:
        return Decision(request_id=request_id, action=NEXT, reason="gets a slot in the next plan")
    reason = f"{ahead} {'goes' if ahead == 1 else 'go'} first"
    return Decision(request_id=request_id, action="wait", reason=reason)


def _next_in_line(
    line: list[RequestState], queue: WaitingQueue, kv: KVAllocator, masked: Collection[str]
) -> tuple[Decision | None, int]:
    """What the first of a line waits for, and how many of it get a slot in the next plan.

    The next plan will find the same, unless something happens before. A request that is extended or recomputed, or
    whose place in line depends on the cache, keeps its last decision.
    """
    if not line:
        return None, 0
    state, name = line[0], line[0].request_id
    if not queue or state is not queue.next_in_line(kv.cached_tokens):
        return state.decision, 0
    if (reason := unready(state, kv, masked)) is not None:
        return Decision(request_id=name, action="wait", reason=reason), 0
    if state.goes_on or (state.status is Status.WAITING and state.base != state.credited):
        return state.decision, 0
    if (missing := kv.missing(state)) is not None:
        return Decision(request_id=name, action="wait", reason=missing), 0
    reason = f"gets slot {kv.next_slot(state)} in the next plan"
    unless = "its mask is not ready" if state.awaits_mask else ""
    unless = unless or ("rows that grow need the blocks" if kv.blocks is not None else "")
    if unless:
        return Decision(request_id=name, action="wait", reason=f"{reason}, unless {unless}"), 0
    first = line[: kv.slots.num_free]
    ready = takewhile(lambda state: unready(state, kv, masked) is None and not state.awaits_mask, first)
    return Decision(request_id=name, action=NEXT, reason=reason), len(list(ready))


def _hold_behind(state: RequestState, oldest: RequestState) -> Decision:
    reason = f"the prompt of {oldest.request_id!r} is older and goes first"
    return Decision(request_id=state.request_id, action="hold", reason=reason)


def _goes_on(state: RequestState, masked: Collection[str]) -> Decision:
    """What a request does whose prompt is wholly planned."""
    left = state.request.max_tokens - state.credited
    tokens = f"{left} token{'' if left == 1 else 's'}"
    if not state.holds_slot:
        reason = f"all its tokens are planned; {tokens} not read yet"
        return Decision(request_id=state.request_id, action="hand over", reason=reason)
    if state.request.constrained and state.request_id in masked:
        return Decision(request_id=state.request_id, action="hold", reason=MASK)
    return Decision(request_id=state.request_id, action="decode", reason=f"decodes; {tokens} left")
