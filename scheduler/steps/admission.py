"""Which waiting requests get a slot in a plan."""

from typing import NamedTuple

from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.kv.preemption import Preemption
from xla_engine.scheduler.kv.readiness import ENCODING, LOADING, unready
from xla_engine.scheduler.moves import Continuation, Swap
from xla_engine.scheduler.pictures import Encode
from xla_engine.scheduler.plan import Decision
from xla_engine.scheduler.queue import WaitingQueue
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps.commit import Committer
from xla_engine.scheduler.steps.running import Running


class Admitted(NamedTuple):
    """The ids of requests that got a slot; the states to move back from the host; the requests that continue."""

    names: tuple[str, ...]
    resumes: tuple[Swap, ...]
    continues: tuple[Continuation, ...]


class Admission:
    """Takes requests from the head of the queue for as long as there are slots, blocks and features for them.

    awaits_blocks: see `Scheduler`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVAllocator,
        waiting: WaitingQueue,
        running: Running,
        preemption: Preemption,
        committer: Committer,
    ) -> None:
        self._config = config
        self._kv = kv
        self._waiting = waiting
        self._running = running
        self._preemption = preemption
        self._committer = committer
        self.awaits_blocks: str | None = None

    def admit(self, step: int, decisions: list[Decision], encodes: list[Encode]) -> Admitted:
        """Give free slots to the requests at the head of the queue.

        step: number of the plan being made. decisions, encodes: receive decisions, and work of the vision tower.
        """
        admitted, resumes, continues = [], [], []
        self.awaits_blocks = None
        while self._waiting:
            state = self._waiting.next_in_line(self._kv.cached_tokens)
            if (reason := unready(state, self._kv, self._running.constrained.blocked, uses=True)) is not None:
                if reason == LOADING:
                    self.awaits_blocks = state.request_id
                if reason == ENCODING:
                    encodes.extend(self._encode(state))
                decisions.append(state.decide("wait", reason))
                break
            if state.goes_on and not self._kv.still_holds(state):
                state.goes_on, state.occupancy = False, None
                if not self._config.keeps_tokens:
                    self._committer.take_back(state)
                    self._preemption.replay(state)
            if state.status is Status.WAITING and not state.goes_on:
                state.begin_prefill()
            if (missing := self._kv.missing(state)) is not None:
                if (preempted := self._preemption.make_room(state, step)) is not None:
                    decisions.append(preempted)
                    continue
                decision = state.decision
                if decision is None or decision.action != "wait":
                    decision = state.decide("wait", missing)
                decisions.append(decision)
                break
            self._waiting.take(state)
            admitted.append(state.request_id)
            if state.goes_on:
                continues.append(self._kv.go_on(state, step))
                self._preemption.admitted(state)
                self._running.run(state, step, sampled=state.planned_before)
                decisions.append(state.decide("continue", f"it still runs in slot {state.slot.index}"))
                continue
            self._kv.enter(state)
            self._preemption.admitted(state)
            if state.status is Status.PARKED:
                self._preemption.release(state)
                resumes.append(self._kv.resume(state, state.position(step)))
                self._running.run(state, step, sampled=state.planned_before)
                decisions.append(state.decide("resume", f"slot {state.slot.index} was free"))
            else:
                state.status = Status.PREFILLING
                self._running.prefilling.join(state)
                decisions.append(state.decide("admit", f"slot {state.slot.index} was free"))
        return Admitted(tuple(admitted), tuple(resumes), tuple(continues))

    def _encode(self, state: RequestState) -> tuple[Encode, ...]:
        """Work of the vision tower for a request whose features are missing; none if they have no places yet."""
        features = self._kv.features
        assert features is not None
        readers = (state.request for state in self._running.prefilling)
        shares = bool(
            len(self._running.decoding) or len(self._running.constrained) or len(self._running.speculating)
        )
        encode = features.encode(state.request, readers, shares=shares)
        return () if encode is None else (encode,)
