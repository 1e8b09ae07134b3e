"""`xla-engine simulate --replicas`: how many machines a trace needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common
from xla_engine.cli._help import together

if TYPE_CHECKING:
    from xla_engine.scheduler import SchedulerConfig
    from xla_engine.tools.simulator.cost import CostModel, Machine
    from xla_engine.tools.simulator.report import Report
    from xla_engine.tools.simulator.trace import Arrival


HOPELESS = 1.0  # relative residual at which a cost model is useless
FURTHEST = 2  # how far the linear model may be extrapolated, as a multiple of the recorded length


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The number of machines to simulate, or limits on 99th percentiles in seconds."""

    replicas: tuple[int, ...]
    p99_first_token: float | None
    p99_between: float | None
    p99_request: float | None

    def __bool__(self) -> bool:
        return bool(self.replicas) or self.searches

    @property
    def searches(self) -> bool:
        goals = (self.p99_first_token, self.p99_between, self.p99_request)
        return not self.replicas and any(goal is not None for goal in goals)


_SECONDS = click.FloatRange(0, min_open=True)

# Options that become a `Wanted`.
machine_options = together(
    click.option(
        "--replicas",
        type=click.IntRange(1, 4096),
        multiple=True,
        help="Number of machines behind a router; repeatable, to compare.",
    ),
    click.option(
        "--p99-first-token",
        type=_SECONDS,
        metavar="SECONDS",
        help="Find the smallest number of machines with this p99.",
    ),
    click.option(
        "--p99-between", type=_SECONDS, metavar="SECONDS", help="The same for the time between tokens."
    ),
    click.option("--p99-request", type=_SECONDS, metavar="SECONDS", help="The same for whole requests."),
)


def _machines(number: int) -> str:
    return "1 machine" if number == 1 else f"{number} machines"


def simulate_machines(
    wanted: Wanted,
    config: SchedulerConfig,
    machine: Machine,
    cost: CostModel,
    arrivals: Callable[[], Iterator[Arrival]],
    *,
    lag: int,
    plot_path: str | None,
    title: str,
) -> dict[str, Any]:
    """Print the table, draw the plot if a path is given, and return the figures by number of machines.

    machine: the one that the cost model was fitted to. Raises NotStarted if the answer would extrapolate too far.
    """
    if cost.residual > HOPELESS:
        raise _common.NotStarted(
            f"the cost model misses the time of a step by {100 * cost.residual:.0f} % of the mean step, so no "
            f"number of machines can be computed: record a longer run on a quiet machine"
        )
    from xla_engine.tools.simulator.replicas import (
        Goal,
        fewest,
        machines_table,
        plot_machines,
        simulate_replicas,
    )
    from xla_engine.tools.simulator.report import extrapolations, to_json

    goal = Goal(first_token=wanted.p99_first_token, inter_token=wanted.p99_between, whole=wanted.p99_request)

    def simulate(replicas: int) -> Report:
        began = time.monotonic()
        simulated = replace(machine, rows=config.max_num_seqs)
        report = simulate_replicas(config, simulated, cost, arrivals(), replicas=replicas, lag=lag)
        took = time.monotonic() - began
        click.echo(f"{_machines(replicas)}: {report.requests} requests in {took:.1f} s", err=True)
        if wanted.searches and report.longest > FURTHEST * machine.length:
            raise _common.NotStarted(
                f"the longest request has {report.longest} tokens, and the recorded engine allowed at most "
                f"{machine.length}: no number of machines can be computed. Record a run with --max-model-len "
                f"{report.longest}, or use a trace of shorter requests"
            )
        return report

    with _common.startup_errors():
        if wanted.searches:
            needed, reports = fewest(simulate, goal)
        else:
            reports = {replicas: simulate(replicas) for replicas in sorted(set(wanted.replicas))}
            needed = next(
                (replicas for replicas, each in reports.items() if goal and goal.is_met(each)), None
            )
    said = extrapolations({_machines(number): each for number, each in reports.items()}, cost, machine)
    click.echo("\n" + "\n".join([*machines_table(reports, goal), *said]))
    if goal:
        goals = ", ".join(f"{name} {most:g} s" for name, most in goal.wanted.items() if most is not None)
        answer = (
            "no number of machines is enough: a single request takes longer"
            if wanted.searches
            else "none of these"
        )
        click.echo(f"\np99 of {goals}: {_machines(needed) if needed is not None else answer}")
    with _common.startup_errors():
        if plot_path is not None:
            plot_machines(reports, goal, Path(plot_path), title)
    return {str(replicas): to_json(report) for replicas, report in reports.items()} | {"needed": needed}
