"""Compares a recorded run with its simulation: schedules and times."""

from collections.abc import Callable
from dataclasses import dataclass

from xla_engine.observability.step_log import StepLog, parts_of
from xla_engine.scheduler import Plan, SchedulerConfig
from xla_engine.tools.simulator.clock import SimulatedClock
from xla_engine.tools.simulator.cost import CostModel, DeviceWork, HostWork, machine_of
from xla_engine.tools.simulator.report import SimulationReport
from xla_engine.tools.simulator.simulate import Simulation
from xla_engine.tools.simulator.trace import of_step_log


class RecordedClock(SimulatedClock):
    """Uses the times of a recorded run in place of a cost model."""

    def __init__(self, cost: CostModel, log: StepLog) -> None:
        super().__init__(cost)
        self._submitted = iter([request.submitted for request in log.requests])
        self._started = iter([step.started for step in log.steps])
        self._read = iter([0.0 if step.read is None else step.read for step in log.steps])

    def submit(self) -> None:
        self.now = next(self._submitted, self.now)

    def start(self, host: HostWork, device: DeviceWork) -> None:
        self.now = next(self._started, self.now)

    def read(self) -> float:
        self.now = next(self._read, self.now)
        return self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationComparison:
    """A recorded run and its simulation.

    steps: of the recorded run.
    first_difference: the first step that was planned, or read, otherwise than recorded; None if there is none.
    measured, predicted: the figures by the recorded times, and by those of the cost model.
    """

    steps: int
    first_difference: int | None
    measured: SimulationReport
    predicted: SimulationReport

    def lines(self) -> list[str]:
        """The comparison as text: each figure measured, predicted, and the difference."""
        same = f"all {self.steps} steps as recorded"
        if self.first_difference is not None:
            same = f"step {self.first_difference} is the first that differs from the record"
        found = [f"schedule             {same}", f"{'':<20} {'measured':>12} {'predicted':>12} {'':>8}"]
        for name, scale, unit, figure in FIGURES:
            was, said = (scale * figure(report) for report in (self.measured, self.predicted))
            apart = f"{100 * (said / was - 1):+.1f} %" if was else ""
            found.append(f"{name:<20} {was:>9.2f} {unit:<2} {said:>9.2f} {unit:<2} {apart:>8}")
        return found


# Each figure: its name, the factor from seconds to its unit, the unit, and how it is read from a report.
FIGURES: tuple[tuple[str, float, str, Callable[[SimulationReport], float]], ...] = (
    ("wall time", 1.0, "s", lambda report: report.wall),
    ("first token p50", 1e3, "ms", lambda report: report.first_token.at(0.5)),
    ("first token p99", 1e3, "ms", lambda report: report.first_token.at(0.99)),
    ("inter-token p50", 1e3, "ms", lambda report: report.inter_token.at(0.5)),
    ("inter-token p99", 1e3, "ms", lambda report: report.inter_token.at(0.99)),
)


def compare(log: StepLog, cost: CostModel) -> SimulationComparison:
    """Simulate the requests of a recorded run as they arrived, once with its own times and once with the model's."""
    config = SchedulerConfig(**log.scheduler)
    reports = []
    difference: int | None = None
    for clock in (RecordedClock(cost, log), SimulatedClock(cost)):
        simulation = Simulation(config, machine_of(log), clock, lag=int(log.engine["lag"]), recorded=log)
        simulation.plans = []
        reports.append(simulation.run(of_step_log(log, by_time=False)))
        difference = first_difference(log, simulation.plans, simulation.reads)
    return SimulationComparison(
        steps=len(log.steps), first_difference=difference, measured=reports[0], predicted=reports[1]
    )


def first_difference(log: StepLog, plans: list[Plan], reads: list[int]) -> int | None:
    """The first step that differs from the log; None if there is none.

    Compared are the admitted requests, the chunks and their slots, the slots that decoded, the rows that may sample
    several tokens, what was parked, resumed or reused, the number of copied blocks, and after how many steps each step
    was read.
    """
    names = [request.name for request in log.requests]
    for number, step in enumerate(log.steps):
        if number >= len(plans):
            return number
        plan = plans[number]
        planned = (
            plan.admitted,
            tuple(row.slot.index for row in plan.decode),
            len(plan.moves.copies),
            reads[number] if number < len(reads) else 0,
            parts_of(plan, str),
        )
        recorded = (
            tuple(names[index] for index in step.admitted),
            step.decode,
            len(step.copies),
            step.read_after,
            {part: [(names[index], *rest) for index, *rest in getattr(step, part)] for part in planned[-1]},
        )
        if planned != recorded:
            return number
    return len(log.steps) if len(plans) > len(log.steps) else None
