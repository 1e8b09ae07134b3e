"""`xla-engine simulate`: predict the times of a schedule without a device."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xla_engine.cli import _common, _help
from xla_engine.scheduler.policy import PREEMPTIVE
from xla_engine.scheduler.user_policy import PolicyError

if TYPE_CHECKING:
    from xla_engine.observability.step_log import StepLog
    from xla_engine.scheduler import SchedulerConfig
    from xla_engine.tools.simulator.cost import CostModel, Machine, StatedMachine
    from xla_engine.tools.simulator.replicas import Goal
    from xla_engine.tools.simulator.report import SimulationReport
    from xla_engine.tools.simulator.trace import Arrival

HOPELESS = 1.0  # relative residual at which a cost model is useless
FURTHEST = 2  # how far the linear model may be extrapolated, as a multiple of the recorded length


_SECONDS = click.FloatRange(0, min_open=True)

# Options that become a `Goal`.
goal_options = _help.together(
    click.option(
        "--p99-first-token",
        "first_token",
        type=_SECONDS,
        metavar="SECONDS",
        help="Find the smallest number of machines with this p99.",
    ),
    click.option(
        "--p99-between",
        "inter_token",
        type=_SECONDS,
        metavar="SECONDS",
        help="The same for the time between tokens.",
    ),
    click.option(
        "--p99-request", "whole", type=_SECONDS, metavar="SECONDS", help="The same for whole requests."
    ),
)


@click.command(short_help="Run a trace through the scheduler alone.")
@click.argument("trace")
@click.option(
    "--cost",
    "cost_path",
    metavar="STEP_LOG|JSON",
    help="The run with the step times, or the --json of a simulation, possibly edited.  "
    "[default: TRACE, if it is a step log]",
)
@click.option(
    "--max-num-seqs",
    "widths",
    type=click.IntRange(1),
    multiple=True,
    help="Number of slots; repeatable, to compare.  [default: as recorded]",
)
@click.option(
    "--memory",
    metavar="SIZE",
    help="KV cache of 500MB, 8GB, ...: as many slots of the recorded max_model_len, or KV blocks, as fit.",
)
@click.option(
    "--blocks/--no-blocks",
    "--pages/--no-pages",
    "blocks",
    cls=_help.RenamedOption,
    default=None,
    help="Slots share KV blocks of --memory, or have their own memory.  [default: as recorded]",
)
@click.option(
    "--policy",
    "policies",
    type=_help.PolicyName(),
    multiple=True,
    help="Which request goes first; repeatable, to compare. Custom policies by import path.  [default: as recorded]",
)
@click.option("--quantum", type=click.IntRange(1), help="Steps in a time slice under round_robin.")
@click.option("--max-num-batched-tokens", type=click.IntRange(1), help="Token budget of a step.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="Number of requests, the first of TRACE.  [default: all; 10000 of a generated trace]",
)
@click.option(
    "--rate", type=click.FloatRange(0, min_open=True), help="Arrivals per second of a generated trace."
)
@click.option(
    "--speed",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    help="Factor by which to speed up arrivals.",
)
@click.option("--seed", type=int, default=0, help="Seed of a generated trace.")
@click.option(
    "--replicas",
    type=click.IntRange(1, 4096),
    multiple=True,
    help="Number of machines behind a router; repeatable, to compare.",
)
@goal_options
@click.option("--plot", "plot_path", metavar="FILE", help="Draw the distributions of times (extra `plot`).")
@click.option(
    "--step-log",
    "--record",
    "step_log_path",
    cls=_help.RenamedOption,
    metavar="FILE",
    help="Write the steps, for `timeline`; one simulation only.",
)
@click.option("--json", "json_path", metavar="FILE", help="Write the figures, and the cost model.")
def simulate(
    trace: str,
    cost_path: str | None,
    widths: tuple[int, ...],
    memory: str | None,
    blocks: bool | None,
    policies: tuple[str, ...],
    quantum: int | None,
    max_num_batched_tokens: int | None,
    requests: int | None,
    rate: float | None,
    speed: float,
    seed: int,
    replicas: tuple[int, ...],
    plot_path: str | None,
    step_log_path: str | None,
    json_path: str | None,
    **options: Any,
) -> None:
    """Run TRACE through the engine's own scheduler without a device, with step times from a recorded run.

    TRACE is a step log of `run --step-log`; or a CSV file with a header (arrival, prompt_tokens, new_tokens; or the
    columns of the Azure LLM inference traces; or of BurstGPT), compressed if its name ends in .gz; or a generated
    one: heavy-tailed, uniform, azure-like.

    The cost model is linear in what a step holds and fitted by least squares. If TRACE is a step log, it is
    first simulated as it ran, and its own times are shown with the predicted ones. The file of --json holds
    the model, in seconds, and can be the --cost of another simulation, which may describe a machine that
    you do not have.

    With --replicas N the requests go to N machines. With --p99-first-token, --p99-between or --p99-request
    the command finds the smallest number of machines that meets the goal.

    \b
    Example:
      xla-engine run examples/requests.jsonl -o out.jsonl --step-log steps.jsonl
      xla-engine simulate steps.jsonl
      xla-engine simulate heavy-tailed --cost steps.jsonl --rate 40 --max-num-seqs 8 --max-num-seqs 32
      xla-engine simulate heavy-tailed --cost steps.jsonl --rate 40 --memory 20MB --blocks --max-num-seqs 32
      xla-engine simulate AzureLLMInferenceTrace_conv.csv --cost steps.jsonl --policy fcfs --policy shortest_prompt
      xla-engine simulate azure-like --rate 20 --requests 2000 --cost steps.jsonl --p99-first-token 2
    """
    from xla_engine.observability.step_log import is_step_log, read_step_log
    from xla_engine.tools.simulator.cost import StatedMachine, machine_of, read_stated
    from xla_engine.tools.simulator.fit import fit
    from xla_engine.tools.simulator.replicas import Goal
    from xla_engine.tools.simulator.report import extrapolations, plot, table, to_json
    from xla_engine.tools.simulator.trace import SYNTHETIC

    goal, made = Goal(**options), trace in SYNTHETIC
    several = bool(replicas or goal)
    with _common.startup_errors():
        recorded = None if made or not is_step_log(trace) else read_step_log(trace)
        source: StepLog | StatedMachine | None = recorded
        if cost_path is not None:
            source = read_step_log(cost_path) if is_step_log(cost_path) else read_stated(cost_path)
        if source is None:
            raise _common.NotStarted("--cost STEP_LOG is needed: a step log of `xla-engine run --step-log`")
        cost = source.cost if isinstance(source, StatedMachine) else fit(source)
    click.echo("\n".join(cost.lines()))
    found: dict[str, Any] = {"cost": cost.to_json(), "machine": {"scheduler": {**source.scheduler}}}
    found["machine"]["engine"] = {**source.engine}
    if recorded is not None:
        from xla_engine.tools.simulator.compare import compare

        click.echo("\n" + "\n".join(compare(recorded, cost).lines()))
    if blocks is None:
        blocks = source.scheduler.get("num_blocks") is not None
    num_blocks = _blocks(memory, source) if blocks else None
    if memory is not None and not blocks:
        if widths:
            raise _common.NotStarted(
                "--memory and --max-num-seqs both set the number of slots; give one of them, or add --blocks"
            )
        widths = (_fit(memory, source, "slot", int(source.engine.get("slot_bytes", 0))),)
    configs = _configs(source, widths, policies, quantum, max_num_batched_tokens, num_blocks)
    if recorded is None:  # shared prefixes are unknown
        configs = {name: replace(config, enable_prefix_caching=False) for name, config in configs.items()}
    if step_log_path is not None and (len(configs) > 1 or several):
        raise _common.NotStarted("--step-log writes the steps of one simulation; run only one")
    if several and len(configs) > 1:
        raise _common.NotStarted(
            "machines are compared for one number of slots and one policy; give one of each"
        )
    if made and rate is None:
        raise _common.NotStarted("--rate is needed for a generated trace: the number of requests per second")
    arrivals = partial(_arrivals, trace, recorded, requests, rate, speed, seed)
    title = f"{Path(trace).name}, {source.engine.get('model', '')}"
    if several:
        ((name, config),) = configs.items()
        click.echo(f"\nmachines of {name}")
        found["machines"] = simulate_machines(
            replicas,
            goal,
            config,
            machine_of(source),
            cost,
            arrivals,
            lag=int(source.engine["lag"]),
            plot_path=plot_path,
            title=title,
        )
    else:
        reports: dict[str, SimulationReport] = {}
        for name, config in configs.items():
            with _common.startup_errors():
                began = time.monotonic()
                reports[name] = report = _simulate(config, source, cost, arrivals(), step_log_path)
            took = time.monotonic() - began
            click.echo(f"{name}: {report.requests} requests, {report.steps} steps in {took:.1f} s", err=True)
        click.echo("\n" + "\n".join([*table(reports), *extrapolations(reports, cost, machine_of(source))]))
        with _common.startup_errors():
            if plot_path is not None:
                plot(reports, plot_path, title)
        found["simulations"] = {name: to_json(report) for name, report in reports.items()}
    with _common.startup_errors():
        if json_path is not None:
            Path(json_path).write_text(json.dumps(found, indent=1) + "\n")


def _fit(memory: str, source: StepLog | StatedMachine, what: str, each: int) -> int:
    """How many slots or blocks (`what`) of `each` bytes fit into a memory size such as 8GB."""
    found = re.fullmatch(r"([0-9.]+) *([kMGT]?)B?", memory.strip())
    if found is None or not each:
        raise _common.NotStarted(
            f"--memory {memory}: give a size like 500MB or 8GB, and a step log of this version"
        )
    size = float(found[1]) * 1000 ** " kMGT".index(found[2] or " ")
    if size < each:
        raise _common.NotStarted(f"--memory {memory} is {size:.0f} bytes; one {what} takes {each}")
    return int(size // each)


def _blocks(memory: str | None, source: StepLog | StatedMachine) -> int:
    """The number of KV blocks that fit into the memory, or the recorded number."""
    if memory is not None:
        each = int(source.engine.get("kv_bytes_per_token", 0)) * int(source.scheduler["block_size"])
        return _fit(memory, source, "block", each)
    if source.scheduler.get("num_blocks") is None:
        raise _common.NotStarted("--blocks needs --memory: the recorded run had none")
    return int(source.scheduler["num_blocks"])


def _configs(
    source: StepLog | StatedMachine,
    widths: tuple[int, ...],
    policies: tuple[str, ...],
    quantum: int | None,
    max_num_batched_tokens: int | None,
    num_blocks: int | None,
) -> dict[str, SchedulerConfig]:
    """The configurations to simulate, by their names in the table."""
    from xla_engine.scheduler import SchedulerConfig

    recorded = SchedulerConfig(**source.scheduler)
    spare = recorded.max_num_batched_tokens - recorded.max_num_seqs
    found = {}
    for policy in policies or (recorded.scheduling_policy,):
        for width in widths or (recorded.max_num_seqs,):
            name = f"{policy}, {width} slots" + (f", {num_blocks} blocks" if num_blocks else "")
            found[name] = replace(
                recorded,
                num_blocks=num_blocks,
                max_num_seqs=width,
                max_num_batched_tokens=max_num_batched_tokens or max(width + spare, 1),
                scheduling_policy=policy,
                quantum=quantum or recorded.quantum,
                preemption=recorded.preemption and policy in PREEMPTIVE,
                prefill_equals_decode=False,  # a trace has no generated tokens to reuse
            )
    return found


def _arrivals(
    trace: str, recorded: StepLog | None, requests: int | None, rate: float | None, speed: float, seed: int
) -> Iterator[Arrival]:
    from xla_engine.tools.simulator.trace import SYNTHETIC, of_step_log, read_csv

    if trace in SYNTHETIC:
        assert rate is not None
        return SYNTHETIC[trace](requests or 10_000, rate * speed, seed)
    found = read_csv(trace) if recorded is None else of_step_log(recorded, by_time=True)
    if speed != 1.0:
        found = (replace(arrival, time=arrival.time / speed) for arrival in found)
    return itertools.islice(found, requests)


def _simulate(
    config: SchedulerConfig,
    source: StepLog | StatedMachine,
    cost: Any,
    arrivals: Iterator[Arrival],
    step_log_path: str | None,
) -> SimulationReport:
    from xla_engine.observability.step_log_writer import StepLogWriter
    from xla_engine.tools.simulator.clock import SimulatedClock
    from xla_engine.tools.simulator.cost import machine_of
    from xla_engine.tools.simulator.simulate import Simulation

    with contextlib.ExitStack() as stack:
        log = None
        if step_log_path is not None:
            file = stack.enter_context(open(step_log_path, "w", encoding="utf-8"))
            engine = {**source.engine, "device": f"simulated {source.engine.get('device', '')}"}
            log = StepLogWriter(file, scheduler=asdict(config), engine=engine, began=0.0)
        machine = replace(machine_of(source), rows=config.max_num_seqs)
        simulation = Simulation(config, machine, SimulatedClock(cost), lag=int(source.engine["lag"]), log=log)
        try:
            return simulation.run(arrivals)
        except PolicyError as error:
            raise _common.NotStarted(str(error)) from error


def _machines(number: int) -> str:
    return "1 machine" if number == 1 else f"{number} machines"


def simulate_machines(
    replicas: tuple[int, ...],
    goal: Goal,
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

    replicas: the numbers of machines; empty to search the fewest that meet the goal.
    machine: the one that the cost model was fitted to. Raises NotStarted if the answer would extrapolate too far.
    """
    if cost.residual > HOPELESS:
        raise _common.NotStarted(
            f"the cost model misses the time of a step by {100 * cost.residual:.0f} % of the mean step, so no "
            f"number of machines can be computed: record a longer run on a quiet machine"
        )
    from xla_engine.tools.simulator.replicas import (
        fewest,
        machines_table,
        plot_machines,
        simulate_replicas,
    )
    from xla_engine.tools.simulator.report import extrapolations, to_json

    def simulate(number: int) -> SimulationReport:
        began = time.monotonic()
        simulated = replace(machine, rows=config.max_num_seqs)
        report = simulate_replicas(config, simulated, cost, arrivals(), replicas=number, lag=lag)
        took = time.monotonic() - began
        click.echo(f"{_machines(number)}: {report.requests} requests in {took:.1f} s", err=True)
        if not replicas and report.longest > FURTHEST * machine.length:
            raise _common.NotStarted(
                f"the longest request has {report.longest} tokens, and the recorded engine allowed at most "
                f"{machine.length}: no number of machines can be computed. Record a run with --max-model-len "
                f"{report.longest}, or use a trace of shorter requests"
            )
        return report

    with _common.startup_errors():
        if not replicas:
            needed, reports = fewest(simulate, goal)
        else:
            reports = {number: simulate(number) for number in sorted(set(replicas))}
            needed = next((number for number, each in reports.items() if goal and goal.is_met(each)), None)
    said = extrapolations({_machines(number): each for number, each in reports.items()}, cost, machine)
    click.echo("\n" + "\n".join([*machines_table(reports, goal), *said]))
    if goal:
        goals = ", ".join(f"{name} {most:g} s" for name, most in goal.wanted.items() if most is not None)
        answer = (
            "no number of machines is enough: a single request takes longer"
            if not replicas
            else "none of these"
        )
        click.echo(f"\np99 of {goals}: {_machines(needed) if needed is not None else answer}")
    with _common.startup_errors():
        if plot_path is not None:
            plot_machines(reports, goal, Path(plot_path), title)
    return {str(number): to_json(report) for number, report in reports.items()} | {"needed": needed}
