"""The requests that hold a slot, each in the part of the scheduler that plans for it."""

from xla_engine.scheduler.config import SchedulerConfig
from xla_engine.scheduler.kv.allocator import KVAllocator
from xla_engine.scheduler.plan import Row
from xla_engine.scheduler.queue import RoundRobin
from xla_engine.scheduler.request import Status
from xla_engine.scheduler.request_state import RequestState
from xla_engine.scheduler.steps.commit import Committer
from xla_engine.scheduler.steps.decode import Constrained, Decoding, Speculating
from xla_engine.scheduler.steps.prefill import Prefilling


class Running:
    """Moves requests between the parts: prefilling, decoding in every step, constrained, speculating.

    In all methods, `step` is the number of the plan being made.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVAllocator, decoding: Decoding, committer: Committer
    ) -> None:
        """decoding: the same as the committer's."""
        self._kv = kv
        self._committer = committer
        self.prefilling = Prefilling(config, kv.cache, kv.states, kv.features)
        self.decoding = decoding
        self.constrained = Constrained()
        self.speculating = Speculating(kv.blocks)
        takes_turns = config.scheduling_policy == "round_robin"
        self.round_robin = RoundRobin(config.quantum if takes_turns else None, config.max_num_seqs)

    def holders(self) -> tuple[RequestState, ...]:
        """The requests that hold a slot."""
        return (*self.prefilling, *self.decoding, *self.constrained, *self.speculating)

    def part_of(self, state: RequestState) -> Prefilling | Decoding | Constrained | Speculating:
        """The part that plans for a request that holds a slot."""
        if state.status is Status.PREFILLING:
            return self.prefilling
        if state.request.constrained:
            return self.constrained
        return self.speculating if state.last_step is None else self.decoding

    def run(self, state: RequestState, step: int, *, sampled: int) -> None:
        """Make a request decode. sampled: how many of its tokens are planned."""
        state.status = Status.RUNNING
        self.round_robin.begin(state, step)
        if state.request.constrained:
            self.constrained.join(state, sampled=sampled)
        elif self.speculating.takes_all:
            self.speculating.join(state, sampled=sampled)
        else:
            self._decode(state, step, sampled=sampled)

    def detach(self, state: RequestState, step: int) -> None:
        """Remove a request from its part, because it is preempted or changes its part."""
        self.part_of(state).leave(state)
        if state.last_step is not None:
            state.settle(self._committer.steps)
            self._committer.taken_away(state, step)

    def change_part(self, speculates: bool, step: int) -> tuple[tuple[str, ...], tuple[Row, ...]]:
        """Move rows to `speculating`, or back to `decoding` once their number of tokens is known.

        Returns the ids of those that began to speculate, and the rows of those that stopped.
        """
        self.speculating.takes_all = speculates
        if not (speculates or self.speculating):
            return (), ()
        if speculates:
            joining = list(self.decoding)
            for state in joining:
                planned = state.planned(step)
                self.detach(state, step)
                self.speculating.join(state, sampled=planned)
            return tuple(state.request_id for state in joining), ()
        leaving = self.speculating.exact()
        for state in leaving:
            self.speculating.leave(state)
            self._decode(state, step, sampled=state.planned_before)
        return (), tuple(Row(slot=state.slot, request_id=state.request_id) for state in leaving)

    def _decode(self, state: RequestState, step: int, *, sampled: int) -> None:
        """Make a request decode in every step from `step` on."""
        self.decoding.join(state, step, sampled=sampled)
        self._committer.joined(state)
        if self._kv.blocks is not None:
            self._kv.blocks.runs(state, step)
