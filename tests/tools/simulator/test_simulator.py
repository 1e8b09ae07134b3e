"""The simulator: the same schedule as the engine's, the same figures whether steps are skipped or not."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from tests.support.simulation import COST, record
from tests.tools.simulator.test_replicas import stated_machine
from xla_engine.cli import main
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import RecordError
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import StepLogWriter
from xla_engine.scheduler import Scheduler, SchedulerConfig
from xla_engine.tools.simulator.clock import SimulatedClock
from xla_engine.tools.simulator.compare import compare
from xla_engine.tools.simulator.cost import CostModel, DeviceWork, HostWork, Machine, least_squares
from xla_engine.tools.simulator.fit import fit
from xla_engine.tools.simulator.report import SimulationReport
from xla_engine.tools.simulator.simulate import Simulation
from xla_engine.tools.simulator.trace import Arrival, heavy_tailed, read_csv

UNEVEN = replace(COST, noise=(0.0, 4e-4, -3e-4, -1e-4), overlap=0.5, wake=1e-3)
MACHINE = Machine(lanes=(2, 8), key_buckets=(512,), rows=8)


@pytest.mark.parametrize(
    ("lag", "policy"), [(0, "priority"), (1, "priority"), (1, "round_robin"), (1, "longest_prefix")]
)
def test_simulated_schedule_is_the_real_one_step_for_step(
    embedded: XlaBatchEngine, tmp_path: Path, lag: int, policy: str
) -> None:
    usual = embedded.scheduler
    options = {
        "scheduling_policy": policy,
        "quantum": 5,
        "preemption": policy == "priority",
        "max_num_seqs": 4,
    }
    embedded.scheduler = Scheduler(replace(usual.config, **options))
    record(embedded, tmp_path / "steps.jsonl", seed=lag, lag=lag)
    preemptions = embedded.scheduler.counters().preemptions
    embedded.scheduler = usual
    embedded.reset_prefix_cache()
    log = read_step_log(tmp_path / "steps.jsonl")
    assert {each.end for each in log.requests} >= {"length", "stop", "abort"}
    found = compare(log, COST)
    assert found.first_difference is None, f"of {found.steps} steps, {found.first_difference} differs"
    tokens = sum(each.tokens for each in log.requests)
    assert any(step.reuses for step in log.steps)
    assert found.predicted.preemptions == preemptions and (preemptions > 0) == (policy != "longest_prefix")
    assert found.measured.new_tokens == found.predicted.new_tokens == tokens

    # And a schedule that is not the real one is seen.
    other = replace(log.requests[5], max_tokens=log.requests[5].max_tokens + 1)
    log.requests[5] = other
    assert other.end != "length" or compare(log, COST).first_difference is not None


arrivals = st.lists(
    st.tuples(
        st.sampled_from((0.0, 0.0, 0.001, 0.02, 0.3)),  # after the one before
        st.integers(1, 90),
        st.integers(1, 120),
        st.sampled_from((0, 0, 5)),  # asked for beyond what it gets
        st.sampled_from((None, None, None, 0.05)),
        st.sampled_from((False, False, False, False, True)),
        st.sampled_from((0, 0, 0, -3, 4)),
    ),
    min_size=1,
    max_size=14,
)


Row = tuple[float, int, int, int, float | None, bool, int]
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"preemption": True},
    {"preemption": True, "swap_tokens": 0},
    {"scheduling_policy": "shortest_prompt", "priority_aging": 2},
    {"scheduling_policy": "deadline"},
    {"scheduling_policy": "round_robin", "quantum": 7},
    {"scheduling_policy": "longest_prefix", "enable_prefix_caching": True},
    {"num_blocks": 16, "block_size": 16},
    {"num_blocks": 16, "block_size": 16, "preemption": True, "enable_prefix_caching": True},
    {"num_blocks": 16, "block_size": 16, "scheduling_policy": "round_robin", "quantum": 7},
)


def as_trace(rows: list[Row]) -> Iterator[Arrival]:
    time = 0.0
    for index, (gap, prompt, new, more, deadline, constrained, priority) in enumerate(rows):
        time += gap
        yield Arrival(
            name=str(index),
            time=time,
            prompt_tokens=prompt,
            new_tokens=new,
            max_tokens=new + more,
            deadline=deadline,
            constrained=constrained,
            priority=priority,
        )


def simulate(
    trace: Iterator[Arrival],
    *,
    slots: int,
    lag: int,
    machine: Machine,
    skip: bool,
    cost: CostModel = COST,
    **options: Any,
) -> SimulationReport:
    sizes = {"max_num_seqs": slots, "chunk_size": 16, "max_num_batched_tokens": slots + 64}
    config = SchedulerConfig(**sizes | options)
    simulation = Simulation(config, machine, SimulatedClock(cost), lag=lag)
    simulation.plans = None if skip else []
    report = simulation.run(trace)
    simulation._scheduler.check()
    kept = (simulation._live, simulation._base, simulation._pipeline.in_flight)
    assert not any(kept) and not simulation._irregular, f"left behind: {kept}"
    return report


@pytest.mark.full
@settings(max_examples=examples(40, 100), deadline=None)
@given(
    arrivals,
    st.sampled_from((1, 2, 5)),
    st.sampled_from((0, 1, 2)),
    st.sampled_from(((512,), (32, 96, 512))),
    st.sampled_from(POLICIES),
)
@example(  # a row that came back: its prompt's last chunk sampled the next token, steps that are skipped the rest
    [
        (0.0, 4, 1, 0, None, False, -3),
        (0.001, 8, 6, 0, None, True, 4),
        (0.3, 27, 38, 0, None, False, 4),
        (0.001, 1, 1, 0, None, False, -3),
    ],
    1,
    0,
    (32, 96, 512),
    {"preemption": True, "swap_tokens": 0},
)
def test_skipping_steps_changes_no_figure(
    rows: list[Row], slots: int, lag: int, buckets: tuple[int, ...], options: dict[str, Any]
) -> None:
    machine = Machine(lanes=(2, 8), key_buckets=buckets, rows=slots)
    options |= {"slots": slots, "lag": lag, "machine": machine, "cost": UNEVEN}
    quick = simulate(as_trace(rows), skip=True, **options)
    slow = simulate(as_trace(rows), skip=False, **options)
    assert slow.skipped == 0
    for name in ("steps", "decode_steps", "row_steps", "requests", "prompt_tokens", "new_tokens", "finished"):
        assert getattr(quick, name) == getattr(slow, name), name
    assert quick.most_waiting == slow.most_waiting
    assert quick.wall == pytest.approx(slow.wall, rel=1e-9)
    for name in ("queued", "first_token", "inter_token", "whole"):
        fast, full = getattr(quick, name), getattr(slow, name)
        assert fast.count == full.count, name
        assert fast.total == pytest.approx(full.total, rel=1e-9, abs=1e-12), name
        assert fast.largest == pytest.approx(full.largest, rel=1e-9), name


def test_most_steps_of_a_calm_trace_are_skipped() -> None:
    report = simulate(heavy_tailed(200, 2.0, 0), slots=8, lag=1, machine=MACHINE, skip=True)
    assert report.skipped > 0.9 * report.steps
    assert report.finished == {"length": 200}


def test_figures_of_two_requests_are_those_of_the_arithmetic() -> None:
    """One slot, no lag: each step is a turn of the host and what the device takes."""
    trace = [
        Arrival(name="a", time=0.0, prompt_tokens=16, new_tokens=3, max_tokens=3),
        Arrival(name="b", time=0.0, prompt_tokens=16, new_tokens=1, max_tokens=1),
    ]
    report = simulate(iter(trace), slots=1, lag=0, machine=MACHINE, skip=True)
    first = (
        2 * COST.submit
        + COST.host(HostWork(0, 0, 1))
        + COST.device(DeviceWork((2,), 16, 0, 0, prompt_tokens=16))
    )
    decoded = [COST.host(HostWork(1, 0, 0)) + COST.device(DeviceWork((), 0, 1, keys)) for keys in (17, 18)]
    last = COST.host(HostWork(1, 1, 1)) + COST.device(DeviceWork((2,), 16, 0, 0, prompt_tokens=16))
    assert report.steps == 4
    assert report.wall == pytest.approx(first + sum(decoded) + last)
    assert report.first_token.total == pytest.approx(first + (first + sum(decoded) + last))
    assert (report.inter_token.count, report.inter_token.total) == (2, pytest.approx(sum(decoded)))


def test_host_that_works_beside_the_device_delays_it_and_steps_differ() -> None:
    clock = SimulatedClock(
        replace(COST, turn=1e-3, decode=5e-3, row=0.0, key=0.0, overlap=0.5, noise=(0.0, 1e-3))
    )
    host, step = HostWork(), DeviceWork(rows=1)
    clock.start(host, step)  # over at 6 ms
    clock.start(host, step)  # 1 ms of the host's makes that 6.5; the next takes 6
    assert clock.read() == pytest.approx(6.5e-3)
    clock.start(host, step)
    assert clock.read() == pytest.approx(13e-3)
    assert clock.read() == pytest.approx(18e-3)
    clock.start(host, step)  # nothing runs that it could delay
    assert clock.read() == pytest.approx(25e-3)


def test_least_squares_finds_planted_costs_and_none_below_zero() -> None:
    draw = random.Random(0)
    rows = [[1.0, draw.random(), draw.random() * 100, 0.0] for _ in range(300)]
    found, residual = least_squares(rows, [2.0 + 3.0 * row[1] + 0.01 * row[2] for row in rows])
    assert found == pytest.approx([2.0, 3.0, 0.01, 0.0]) and residual < 1e-9
    found, residual = least_squares(rows, [5.0 - row[1] for row in rows])
    assert min(found) == 0.0 and found[1] == 0.0 and residual > 0.01


def test_public_trace_layouts_are_read(tmp_path: Path) -> None:
    azure = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n"
    )
    ours = "arrival,prompt_tokens,new_tokens,priority,deadline\n0,5,6,,\n0.5,7,8,-2,1.5\n"
    (tmp_path / "azure.csv").write_text(azure)
    with gzip.open(tmp_path / "burst.csv.gz", "wt") as file:
        file.write(burst)
    (tmp_path / "ours.csv").write_text(ours)
    found = list(read_csv(tmp_path / "azure.csv"))
    assert [(each.prompt_tokens, each.new_tokens) for each in found] == [(374, 44), (396, 109)]
    assert found[1].time == pytest.approx(4.314579)
    found = list(read_csv(tmp_path / "burst.csv.gz"))
    assert [(each.time, each.prompt_tokens, each.new_tokens) for each in found] == [
        (0.0, 472, 18),
        (113.0, 417, 276),
    ]
    found = list(read_csv(tmp_path / "ours.csv"))
    assert (found[1].priority, found[1].deadline, found[0].deadline) == (-2, 1.5, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "one of these sets of columns"),
        ("arrival,prompt_tokens,new_tokens\n0,1,1\nx,1,1\n", "line 3"),
        ("arrival,prompt_tokens,new_tokens\n5,1,1\n4,1,1\n", "sort by time"),
        ("", "one of these sets of columns"),
    ],
)
def test_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(RecordError, match=why):
        list(read_csv(tmp_path / "t.csv"))


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    """The log of a simulation, whose costs are known."""
    path = tmp_path / "steps.jsonl"
    config = SchedulerConfig(max_num_seqs=8, chunk_size=16, max_num_batched_tokens=8 + 128)
    engine = {
        "lag": 1,
        "slot_bytes": 4000,
        "kv_bytes_per_token": 10,
        "prefill_lanes": [2, 8],
        "key_buckets": [512],
        "model": "none",
    }
    with open(path, "w") as file:
        log = StepLogWriter(file, scheduler=asdict(config), engine=engine, began=0.0)
        Simulation(config, MACHINE, SimulatedClock(COST), log=log).run(heavy_tailed(60, 30.0, 0))
    return path


def test_costs_that_a_record_was_made_with_are_found_again(simulated: Path) -> None:
    log = read_step_log(simulated)
    found = fit(log)
    for name in ("decode", "row", "key", "prompt_token", "prefill_key", "turn", "start_call", "submit"):
        assert getattr(found, name) == pytest.approx(getattr(COST, name), rel=0.05), name
    assert found.call == pytest.approx(COST.call, rel=0.02)
    assert found.residual < 0.01 and found.host_residual < 0.05
    same = compare(log, found)
    assert same.first_difference is None
    assert same.predicted.wall == pytest.approx(same.measured.wall, rel=0.01)
    assert same.predicted.first_token.at(0.5) == pytest.approx(same.measured.first_token.at(0.5), rel=0.03)


def test_short_record_gives_no_model(simulated: Path) -> None:
    log = read_step_log(simulated)
    del log.steps[15:]
    with pytest.raises(RecordError, match="too short"):
        fit(log)


@pytest.mark.full
def test_command_compares_widths_and_records(simulated: Path, tmp_path: Path) -> None:
    figures, again = tmp_path / "f.json", tmp_path / "again.jsonl"
    ran = CliRunner().invoke(main, ["simulate", str(simulated)])
    assert ran.exit_code == 0, ran.output
    assert "steps as recorded" in ran.output and "residual" in ran.output
    made = ["simulate", "heavy-tailed", "--cost", str(simulated), "--rate", "30", "--requests", "60"]
    ran = CliRunner().invoke(
        main, [*made, "--max-num-seqs", "2", "--max-num-seqs", "32", "--json", str(figures)]
    )
    assert ran.exit_code == 0, ran.output
    found = json.loads(figures.read_text())["simulations"]
    assert found["priority, 2 slots"]["wall"] > found["priority, 32 slots"]["wall"]
    assert len({each["new_tokens"] for each in found.values()}) == 1
    ran = CliRunner().invoke(main, [*made, "--policy", "round_robin", "--policy", "fcfs", "--memory", "9kB"])
    assert ran.exit_code == 0 and "round_robin, 2 slots" in ran.output, ran.output
    ran = CliRunner().invoke(main, [*made, "--memory", "4kB", "--blocks", "--json", str(figures)])
    assert ran.exit_code == 0 and "never fit into the blocks" in ran.output, ran.output
    found = json.loads(figures.read_text())["simulations"]["priority, 8 slots, 6 blocks"]
    assert found["preemptions"] > 0 and found["finished"]["refused"] > 0 < found["finished"]["length"]
    ran = CliRunner().invoke(main, [*made, "--step-log", str(again)])
    assert ran.exit_code == 0, ran.output
    log = read_step_log(again)
    assert len(log.requests) == 60 and all(each.end == "length" for each in log.requests)
    for wrong in (
        ["simulate", "uniform", "--rate", "1"],
        made[:4],
        [*made, "--speed", "0"],
        [*made, "--memory", "9"],
        [*made, "--blocks"],
    ):
        assert CliRunner().invoke(main, wrong).exit_code == 2


def test_a_policy_of_the_callers_own_orders_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest first: half of the requests have their first token sooner than in order of arrival."""
    (tmp_path / "own_policy.py").write_text(
        "def shortest(facts):\n    return facts.prompt_tokens + facts.max_tokens\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    stated, figures = stated_machine(tmp_path), tmp_path / "figures.json"
    words = ["simulate", "heavy-tailed", "--rate", "200", "--requests", "150", "--cost", str(stated)]
    words += ["--policy", "fcfs", "--policy", "own_policy:shortest", "--json", str(figures)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    first, own = json.loads(figures.read_text())["simulations"].values()
    assert own["new_tokens"] == first["new_tokens"] and own["finished"] == first["finished"]
    assert own["first_token"]["p50"] < 0.7 * first["first_token"]["p50"]
