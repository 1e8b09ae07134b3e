"""Phase timers: every moment of a turn is in one phase, and an engine without them has none of it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.engine_faults import fail_at
from tests.support.models import BOTH_LANES
from xla_engine.cli import main
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.observability.phases import PHASES, PhaseTimer
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.timeline import read_timeline

PARAMS = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
TIMED = replace(BOTH_LANES, phase_timers=True)


class Steps:
    """A loop of which every verb takes a known time, and which tells a timer. `run` takes one turn at a lag of 1."""

    def __init__(self, draw: random.Random) -> None:
        self.timer = PhaseTimer(clock=lambda: self.now)
        self.now, self.busy, self.began = 0, True, 0
        self.expected = dict.fromkeys((*PHASES, "between"), 0)
        self.by_step: dict[int, list[int]] = {}
        self._draw = draw
        self._flight: list[int] = []

    def spend(self, phase: str, step: int | None = None) -> None:
        nanoseconds = self._draw.randrange(1000)
        self.now += nanoseconds
        self.expected[phase] += nanoseconds
        if step is not None:
            self.by_step.setdefault(step, [0] * 5)[PHASES.index(phase)] += nanoseconds

    def run(self) -> None:
        timer, step = self.timer, self.began
        timer.begin()
        self.spend("plan", step)
        timer.dispatches()
        self.spend("dispatch", step)
        timer.dispatched(step)
        self.spend("plan", step)
        self._flight.append(step)
        self.began += 1
        read = self._flight.pop(0) if len(self._flight) > 1 else None
        timer.planned(is_over=read is None, has_work=self.busy)
        if read is None:
            return
        self.spend("wait", read)
        timer.answered()
        self.spend("commit", read)
        timer.committed(read)
        self.spend("deliver", read)
        timer.ended(has_work=self.busy)


@pytest.mark.parametrize("seed", range(5))
def test_each_moment_is_in_the_phase_that_it_belongs_to(seed: int) -> None:
    loop, told = Steps(random.Random(seed)), {}
    timer = loop.timer
    timer.on_step = lambda step, spent: told.update({step: list(spent)})
    for _ in range(20):
        loop.run()
        loop.spend("between")
    assert {name: getattr(timer.times, name) for name in loop.expected} | {"between": 0} == loop.expected | {
        "between": 0
    }
    assert told == {step: spent for step, spent in loop.by_step.items() if step < 19}
    assert timer.times.turns == 20
    assert timer.times.wall + loop.expected["between"] == loop.now
    loop.busy = False
    loop.run()
    loop.now += 10**9  # nobody is there
    loop.busy = True
    loop.run()
    assert timer.times.between < 10**9


def test_the_phases_of_an_engine_sum_to_the_wall_time(make_engine: Callable[..., XlaBatchEngine]) -> None:
    """No nanosecond is lost from the first turn to the end of the last: time outside all phases is between turns."""
    engine, wall, seen = make_engine(TIMED), 0, list[int]()

    def clock() -> int:
        seen.append(time.perf_counter_ns())
        return seen[-1]

    assert engine.phase_timer is not None
    engine.phase_timer._clock = clock
    for number in range(20):
        engine.submit([number + 1] * 20, PARAMS, request_id=str(number))
    while engine.has_work:
        began = time.perf_counter_ns()
        engine.advance()
        wall += time.perf_counter_ns() - began
    phases = engine.stats().phases
    assert phases is not None and phases.turns >= engine.stats().steps > 0
    assert phases.wall + phases.between == seen[-1] - seen[0] and phases.wall <= wall
    assert all(getattr(phases, name) > 0 for name in (*PHASES, "between"))
    assert 'xla_engine_phase_seconds_total{model_name="random",phase="wait"}' in engine.metrics_text()
    assert "wait, ns" in engine.stats()._repr_html_()


def test_timers_outlive_a_failed_step_and_change_no_result(
    make_engine: Callable[..., XlaBatchEngine], tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(TIMED)
    assert engine.identity().digest() == tiny.identity().digest()
    fail_at(monkeypatch, engine, "wait", {4}, RuntimeError("planted"))
    for each in (engine, tiny):
        each.submit([1, 2, 3], PARAMS, request_id="same")
    (timed,), (plain,) = engine.drain(), tiny.drain()
    assert timed.outputs == plain.outputs and engine.stats().recoveries == 1
    assert engine.phase_timer is not None and len(engine.phase_timer._started) <= 2


def test_an_engine_without_timers_has_no_trace_of_them(tiny: XlaBatchEngine) -> None:
    tiny.submit([1], PARAMS)
    tiny.drain()
    assert tiny.stats().phases is None and tiny.phase_timer is None
    assert EngineConfig().options() == EngineConfig(phase_timers=True).options()
    with pytest.raises(ConfigError, match="phase_timers"):
        EngineConfig(phase_timers=1)  # type: ignore[arg-type]


def test_step_logs_and_timelines_tell_where_the_time_went(
    make_engine: Callable[..., XlaBatchEngine], tmp_path: Path
) -> None:
    engine, path = make_engine(TIMED), tmp_path / "steps.jsonl"
    with logging_steps(engine, path):
        for number in range(5):
            engine.submit([number + 1] * 20, PARAMS)
        engine.drain()
    assert engine.phase_timer is not None and engine.phase_timer.on_step is None
    log, phases = read_step_log(path), engine.stats().phases
    assert phases is not None and log.steps and all(step.phases is not None for step in log.steps)
    for index, name in enumerate(PHASES):
        logged = sum(step.phases[index] for step in log.steps if step.phases is not None)
        assert 0.8 * getattr(phases, name) <= logged <= getattr(phases, name), name
    timeline = read_timeline(path)
    assert timeline.phases == tuple(step.phases for step in log.steps)
    for name in ("t.html", "t.json"):
        ran = CliRunner().invoke(main, ["timeline", str(path), "-o", str(tmp_path / name)])
        assert ran.exit_code == 0, ran.output
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum("wait, us" in event["args"] for event in events) == len(log.steps)


def test_a_log_of_before_there_were_timers_is_read(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with logging_steps(tiny, path):
        tiny.submit([1, 2, 3], PARAMS)
        tiny.drain()
    assert "phases" not in path.read_text()
    assert all(step.phases is None for step in read_step_log(path).steps) and read_timeline(path).phases == ()
