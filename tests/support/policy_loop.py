"""The loop of the fake engine for policies that order the line otherwise than the default one."""

from __future__ import annotations

from tests.support.fake_loop import Loop
from xla_engine.scheduler import Plan
from xla_engine.scheduler.policy import WAYS_TO_PREEMPT


class PolicyLoop(Loop):
    """The loop without the order of the line that `Loop` expects of the default policy."""

    def plan(self) -> Plan:
        plan = self._next_plan()
        for lost in (each for each in plan.decisions if each.action in WAYS_TO_PREEMPT):
            self._lost_its_slot(lost.request_id, lost.action)
        for request_id in plan.admitted:
            self.queue.pop(request_id)
        for request_id in plan.moves.replays:
            self.live[request_id].samples.clear()  # they come again
        self.plans.append(plan)
        self._check_constrained(plan)
        if not plan.is_empty:
            self.in_flight.append((plan, self.runner.start(plan)))
        return plan
