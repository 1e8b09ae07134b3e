"""Several machines behind one router, and the number of machines that a load needs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from xla_engine.data_parallel.routing import PrefixRouter
from xla_engine.scheduler import SchedulerConfig
from xla_engine.tools.drawing import drawn, label_x
from xla_engine.tools.simulator.clock import SimulatedClock
from xla_engine.tools.simulator.cost import CostModel, Machine
from xla_engine.tools.simulator.report import SimulationReport, together
from xla_engine.tools.simulator.simulate import Simulation
from xla_engine.tools.simulator.trace import Arrival
from xla_engine.utils.tables import aligned, figure

MOST = 4096  # machines of a search


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Seconds that the 99th percentile may take; None for any.

    first_token: from arrival to the first token. inter_token: between two tokens. whole: from arrival to the last.
    """

    first_token: float | None = None
    inter_token: float | None = None
    whole: float | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in self.wanted.values())

    @property
    def wanted(self) -> Mapping[str, float | None]:
        return asdict(self)

    def is_met(self, report: SimulationReport) -> bool:
        """Whether a simulation meets it."""
        return all(
            most is None or getattr(report, name).at(0.99) <= most for name, most in self.wanted.items()
        )


def simulate_replicas(
    config: SchedulerConfig,
    machine: Machine,
    cost: CostModel,
    arrivals: Iterable[Arrival],
    *,
    replicas: int,
    lag: int = 1,
) -> SimulationReport:
    """Run a trace on several machines of one kind; the report is of all together.

    A request is routed when it arrives, as by `data_parallel_size`: to the machine that last read its prefix, if that
    is known and the machine is not much busier than others; else to the one with the fewest requests.
    The router and the network take no time.
    """
    each = [Simulation(config, machine, SimulatedClock(cost), lag=lag) for _ in range(replicas)]
    router = PrefixRouter(config.block_size, slack=config.max_num_seqs)
    for arrival in arrivals:
        for one in each:
            one.run_until(arrival)
        loads = {index: one.live for index, one in enumerate(each)}
        if arrival.prompt is not None and config.enable_prefix_caching:
            chosen = router.choose(arrival.prompt, "", loads)
        else:
            chosen = min(loads, key=lambda index: (loads[index], index))
        each[chosen].take(arrival)
    return together([one.finish() for one in each])


def fewest(
    simulate: Callable[[int], SimulationReport], goal: Goal
) -> tuple[int | None, dict[int, SimulationReport]]:
    """The smallest number of machines that meets a goal, found by doubling and bisection, and every report.

    None if `MOST` machines do not meet it: no number of machines makes a request faster than it is alone.
    """
    reports: dict[int, SimulationReport] = {}

    def is_met(replicas: int) -> bool:
        reports[replicas] = simulate(replicas)
        return goal.is_met(reports[replicas])

    low, high = 0, 1
    while not is_met(high):
        alone = reports[high].most_waiting == 0 and high > 1
        if high >= MOST or (alone and _is_flat(reports, high)):
            return None, dict(sorted(reports.items()))
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle, high)
    return high, dict(sorted(reports.items()))


def _is_flat(reports: Mapping[int, SimulationReport], high: int) -> bool:
    """Whether twice the machines gain less than 1 % everywhere."""
    now, before = reports[high], reports[high // 2]
    return all(
        getattr(now, name).at(0.99) > 0.98 * getattr(before, name).at(0.99)
        for name in ("first_token", "inter_token", "whole")
    )


def machines_table(reports: Mapping[int, SimulationReport], goal: Goal) -> list[str]:
    """One line for each number of machines; times at the 99th percentile."""
    head = ("machines", "tok/s", "slots busy", "queue", "first token, s", "between, ms", "whole, s", "")
    rows = [head, ("", "", "%", "most", "p99", "p99", "p99", "")]
    for replicas, report in reports.items():
        rows.append(
            (
                str(replicas),
                f"{report.tokens_per_second:.0f}",
                f"{100 * report.occupancy:.0f}",
                str(report.most_waiting),
                figure(report.first_token.at(0.99)),
                figure(1e3 * report.inter_token.at(0.99)),
                figure(report.whole.at(0.99)),
                "meets the goal" if goal and goal.is_met(report) else "",
            )
        )
    return aligned(rows, right=range(len(head) - 1))


def plot_machines(reports: Mapping[int, SimulationReport], goal: Goal, path: Path | str, title: str) -> None:
    """Draw the 99th percentiles over the number of machines. Raises ConfigError without matplotlib."""
    about = {"first_token": "time to first token", "inter_token": "between tokens", "whole": "whole request"}
    numbers = sorted(reports)
    with drawn(path, figsize=(6.5, 4.2)) as (figure, axes):
        for name, label in about.items():
            values = [getattr(reports[number], name).at(0.99) for number in numbers]
            (line,) = axes.plot(numbers, values, marker="o", label=label)
            if (most := goal.wanted[name]) is not None:
                axes.axhline(most, color=line.get_color(), linestyle="--", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="machines", ylabel="99th percentile, s")
        label_x(axes, numbers)
        axes.legend(fontsize=8)
        figure.suptitle(title, fontsize=10)
