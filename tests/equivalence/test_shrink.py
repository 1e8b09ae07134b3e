"""Shrinking: small, still failing, the same every time; and delta debugging as a pure function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.support.command_line import commands_use
from tests.support.faults import (
    FAULTY,
    attend_everything_writes,
    attend_one_key_too_far,
    noise_keyed_by_slot,
    top_k_of_the_batch,
)
from xla_engine import cli
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.record import Record, from_json, read_record, to_json, write_record
from xla_engine.equivalence.replay import replay
from xla_engine.equivalence.shrink import Trials, ddmin, describe, shrink
from xla_engine.equivalence.verify import verify

items = st.integers(0, 24).map(lambda count: tuple(range(count)))


@given(items=items, data=st.data())
def test_ddmin_finds_exactly_what_must_be_there(items: tuple[int, ...], data: st.DataObject) -> None:
    """Failing when all culprits are there: the result is the culprits, in order, whichever they are."""
    culprits = data.draw(st.sets(st.sampled_from(items), max_size=4)) if items else set()
    assert ddmin(items, lambda part: culprits <= set(part)) == tuple(sorted(culprits))


@given(items=items, data=st.data())
def test_ddmin_of_anything_is_minimal(items: tuple[int, ...], data: st.DataObject) -> None:
    """For any predicate: the result fails, no item of it can be left out, and nothing is asked twice over."""
    salt = data.draw(st.integers(0, 2**20))
    asked: list[tuple[int, ...]] = []

    def fails(part: tuple[int, ...]) -> bool:
        asked.append(part)
        return part == items or hash((salt, *part)) % 3 == 0

    found = ddmin(items, fails)
    assert ddmin(items, fails) == found, "deterministic"
    assert found == tuple(item for item in items if item in found), "in order"
    assert fails(found)
    for index in range(len(found)):
        assert not fails(found[:index] + found[index + 1 :])
    assert len(asked) <= 2 * (len(items) ** 2 + 5 * len(items) + 5)


@given(items=items)
def test_ddmin_of_what_always_fails_is_nothing(items: tuple[int, ...]) -> None:
    assert ddmin(items, lambda part: True) == ()


@pytest.fixture
def faulty(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., XlaBatchEngine]
) -> Callable[[str, Any], XlaBatchEngine]:
    """Engines compiled with a fault."""

    def make(target: str, fault: Any) -> XlaBatchEngine:
        monkeypatch.setattr(target, fault)
        return make_engine(replace(FAULTY, self_check=False))

    return make


def failing_record(engine: XlaBatchEngine) -> Record:
    report = verify(engine, requests=35, schedules=1, seed=4, lags=(1,), keep_record=True)
    assert report.divergences
    assert report.record is not None and report.record.first_difference is not None
    return report.record


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("xla_engine.graphs.steps.decode.sample", noise_keyed_by_slot),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (
                ("xla_engine.graphs.attention.xla.XlaAttention.attend_decode", attend_one_key_too_far),
                ("xla_engine.graphs.steps.decode.sample", top_k_of_the_batch),
                ("xla_engine.graphs.attention.xla.XlaAttention.attend_decode", attend_everything_writes),
            )
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_shrinks_to_what_one_can_read(
    faulty: Callable[[str, Any], XlaBatchEngine], target: str, fault: Any
) -> None:
    """35 requests and more become at most 3, and those still fail, by replay and by running them again."""
    engine = faulty(target, fault)
    record = failing_record(engine)
    assert len(record.schedule.cases) + len(record.schedule.neighbours) > 35
    report = shrink(engine, record.schedule)
    small = report.record
    assert small is not None and not report.exhausted and small.fresh
    schedule = small.schedule
    assert 1 <= len(schedule.cases) + len(schedule.neighbours) <= 3
    assert sum(case.params.max_tokens for case in schedule.cases) <= 8
    assert max(action.turn for action in schedule.actions) <= 4
    assert small.first_difference is not None
    assert Trials(engine, 1).fails(schedule)
    assert replay(engine, small).ok, "from a blank cache a fault repeats to the bit"
    assert from_json(to_json(small).encode()) == small
    assert shrink(engine, record.schedule).record == small, "deterministic"
    lines = report.lines()
    assert len(lines) < 25, "\n".join(lines)
    assert any("<- differs" in line for line in lines)
    name, position = small.first_difference
    assert any(f"request {name}" in line and f"generated token {position}" in line for line in lines)


def test_what_does_not_fail_is_not_shrunk(tiny: XlaBatchEngine) -> None:
    good = verify(tiny, requests=20, schedules=1, seed=5, keep_record=True)
    assert good.ok and good.record is not None
    report = shrink(tiny, good.record.schedule)
    assert report.record is None and report.runs == 1
    assert "does not fail here" in report.lines()[0]
    assert describe(good.record)


@pytest.mark.full
def test_a_spent_budget_leaves_a_failing_record(faulty: Callable[[str, Any], XlaBatchEngine]) -> None:
    engine = faulty("xla_engine.graphs.steps.decode.sample", noise_keyed_by_slot)
    record = failing_record(engine)
    sizes = []
    for max_runs in (1, 4, 12, 1000):
        report = shrink(engine, record.schedule, max_runs=max_runs)
        assert report.record is not None and report.record.first_difference is not None
        assert report.runs <= max_runs
        assert report.exhausted == (max_runs < 1000) == ("more --max-runs" in report.lines()[-1])
        sizes.append(len(report.record.schedule.actions))
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0]


@pytest.mark.full
def test_command_line(
    tmp_path: Path,
    tiny: XlaBatchEngine,
    faulty: Callable[[str, Any], XlaBatchEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = faulty("xla_engine.graphs.steps.decode.sample", noise_keyed_by_slot)
    served = [engine]

    commands_use(monkeypatch, lambda _: served[0])
    big, small = tmp_path / "big.json", tmp_path / "small.json"
    verified = CliRunner().invoke(
        cli.main, ["verify", "--requests", "35", "--seed", "4", "--record", str(big)]
    )
    assert verified.exit_code == 1
    assert read_record(big).first_difference is not None
    result = CliRunner().invoke(cli.main, ["shrink", str(big), "-o", str(small)])
    assert result.exit_code == 0, result.output
    assert "after:" in result.output and "<- differs" in result.output
    assert len(read_record(small).schedule.cases) <= 3
    assert CliRunner().invoke(cli.main, ["replay", str(small)]).exit_code == 0

    served[0] = tiny
    refused = CliRunner().invoke(cli.main, ["shrink", str(small), "-o", str(big)])
    assert refused.exit_code == 2 and "record_mismatch" in refused.output
    healthy = CliRunner().invoke(cli.main, ["shrink", str(small), "-o", str(big), "--force"])
    assert healthy.exit_code == 1 and "does not fail here" in healthy.output
    replayed = CliRunner().invoke(cli.main, ["replay", str(small), "--force"])
    assert replayed.exit_code == 1 and "another token" in replayed.output
    write_record(big, read_record(small))
