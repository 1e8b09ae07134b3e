"""The scheduler: `plan()` decides a step, `commit()` takes in what it sampled."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from xla_engine.scheduler import invariants as integrity
from xla_engine.scheduler import policy, snapshot
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import Room
from xla_engine.scheduler.kv.block_manager import Pages
from xla_engine.scheduler.kv.preemption import Swaps
from xla_engine.scheduler.plan import Decision, Plan, Row, StepResult, Swap
from xla_engine.scheduler.queue.deadlines import Deadlines
from xla_engine.scheduler.queue.round_robin import Turns
from xla_engine.scheduler.queue.waiting import WaitingQueue
from xla_engine.scheduler.request import FinishReason, Request, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.snapshot import Counters, Snapshot
from xla_engine.scheduler.steps.commit import Committer, Events
from xla_engine.scheduler.steps.decode import Decoding
from xla_engine.scheduler.steps.host_gated import Lockstep
from xla_engine.scheduler.steps.prefill import Prefilling, PrefillPlan

COMPARED = 32  # requests in line, for how much of each is cached
NO_PREFILL = PrefillPlan((), (), ())


class Scheduler:
    """First in line, first served over a fixed number of slots. The line is by one of `scheduler.policy.POLICIES`.

    Plans may run ahead of commits by any number of steps (the lag)::

        plan 4    A: last chunk, tokens 1 and 2 of 2, slot (3, epoch 0)   all planned: slot 3 is released
        plan 5    B: first chunk, slot (3, epoch 1)                       the device runs 5 after 4
        commit 4  A: both tokens, since A's tenancy is (3, epoch 0)       whoever holds slot 3 by now

    A request that reaches its cap gives its slot up when its last token is planned; one that samples a stop
    token, when that token is committed. Tokens of a tenancy that has ended are dropped. Every request ends
    once: by a `TokenEvent` with a finish reason, by an `abort` or `finish` that returns True, or by `expire`.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._states: dict[str, RequestState] = {}  # every live request
        self._room = Room(config)
        self._waiting = WaitingQueue(config)
        round_robin = config.scheduling_policy == "round_robin"
        self._turns = Turns(config.quantum if round_robin else None, config.max_num_seqs)
        self._deadlines = Deadlines()
        self._prefilling = Prefilling(config, self._room.cache)
        self._decoding = Decoding()
        self._crediting = Committer(self._states, self._decoding, self._end, keeps_tokens=config.keeps_tokens)
        self._lockstep = Lockstep()
        self._swaps = Swaps(config)
        self._spared: RequestState | None = None  # was head of the line and found nobody to preempt
        self._places = itertools.count()
        self._preemptions = 0
        self._cached_tokens = 0
        self._next_step = 0
        self._submitted = 0
        self._finished = dict.fromkeys(FinishReason, 0)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError for an id in use or one that can never have pages enough, and
        QueueFullError; nothing changes then."""
        if (why := self.never_fits(len(request.prompt_token_ids), request.max_tokens)) is not None:
            raise ValueError(f"request {request.request_id!r} can never run: {why}")
        if request.request_id in self._states:
            raise ValueError(f"request id {request.request_id!r} is in use by a live request; choose another")
        self._queue(RequestState(request=request, arrival=self._submitted, turn=next(self._places)))
        self._submitted += 1

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have pages enough, with the arithmetic; None if it can."""
        return self._room.never_fits(prompt_tokens, max_tokens)

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False when no live request has this id."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason of the engine's; its slot is free for the next plan.

        Its tokens in flight will be dropped, also when the id is submitted again. False when no live request
        has this id.
        """
        state = self._states.get(request_id)
        if state is None:
            return False
        self._end(state, reason)
        return True

    def expire(self, now: float) -> list[tuple[str, FinishReason]]:
        """End every request whose time is up, and return their ids with DEADLINE or QUEUE_TIMEOUT.

        now: on the clock that the requests' deadlines are on.
        """
        expired = []
        for state, reason in self._deadlines.due(now):
            self._end(state, reason)
            expired.append((state.request_id, reason))
        return expired

    def restarted(self) -> Scheduler:
        """A scheduler of the same live requests and totals in which nothing has run yet: every request waits.

        For an engine that lost the device's state, or its own way in the middle of a call. Requests keep their
        places in the line; tokens they were credited count as dropped, since they will be sampled again. One that
        had a slot before cannot time out in the queue any more.
        """
        fresh = Scheduler(self.config)
        fresh._submitted, fresh._finished = self._submitted, dict(self._finished)
        fresh._next_step = fresh._crediting.steps = self._next_step
        fresh._places, fresh._preemptions = self._places, self._preemptions
        fresh._cached_tokens = self._cached_tokens
        self._settle()
        lost = sum(state.credited for state in self._states.values())
        fresh._crediting.credited = self._crediting.credited - lost
        fresh._crediting.dropped = self._crediting.dropped + lost
        fresh._waiting.max_waiting = None  # they were all taken once
        for state in sorted(self._states.values(), key=lambda state: state.arrival):
            request = state.request
            if state.status is not Status.WAITING:
                request = replace(request, queue_deadline=None)
            fresh._queue(RequestState(request=request, arrival=state.arrival, turn=state.turn))
        fresh._waiting.max_waiting = self.config.max_waiting
        return fresh

    def plan(self) -> Plan:
        """Decide the next step, and count it as started.

        Fills free slots from the head of the queue, decodes every live row, and runs prompt chunks in what
        that leaves of the token budget.
        """
        decisions: list[Decision] = []
        self._take_turns(decisions)
        pages = self._room.pages
        if pages is not None:
            self._grow(pages, decisions)
        admitted, resumes = self._admit(decisions)
        work = NO_PREFILL
        if self._prefilling:
            work = self._prefilling.plan(len(self._decoding) + len(self._lockstep), decisions)
            for state in work.complete:
                self._run(state, sampled=state.base + 1)
        parks, replays = self._swaps.take()
        copies, tables = ((), ()) if pages is None else pages.take_moves()
        decode = self._decoding.rows
        planned = self._decoding.due(self._next_step)
        if self._lockstep:
            if single := self._lockstep.plan():
                decode += single
                self._crediting.differ(self._next_step + 1)
            planned += self._lockstep.done()
        decisions.extend(self._hand_over(state) for state in planned)
        plan = Plan(
            step=self._next_step,
            admitted=admitted,
            chunks=work.chunks,
            decode=decode,
            decisions=tuple(decisions),
            parks=parks,
            resumes=resumes,
            reuses=work.reuses,
            replays=replays,
            tables=tables,
            copies=copies,
        )
        for reuse in plan.reuses:
            self._cached_tokens += reuse.length
            self._room.used(reuse.source, self._next_step)
        self._next_step += not plan.is_empty
        return plan

    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> str | None:
        """Take a request's slot away, to be given to others by the next plan; it waits in line to go on later.

        how: "park", "recompute" or "replay" as in `policy.way_to_preempt`, which chooses where None; a prompt that is
            not wholly planned is always recomputed. "recompute" of generated tokens needs `prefill_equals_decode`.
        to_back: as if it had come last, else at the place in line it always had.

        Returns how it was done; None, with nothing done, for a request that holds no slot. Its stream is the same as
        without: tokens in flight are credited, or sampled again by a replay. It gets a slot again when all tokens
        that were planned for it are read, so callers that go on planning without reading gain nothing.
        """
        state = self._states.get(request_id)
        if state is None or not state.holds_slot:
            return None
        length = state.position(self._next_step)
        how = self._swaps.way(state, length, how)
        state.decide(how, f"slot {state.slot.index} was taken away")
        self._part_of(state).leave(state)
        if state.last_step is not None:
            state.settle(self._crediting.steps)
            self._crediting.taken_away(state, self._next_step)
        self._room.retain(state)
        if how == "park":
            self._swaps.park(state, self._room.park(state, length))
        self._room.leave(state, self._next_step)
        state.planned_before, state.last_step, state.reached = state.planned(self._next_step), None, length
        if how == "replay":
            self._crediting.credited -= state.credited
            self._crediting.dropped += state.credited
            self._swaps.replay(state)
        state.status = Status.PARKED if how == "park" else Status.WAITING
        state.request = replace(state.request, queue_deadline=None)  # it had its slot in time
        if to_back:
            state.turn = next(self._places)
        self._waiting.put_back(state, to_back=to_back)
        self._preemptions += 1
        return how

    def reset_prefix_cache(self) -> None:
        """Forget what the slots hold: nothing is reused until it has been computed anew."""
        self._room.forget()

    def commit(self, plan: Plan, result: StepResult) -> Events:
        """Credit a step's samples: first tokens in lane order, then decoded ones in row order.

        Plans are committed once, in the order they were made. Raises ResultMismatchError for a result that
        does not fit; the requests concerned stay live until `finish`.
        """
        return Events() if plan.is_empty else self._crediting.credit(plan, result)

    @property
    def next_deadline(self) -> float:
        """Before this time, on the clock of the deadlines, `expire` finds nobody."""
        return self._deadlines.next_time

    def steady_steps(self, rows: tuple[Row, ...]) -> int:
        """How many of the next plans only decode `rows`, if no request comes or ends meanwhile.

        rows: those of an earlier plan, the very tuple; zero where they are not the same any more.
        """
        if (
            rows is not self._decoding.rows
            or self._prefilling
            or self._lockstep
            or self._swaps
            or (self._waiting and (self._room.slots.num_free or self.config.preemption))
            or self.config.keeps_tokens
        ):
            return 0
        steps = self._decoding.steady_steps(self._next_step)
        if self._room.pages is not None and (due := self._room.pages.next_due) is not None:
            steps = min(steps, due - self._next_step)
        turn_ends = self._turns.next_end()
        if self._waiting and turn_ends is not None:
            steps = min(steps, turn_ends - self._next_step)
        return max(steps, 0)

    def skip(self, steps: int) -> None:
        """Count `steps` more steps as planned and as many as committed, each row a token richer by every one.

        The same as so many turns of `plan` and `commit`, at the cost of one, where steps have no content: for a
        simulator. At most `steady_steps`, while every plan in flight has the rows of the next one and nothing else,
        and no row samples a stop token; the plans in flight then stand for steps that are `steps` later.
        """
        self._next_step += steps
        self._crediting.steps += steps
        self._crediting.credited += steps * len(self._decoding)

    def _admit(self, decisions: list[Decision]) -> tuple[tuple[str, ...], tuple[Swap, ...]]:
        """Give slots to the head of the line; returns who got one, and whose state comes back from the host."""
        admitted, resumes = [], []
        while self._waiting:
            state = self._next_in_line()
            if state.credited < state.planned_before:
                decisions.append(state.decide("wait", "tokens of it are in flight"))
                break
            if state.status is Status.WAITING:
                state.begin_prefill()
            if (missing := self._room.missing(state)) is not None:
                if self._make_room(state, decisions):
                    continue
                decision = state.decision
                if decision is None or decision.action != "wait":
                    decision = state.decide("wait", missing)
                decisions.append(decision)
                break
            self._waiting.take(state)
            self._spared = None
            self._room.enter(state)
            admitted.append(state.request_id)
            if state.status is Status.PARKED:
                resumes.append(self._resume(state))
                decisions.append(state.decide("resume", f"slot {state.slot.index} was free"))
            else:
                state.status = Status.PREFILLING
                self._prefilling.join(state)
                decisions.append(state.decide("admit", f"slot {state.slot.index} was free"))
        return tuple(admitted), tuple(resumes)

    def _next_in_line(self) -> RequestState:
        """Who gets the next slot."""
        cache = self._room.cache
        if cache is None or self.config.scheduling_policy != "longest_prefix":
            return self._waiting.head
        line = self._waiting.foremost(COMPARED)
        return line[policy.most_cached([cache.match(state)[1] for state in line])]

    def _take_turns(self, decisions: list[Decision]) -> None:
        """Park who has had its turn, the longest ago first, one for each request that waits without a free slot, and
        as many as give the next in line its pages."""
        short = len(self._waiting) - self._room.slots.num_free
        while (state := self._turns.over(self._next_step)) is not None and self._waiting:
            if short <= 0 and self._room.missing(self._waiting.head) is None:
                break
            if not self._swaps.has_room(state.position(self._next_step)):
                break
            short -= 1
            self._take_away(state, decisions, how="park", to_back=True)

    def _grow(self, pages: Pages, decisions: list[Decision]) -> None:
        """Give rows the pages that they write to in this step, the first in line first; the last makes room.

        `scheduler.kv.block_manager` says how long anybody waits.
        """
        step = self._next_step
        short = pages.due(step)
        if self._lockstep:
            short += (state for state in self._lockstep.ready() if pages.is_short(state, step))
        if len(short) > pages.pool.num_free:
            short.sort(key=self._waiting.rank)
        for state in short:
            while state.holds_slot and not pages.grow(state, step):
                self._take_away(max(self._holders(), key=self._waiting.rank), decisions)

    def _holders(self) -> tuple[RequestState, ...]:
        return (*self._prefilling, *self._decoding, *self._lockstep)

    def _take_away(self, state: RequestState, decisions: list[Decision], **how: Any) -> None:
        self.preempt(state.request_id, **how)
        assert state.decision is not None
        decisions.append(state.decision)

    def _make_room(self, head: RequestState, decisions: list[Decision]) -> bool:
        """Preempt whoever is last in line of those that hold a slot, if `head` is before them.

        A place in line never changes by itself, and nobody is preempted by a request of a later place: the first of
        all that live never is, and each arrival preempts no more than it needs the room of.
        """
        if not self.config.preemption or head is self._spared:
            return False
        later = [state for state in self._holders() if self._waiting.place(state) > self._waiting.place(head)]
        if not later:
            self._spared = head
            return False
        if not self._room.suffices_without(later, head):
            return False  # nobody loses a slot in vain
        self._take_away(max(later, key=self._waiting.place), decisions)
        return True

    def _resume(self, state: RequestState) -> Swap:
        self._swaps.release(state)
        swap = self._room.resume(state, state.position(self._next_step))
        self._run(state, sampled=state.planned_before)
        return swap

    def _run(self, state: RequestState, *, sampled: int) -> None:
        """Let a request decode that has `sampled` tokens before."""
        state.status = Status.RUNNING
        self._turns.begin(state, self._next_step)
        if state.request.lockstep:
            self._lockstep.join(state, sampled=sampled)
        else:
            self._decoding.join(state, self._next_step, sampled=sampled)
            self._crediting.joined(state)
            if self._room.pages is not None:
                self._room.pages.runs(state, self._next_step)

    def _hand_over(self, state: RequestState) -> Decision:
        """Give up the slot of a request that is wholly planned: the device runs this step before the next."""
        if state.request.lockstep:
            self._lockstep.leave(state)
        else:
            self._decoding.leave(state)
            self._crediting.handed_over(state)
        self._room.leave(state, self._next_step)
        tokens, slot = state.request.max_tokens, state.slot.index
        return state.decide("hand over", f"all {tokens} new tokens are planned; slot {slot} is free")

    def _queue(self, state: RequestState) -> None:
        self._waiting.push(state)
        self._states[state.request_id] = state
        self._deadlines.add(state)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        """Take a live request out of wherever it is."""
        del self._states[state.request_id]
        if state.status in (Status.WAITING, Status.PARKED):
            self._waiting.remove(state)
            self._swaps.release(state)
        if reason is FinishReason.ERROR:
            self._room.discard(state)
        else:
            self._room.retain(state)
        if state.holds_slot:
            self._part_of(state).leave(state)
            self._room.leave(state, self._next_step)
        if state.last_step is not None:
            self._crediting.over(state, self._next_step)
        state.status, state.finish_reason = Status.FINISHED, reason
        self._finished[reason] += 1
        self._deadlines.forget_ended(len(self._states))

    def _settle(self) -> None:
        for state in self._states.values():
            state.settle(self._crediting.steps)

    def _part_of(self, state: RequestState) -> Prefilling | Decoding | Lockstep:
        """What plans for a request that holds a slot."""
        if state.status is Status.PREFILLING:
            return self._prefilling
        return self._lockstep if state.request.lockstep else self._decoding

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests past the queue: in a slot, or with all tokens planned and some in flight."""
        return len(self._states) - len(self._waiting)

    def snapshot(self) -> Snapshot:
        """Slots, queue and counters, with the reason of each live request's last decision."""
        self._settle()
        admitted = [
            state for state in self._states.values() if state.status not in (Status.WAITING, Status.PARKED)
        ]
        return snapshot.take(self._room.slots, self._waiting, admitted, self.counters())

    def check(self) -> None:
        """Raise AssertionError on any broken invariant."""
        self._settle()
        integrity.check(
            states=self._states,
            slots=self._room.slots,
            waiting=self._waiting,
            prefilling=self._prefilling,
            decoding=self._decoding,
            lockstep=self._lockstep,
            counters=self.counters(),
            chunk_size=self.config.chunk_size,
            parked_tokens=self._swaps.tokens,
        )
        self._room.check(self._states.values(), self._next_step)

    def counters(self) -> Counters:
        """Totals since the start."""
        return Counters(
            steps_planned=self._next_step,
            steps_committed=self._crediting.steps,
            submitted=self._submitted,
            finished=dict(self._finished),
            tokens_credited=self._crediting.credited,
            tokens_dropped=self._crediting.dropped,
            preemptions=self._preemptions,
            cached_tokens=self._cached_tokens,
        )
