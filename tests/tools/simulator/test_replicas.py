"""Several machines: one of them is one, more of them are no slower, and the fewest that keep to a goal are found."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.simulation import COST
from xla_engine.cli import main
from xla_engine.scheduler import SchedulerConfig
from xla_engine.tools.simulator.clock import SimulatedClock
from xla_engine.tools.simulator.cost import Machine
from xla_engine.tools.simulator.replicas import Goal, fewest, simulate_replicas
from xla_engine.tools.simulator.report import SimulationReport
from xla_engine.tools.simulator.simulate import Simulation
from xla_engine.tools.simulator.trace import Arrival, azure_like, heavy_tailed

CONFIG = SchedulerConfig(max_num_seqs=4, chunk_size=32, max_num_batched_tokens=260, preemption=True)
MACHINE = Machine(lanes=(2, 8), key_buckets=(512,), rows=4)


def on(replicas: int, requests: int = 150, rate: float = 90.0) -> SimulationReport:
    trace = heavy_tailed(requests, rate, 0)
    return simulate_replicas(CONFIG, MACHINE, COST, trace, replicas=replicas)


def test_one_machine_is_the_simulation_of_one() -> None:
    alone = Simulation(CONFIG, MACHINE, SimulatedClock(COST)).run(heavy_tailed(150, 90.0, 0))
    one = on(1)
    assert (one.steps, one.wall, one.new_tokens) == (alone.steps, pytest.approx(alone.wall), alone.new_tokens)
    assert one.first_token.total == pytest.approx(alone.first_token.total)
    assert one.inter_token.count == alone.inter_token.count and one.most_waiting == alone.most_waiting


def test_more_machines_share_the_load() -> None:
    reports = [on(replicas) for replicas in (1, 2, 4, 16)]
    assert all(report.requests == 150 and sum(report.finished.values()) == 150 for report in reports)
    assert (
        len({report.new_tokens for report in reports})
        == len({report.prompt_tokens for report in reports})
        == 1
    )
    waits = [report.first_token.at(0.99) for report in reports]
    assert waits == sorted(waits, reverse=True) and waits[0] > 3 * waits[2]
    assert reports[-1].most_waiting == 0


def test_requests_that_begin_alike_go_to_one_machine() -> None:
    """Where the simulator knows what prompts have in common: the cache is used as if there were one machine."""
    config = replace(CONFIG, enable_prefix_caching=True, block_size=64)
    trace = [
        Arrival(
            name=f"{step}-{group}",
            time=float(step),
            prompt_tokens=330,
            new_tokens=2,
            max_tokens=2,
            prompt=[
                *range(1000 * group, 1000 * group + 320),
                *range(10**6 + 10 * step, 10**6 + 10 * step + 10),
            ],
        )
        for step in range(6)
        for group in range(3)
    ]
    one = simulate_replicas(config, MACHINE, COST, trace, replicas=1)
    three = simulate_replicas(config, MACHINE, COST, trace, replicas=3)
    assert three.prompt_tokens == one.prompt_tokens < 0.4 * 330 * len(trace)


def test_the_fewest_machines_are_found() -> None:
    goal = Goal(first_token=0.25)
    needed, reports = fewest(on, goal)
    assert needed is not None and needed > 1
    assert goal.is_met(on(needed)) and not goal.is_met(on(needed - 1))
    assert set(reports) >= {needed, needed - 1} and list(reports) == sorted(reports)


def test_a_goal_that_no_number_keeps_is_seen() -> None:
    needed, reports = fewest(lambda replicas: on(replicas, requests=40), Goal(whole=1e-3))
    assert needed is None and max(reports) < 512


def test_the_azure_like_trace_has_the_lengths_it_says() -> None:
    trace = list(azure_like(20_000, 5.0, 0))
    prompts, new = sorted(each.prompt_tokens for each in trace), sorted(each.new_tokens for each in trace)
    assert prompts[10_000] == pytest.approx(1020, rel=0.05) and new[10_000] == pytest.approx(129, rel=0.05)
    assert sum(prompts) / 20_000 == pytest.approx(1155, rel=0.05) and sum(new) / 20_000 == pytest.approx(
        205, rel=0.06
    )


def stated_machine(folder: Path) -> Path:
    machine = {
        "cost": COST.to_json(),
        "machine": {
            "scheduler": {
                "max_num_seqs": 4,
                "chunk_size": 32,
                "max_num_batched_tokens": 260,
                "block_size": 64,
            },
            "engine": {"prefill_lanes": [2, 8], "key_buckets": [512], "lag": 1},
        },
    }
    (folder / "machine.json").write_text(json.dumps(machine))
    return folder / "machine.json"


def test_the_command_answers_with_a_stated_machine(tmp_path: Path) -> None:
    stated, figures = stated_machine(tmp_path), tmp_path / "figures.json"
    command = ["simulate", "heavy-tailed", "--rate", "90", "--requests", "150", "--cost", str(stated)]
    done = CliRunner().invoke(main, [*command, "--p99-first-token", "0.25", "--json", str(figures)])
    assert done.exit_code == 0, done.output
    needed = json.loads(figures.read_text())["machines"]["needed"]
    assert f"p99 of first_token 0.25 s: {needed} machines" in done.stdout and "meets the goal" in done.stdout
    again = CliRunner().invoke(main, [*command, "--replicas", "1", "--replicas", "3", "--cost", str(figures)])
    # what it wrote can be stated
    assert again.exit_code == 0 and again.stdout.splitlines()[-1].split()[0] == "3"
    pytest.importorskip("matplotlib")
    picture = tmp_path / "machines.png"
    drawn = CliRunner().invoke(main, [*command, "--p99-first-token", "0.25", "--plot", str(picture)])
    assert drawn.exit_code == 0 and picture.read_bytes().startswith(b"\x89PNG")


def test_no_plan_is_made_of_what_was_not_measured(tmp_path: Path) -> None:
    """Requests far longer than the recorded engine takes, and a fit that explains nothing; else by how much."""
    stated = stated_machine(tmp_path)
    command = ["simulate", "azure-like", "--rate", "5", "--requests", "200", "--cost", str(stated)]
    long = CliRunner().invoke(main, [*command, "--p99-first-token", "0.5"])
    assert long.exit_code == 2 and re.search(
        r"longest request has \d+ tokens, and the recorded engine allowed at most 512", long.stderr
    )
    told = CliRunner().invoke(main, [*command, "--max-num-seqs", "16"])
    assert told.exit_code == 0 and re.search(r"\d+ of 200 requests are longer than the 512 pos", told.stdout)
    assert "16 slots, 4.0 times the recorded ones" in told.stdout
    fitted = json.loads(stated.read_text())
    fitted["cost"]["residual"] = 1.46
    stated.write_text(json.dumps(fitted))
    command[1] = "uniform"
    vague = CliRunner().invoke(main, [*command, "--p99-first-token", "0.5"])
    assert vague.exit_code == 2 and "misses the time of a step by 146 %" in vague.stderr
    told = CliRunner().invoke(main, command)
    assert told.exit_code == 0 and "misses the time of a step by 146 %" in told.stdout
    assert "longer than" not in told.stdout


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    command = [
        "simulate",
        "heavy-tailed",
        "--rate",
        "30",
        "--requests",
        "5",
        "--cost",
        str(stated_machine(tmp_path)),
    ]
    both = CliRunner().invoke(
        main, [*command, "--replicas", "2", "--max-num-seqs", "2", "--max-num-seqs", "4"]
    )
    assert both.exit_code == 2 and "one of each" in both.stderr
    (tmp_path / "bad.json").write_text('{"cost": {}}')
    bad = CliRunner().invoke(main, [*command[:-1], str(tmp_path / "bad.json")])
    assert bad.exit_code == 2 and "neither a step log" in bad.stderr
