"""Runs whose rows sample several tokens a step: logged, drawn, simulated step for step, recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.models import TINY_ENGINE, tiny_checkpoint
from tests.support.simulation import COST
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.speculation.proposer import Recorded
from xla_engine.engine.speculation.suffix import SuffixProposer
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import from_json, to_json
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import engine_config, replay
from xla_engine.equivalence.schedule import draw_schedule, run_alone
from xla_engine.observability.step_log import StepLog, read_step_log
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.simulator.compare import compare
from xla_engine.tools.timeline import Timeline
from xla_engine.tools.timeline.model import of_record, of_step_log
from xla_engine.tools.timeline.write import page_data, trace_events

LAGS = [pytest.param(0, marks=pytest.mark.release), 1, pytest.param(2, marks=pytest.mark.release)]
CONFIG = replace(
    TINY_ENGINE,
    prefill_lanes=(2,),
    enable_prefix_caching=False,
    speculative_config={"method": "suffix", "num_speculative_tokens": 3},
)


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, marks=pytest.mark.release), pytest.param(24, marks=pytest.mark.full)],
    ids=["slots", "blocks"],
)
def engine(request: pytest.FixtureRequest) -> Iterator[XlaBatchEngine]:
    config = replace(CONFIG, block_size=32, num_blocks=request.param)
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        if not engine.runner.has_one_row_code:
            pytest.skip("speculation needs the C++ operations")
        yield engine


def logged(engine: XlaBatchEngine, path: Path, seed: int) -> StepLog:
    """Requests of all kinds a few turns apart; some stop early, some are aborted, some lose their slots."""
    cases = [
        replace(case, params=replace(case.params, n=1))
        for case in draw_cases(engine, 16, seed=seed, max_new_tokens=40, every_field=True)
    ]
    engine.draft_with(SuffixProposer())
    with logging_steps(engine, path):
        for at, case in enumerate(cases):
            engine.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
            for _ in range(at % 4):
                engine.step()
            if at % 5 == 4:
                engine.abort(cases[at - 2].request_id)
        engine.drain()
    return read_step_log(path)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.full
def test_the_simulated_schedule_is_the_real_one(engine: XlaBatchEngine, lag: int, tmp_path: Path) -> None:
    engine.lag = lag
    log = logged(engine, tmp_path / "steps.jsonl", seed=lag)
    assert any(tokens > 1 for step in log.steps for tokens, _ in step.verified)
    assert any(tokens <= drafts for step in log.steps for tokens, drafts in step.verified)
    found = compare(log, COST)
    assert found.first_difference is None, f"of {found.steps} steps, {found.first_difference} differs"
    tokens = sum(each.tokens for each in log.requests)
    assert found.measured.new_tokens == found.predicted.new_tokens >= tokens


def test_a_timeline_shows_accepted_and_rejected_drafts(engine: XlaBatchEngine, tmp_path: Path) -> None:
    engine.lag = 1
    before = engine.stats()
    timeline = of_step_log(logged(engine, tmp_path / "steps.jsonl", seed=1))
    after = engine.stats()
    accepted = sum(part.accepted for part in timeline.drafts)
    rejected = sum(part.rejected for part in timeline.drafts)
    assert accepted == after.accepted_tokens - before.accepted_tokens > 0
    assert rejected == after.drafted_tokens - before.drafted_tokens - accepted > 0
    check_drafts_lie_in_their_segments(timeline)
    events = trace_events(timeline)["traceEvents"]
    assert sum(event["args"].get("accepted drafts", 0) for event in events) == accepted
    assert page_data(timeline)["drafts"] == timeline.drafts


def check_drafts_lie_in_their_segments(timeline: Timeline) -> None:
    """A step may end a prompt and check drafts of its row at once."""
    inside = {
        (segment.lane, step)
        for segment in timeline.segments
        if segment.kind in ("verify", "prefill")
        for step in range(segment.first, segment.last + 1)
    }
    assert {(part.lane, part.step) for part in timeline.drafts} <= inside


@pytest.mark.parametrize("lag", LAGS)
def test_a_record_is_replayed_step_for_step(engine: XlaBatchEngine, lag: int) -> None:
    """Whoever guessed: the drafts of a record are right and wrong again where they were."""
    cases = draw_cases(engine, 12, seed=lag, max_new_tokens=40)
    alone = {case.request_id: run_alone(engine, case) for case in cases}
    schedule = draw_schedule(cases, lag, lag=lag, preempts=("park", "replay"))
    outputs: dict[str, Sequence[int]] = dict.fromkeys((case.request_id for case in schedule.neighbours), ())
    outputs |= {name: output.token_ids for name, output in alone.items()}
    engine.draft_with(Recorded(outputs, 0.6))
    _, record = record_schedule(engine, schedule, alone=alone, blank=True)
    assert record.first_difference is None
    assert any(tokens > 1 for step in record.steps for tokens, _ in step.verified)
    record = from_json(to_json(record).encode())
    assert record.speculative_config == {"method": "suffix", "num_speculative_tokens": 3}
    assert engine_config(record).speculation == engine.config.speculation
    check_drafts_lie_in_their_segments(of_record(record))
    engine.draft_with(SuffixProposer())
    accepted = engine.stats().accepted_tokens
    report = replay(engine, record)
    assert report.ok, report.lines()
    again = engine.stats().accepted_tokens - accepted
    assert again == sum(min(max(t - 1, 0), d) for step in record.steps for t, d in step.verified)
    assert engine.speculator is not None and engine.speculator.replay is None


@pytest.mark.release
def test_chosen_widths_are_replayed_and_simulated(tmp_path: Path) -> None:
    """A replay uses the recorded widths, even if this run's measured costs would choose others."""
    config = replace(CONFIG, speculative_config={"method": "suffix"})
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        for seed in range(3):
            log = logged(engine, tmp_path / f"{seed}.jsonl", seed=seed)
            assert compare(log, COST).first_difference is None
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        cases = [replace(case, params=params) for case in draw_cases(engine, 6, seed=1)]
        schedule = draw_schedule(cases, 1, lag=1)
        _, record = record_schedule(engine, schedule, blank=True)
        report = replay(engine, record)
        assert report.ok, report.lines()
