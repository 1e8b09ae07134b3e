"""The scheduler: `plan()` decides who gets which of B_max slots and which rows are active; `commit()` credits."""

from collections.abc import Callable, Collection

from xla_engine.scheduler import invariants, snapshot
from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.kv.preemption import Preemption
from xla_engine.scheduler.moves import Moves
from xla_engine.scheduler.pictures import Encode
from xla_engine.scheduler.plan import Decision, Plan, Speculation, StepResult
from xla_engine.scheduler.queue import Deadlines, WaitingQueue
from xla_engine.scheduler.request import FinishReason, Request, Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.snapshot import Counters, Snapshot, Times
from xla_engine.scheduler.steps.admission import Admission
from xla_engine.scheduler.steps.commit import Committer, Events
from xla_engine.scheduler.steps.decode import Decoding
from xla_engine.scheduler.steps.prefill import PrefillPlan
from xla_engine.scheduler.steps.running import Running

NO_PREFILL = PrefillPlan((), (), (), ())


class Scheduler:
    """Serves a queue with a fixed number of slots. The order is one of `scheduler.policy.POLICIES`.

    Plans may run ahead of commits by any number of steps (the lag)::

        plan 4    A: last chunk, tokens 1 and 2 of 2, slot (3, epoch 0)   all planned: slot 3 is released
        plan 5    B: first chunk, slot (3, epoch 1)                       the device runs 5 after 4
        commit 4  A: both tokens, since A's occupancy is (3, epoch 0)     B holds slot 3 by now

    A request that reaches `max_tokens` gives up its slot when its last token is planned; one that samples a stop
    token, when that token is committed. Tokens of an occupancy that has ended are dropped. Every request ends once: by
    a `TokenEvent` with a finish reason, by an `abort` or `finish` that returns True, or by `expire`.

    states: every live request, by id. The other parts are attributes for the modules of this package that continue,
        restart, peek and skip; others call the methods.
    untold: requests that `commit` and `expire` have ended since the last plan, by id. If the engine restarts before it
        has delivered such an end, the request runs again.
    """

    def __init__(self, config: SchedulerConfig, only: Collection[str] | None = None) -> None:
        self.config = config
        self.ended: dict[str, RequestState] = {}  # see `scheduler.continuation`
        self.untold: dict[str, RequestState] = {}
        self.states: dict[str, RequestState] = {}
        self.kv = KVAllocator(config)
        self.waiting = WaitingQueue(config, only)
        self.deadlines = Deadlines()
        self._decoding = Decoding()
        self.committer = Committer(
            self.states, self._decoding, self._end_untold, keeps_tokens=config.keeps_tokens
        )
        running = self.running = Running(config, self.kv, self._decoding, self.committer)
        self._prefilling, self._constrained = running.prefilling, running.constrained
        self._speculating, self._round_robin = running.speculating, running.round_robin
        self.preemption = Preemption(
            config, self.kv, self.waiting, holders=running.holders, detach=self._detach
        )
        self._admission = Admission(config, self.kv, self.waiting, running, self.preemption, self.committer)
        self.cached_tokens = 0
        self.next_step = 0
        self._is_late = False  # see `Plan`
        self.submitted = 0
        self.finished = dict.fromkeys(FinishReason, 0)

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises ValueError if the id is in use or the request can never have enough blocks, and QueueFullError. An error
        changes nothing.
        """
        if (why := self.never_fits(len(request.prompt_token_ids), request.max_tokens)) is not None:
            raise ValueError(f"request {request.request_id!r} can never run: {why}")
        size = self.config.feature_place_tokens
        places = sum(-(-length // size) for image in request.images for _, length in image.spans)
        if places > self.config.feature_places:
            raise ValueError(
                f"request {request.request_id!r} can never run: its pictures need {places} places of the feature "
                f"buffer, which has {self.config.feature_places}"
            )
        if request.request_id in self.states:
            raise ValueError(f"request id {request.request_id!r} is in use by a live request; choose another")
        state = RequestState(request=request, arrival=self.submitted, turn=next(self.waiting.turns))
        state.awaits_blocks = request.stored_blocks > 0
        self.enqueue(state)
        self.submitted += 1

    def never_fits(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request can never have enough blocks, with the arithmetic; None if it can."""
        return self.kv.never_fits(prompt_tokens, max_tokens)

    def abort(self, request_id: str) -> bool:
        """End a request, whatever its status; False if no live request has this id."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> bool:
        """End a request for a reason that the engine gives; False if no live request has this id.

        Its slot is free for the next plan. Its tokens in flight are dropped, even if the id is submitted again.
        """
        state = self.states.get(request_id)
        if state is None:
            return False
        self._end(state, reason)
        return True

    def expire(self, now: float) -> list[tuple[str, FinishReason]]:
        """End every request whose deadline has passed; returns their ids with DEADLINE or QUEUE_TIMEOUT.

        now: on the clock of the requests' deadlines.
        """
        expired = []
        for state, reason in self.deadlines.due(now):
            self._end_untold(state, reason)
            expired.append((state.request_id, reason))
        return expired

    def plan(self, speculation: Speculation | None = None, blocked: Collection[str] = frozenset()) -> Plan:
        """Decide the next step, and count it as started.

        Fills free slots from the head of the queue, decodes every live row, and spends the rest of the token budget on
        prompt chunks.

        speculation: lets rows sample several tokens; may differ from plan to plan.
        blocked: ids of requests whose mask is not ready. Those of them that are constrained get no row.
        """
        decisions: list[Decision] = []
        self._constrained.blocked = blocked
        self.untold.clear()
        to_speculate, to_decode = self.running.change_part(speculation is not None, self.next_step)
        if self._round_robin:
            decisions += self.preemption.park_expired(self._round_robin, self.next_step)
        if (blocks := self.kv.blocks) is not None:
            decisions += self.preemption.grow(
                (*self._constrained.ready(), *self._speculating.ready()), self.next_step
            )
        encodes: list[Encode] = []
        admitted, resumes, continues = self._admission.admit(self.next_step, decisions, encodes)
        work, alone = NO_PREFILL, False
        if self._prefilling:
            rows = len(self._decoding) + len(self._constrained) + len(self._speculating)
            work = self._prefilling.plan(rows, decisions)
            alone = not (rows or self._speculating.takes_all)
            for state in work.complete:
                waits = alone and state.request.max_tokens - state.base > 1
                self.running.run(state, self.next_step + waits, sampled=state.base + 1)
        verify = self._speculating.plan(speculation, self._constrained, self.next_step)
        width = (
            0
            if speculation is None
            else max((speculation.width for row in verify if row.width > 1), default=1)
        )
        parks = self.preemption.take_parks()
        copies, tables = ((), ()) if blocks is None else blocks.take_moves()
        decode = () if alone else self._decoding.rows
        planned = self._decoding.due(self.next_step)
        planned += self._speculating.done()
        if self._constrained:
            if width < 2 and (single := self._constrained.plan()):
                decode += single
                self.committer.differ(self.next_step + 1)
            planned += self._constrained.done()
        decisions.extend(self.hand_over(state) for state in planned)
        is_empty = not (work.chunks or decode or verify or parks or resumes or encodes)
        stores, loads = ((), ()) if blocks is None or is_empty else blocks.take_stored()
        moves = Moves(
            parks=parks,
            stores=stores,
            loads=loads,
            copies=copies,
            resumes=resumes,
            continues=continues,
            reuses=work.reuses,
            tables=tables,
            saves=work.saves,
            replays=() if is_empty else self.preemption.take_replays(),
        )
        plan = Plan(
            step=self.next_step,
            admitted=admitted,
            chunks=work.chunks,
            decode=decode,
            moves=moves,
            decisions=tuple(decisions),
            verify=verify,
            width=width,
            to_decode=to_decode,
            to_speculate=to_speculate,
            blocked=self._gated(blocked) if blocked else frozenset(),
            encodes=tuple(encodes),
            is_late=self._is_late,
        )
        self._is_late = is_empty and (self._is_late or bool(blocked))
        for reuse in plan.moves.reuses:
            self.cached_tokens += reuse.length
            self.kv.used(reuse.source, self.next_step)
        self.next_step += not is_empty
        return plan

    def credited(self, request_id: str) -> int | None:
        """New tokens credited to a request since it last started; None if it is not live."""
        if (state := self.states.get(request_id)) is None:
            return None
        state.settle(self.committer.steps)
        return state.credited

    def preempt(self, request_id: str, *, how: str | None = None, to_back: bool = False) -> str | None:
        """Preempt a request: it loses its slot, which the next plan can give to others, and waits in the queue.

        how: one of `policy.WAYS_TO_PREEMPT`; None: `policy.way_to_preempt` chooses. A prompt that is not wholly
            planned is always recomputed. "recompute" of generated tokens needs `prefill_equals_decode`.
        to_back: queue it as if it had arrived last; by default it keeps its place.

        Returns how it was done; None if the request holds no slot, and then nothing changes. Raises ValueError if this
        configuration does not offer `how`. The request's tokens stay the same: those in flight are credited, or
        sampled again by a replay. It gets a slot again only after all tokens planned for it have been read.
        """
        state = self.states.get(request_id)
        if state is None or not state.holds_slot:
            return None
        return self.preemption.preempt(state, self.next_step, how=how, to_back=to_back).action

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.kv.forget()

    def forget_features(self) -> None:
        """Forget all features of pictures. There must be no requests."""
        if self.kv.features is not None:
            self.kv.features.forget()

    def commit(self, plan: Plan, result: StepResult) -> Events:
        """Credit a step's samples: first tokens in lane order, then decoded ones in row order.

        Each plan is committed once, in the order of planning. Raises ResultMismatchError if the result does not match
        the plan; the affected requests stay live until `finish`.
        """
        if plan.is_empty:
            return Events()
        events = self.committer.credit(plan, result)
        for state in self._speculating.done():  # the steps in flight are now certain to complete them
            self.hand_over(state)
        return events

    def _gated(self, names: Collection[str]) -> frozenset[str]:
        """Those of `names` that are constrained requests."""
        live = ((name, self.states.get(name)) for name in names)
        return frozenset(name for name, state in live if state is not None and state.request.constrained)

    def _detach(self, state: RequestState, how: str) -> None:
        """Stop planning for a request that loses its slot."""
        self.running.detach(state, self.next_step)
        if how == "replay":
            self.committer.take_back(state)

    def hand_over(self, state: RequestState) -> Decision:
        """Release the slot of a request that is wholly planned: the device runs steps in order."""
        self.running.part_of(state).leave(state)
        if state.last_step is not None:
            self.committer.handed_over(state)
        self.kv.leave(state, self.next_step)
        tokens, slot = state.request.max_tokens, state.slot.index
        return state.decide("hand over", f"all {tokens} new tokens are planned; slot {slot} is free")

    def enqueue(self, state: RequestState) -> None:
        self.waiting.push(state, self.num_free)
        self.states[state.request_id] = state
        self.deadlines.add(state)

    def _end_untold(self, state: RequestState, reason: FinishReason) -> None:
        """End a request, and note that the caller does not know it yet."""
        self.untold[state.request_id] = state
        self._end(state, reason)

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        """Remove a live request from every part."""
        del self.states[state.request_id]
        if state.status in (Status.WAITING, Status.PARKED):
            self.waiting.remove(state)
            self.preemption.release(state)
        if reason is FinishReason.ERROR:
            self.kv.discard(state)
        else:
            self.kv.retain(state)
        if state.holds_slot:
            self.running.part_of(state).leave(state)
            self.kv.leave(state, self.next_step)
        if state.last_step is not None:
            self.committer.ended(state, self.next_step)
        state.status, state.finish_reason = Status.FINISHED, reason
        if self.config.keeps_finished:
            self.ended[state.request_id] = state
        self.finished[reason] += 1
        self.deadlines.forget_ended(len(self.states))

    def check(self) -> None:
        """Raise AssertionError if an invariant of a part or between parts is broken, and say which."""
        self.settle()
        parked = self.preemption.parked_tokens
        invariants.check(
            self.config, self.states, self.waiting, self.running, self.kv, self.counters(), parked
        )

    def settle(self) -> None:
        for state in self.states.values():
            state.settle(self.committer.steps)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.states)

    @property
    def awaits_blocks(self) -> str | None:
        """The id of the request that is next in line and waits for stored blocks; None if there is none."""
        return self._admission.awaits_blocks

    @property
    def num_free(self) -> int:
        """Slots that no request holds."""
        return self.kv.slots.num_free

    @property
    def blocks_used(self) -> int | None:
        """KV blocks that requests hold; None without a block pool."""
        return None if self.kv.blocks is None else self.kv.blocks.pool.num_used

    @property
    def positions_used(self) -> int:
        """KV entries that the plans so far have written for the requests that hold a slot."""
        return sum(state.position(self.next_step) for state in self.running.holders())

    @property
    def num_waiting(self) -> int:
        """Requests in the queue: new ones and preempted ones."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests in a slot, or with all tokens planned and some in flight."""
        return len(self.states) - len(self.waiting)

    @property
    def most_are_constrained(self) -> bool:
        """Whether at least half of the rows that decode are constrained, without those blocked in the latest plan."""
        constrained = self._constrained
        if not constrained:
            return False
        others = len(self._decoding) + len(self._speculating)
        return constrained.num_unblocked >= max(others, 1)

    @property
    def decoding(self) -> list[str]:
        """The ids of the requests that decode in the next plan, unless it preempts them."""
        running = self.running
        parts = (self._decoding, running.speculating, running.constrained)
        return [state.request_id for part in parts for state in part]

    def snapshot(self, times: Callable[[str], Times | None] = lambda request_id: None) -> Snapshot:
        """Slots, queue and counters, with the last decision and the times of each live request."""
        self.settle()
        admitted = [
            state for state in self.states.values() if state.status not in (Status.WAITING, Status.PARKED)
        ]
        turns = self.config.scheduling_policy == "round_robin"
        masked, counters = self._constrained.blocked, self.counters()
        return snapshot.take(
            self.kv, self.waiting, admitted, counters, times, takes_turns=turns, masked=masked
        )

    def counters(self) -> Counters:
        """Totals since start-up."""
        return Counters(
            steps_planned=self.next_step,
            steps_committed=self.committer.steps,
            submitted=self.submitted,
            finished=dict(self.finished),
            tokens_credited=self.committer.credited,
            tokens_dropped=self.committer.dropped,
            preemptions=self.preemption.count,
            cached_tokens=self.cached_tokens,
        )
