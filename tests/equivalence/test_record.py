"""Records: written files can be read, damaged and foreign ones are refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.profiles import examples
from tests.support.record_edits import altered, put
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.record import (
    Record,
    Trace,
    from_json,
    read_record,
    to_json,
    write_record,
)
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import engine_config, replay
from xla_engine.equivalence.schedule import Action, Schedule, ScheduleError
from xla_engine.errors import InvalidRequestError, RecordError
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams


def test_round_trip(honest: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", honest)
    assert read_record(tmp_path / "record.json") == honest
    assert to_json(read_record(tmp_path / "record.json")) == to_json(honest)
    portable = replace(honest.identity, platform={"arithmetic": "portable-1"}, made_on={"jax": "1"})
    assert from_json(to_json(replace(honest, identity=portable)).encode()).identity == portable
    assert len(to_json(honest)) < 100_000
    assert len(honest.schedule.cases) == 40 and honest.schedule.neighbours
    assert any(action.kind == "abort" for action in honest.schedule.actions)


def test_limits_a_hand_edited_record_breaks_are_told(
    make_engine: Callable[..., XlaBatchEngine], tiny: XlaBatchEngine, honest: Record
) -> None:
    """The queue, the context, the vocabulary: the message names the request, and the engine is idle again."""
    short_queue = altered(honest, put("engine", "max_waiting", value=1))
    engine = make_engine(engine_config(short_queue))
    with pytest.raises(ScheduleError, match=r"refuses request \S+ in turn \d+: .*max_waiting is 1"):
        replay(engine, short_queue)
    assert not engine.has_unfinished and engine.lag == engine.config.lag
    for token_ids, message in (([5] * 400, "max_model_len"), ([10**6], "vocabulary")):
        with pytest.raises(ScheduleError, match=message):
            replay(tiny, altered(honest, put("requests", 3, "prompt", value=token_ids)))
        assert replay(tiny, honest).ok


def test_turns_in_which_nothing_happens_are_passed_over(tiny: XlaBatchEngine) -> None:
    """The record contains the turns as they were requested."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    cases = [Case(request_id=name, prompt_token_ids=(5, 6), params=params) for name in ("soon", "late")]
    actions = [
        Action(turn=turn, kind="submit", request_id=case.request_id)
        for turn, case in zip((0, 10**12), cases, strict=True)
    ]
    schedule = Schedule(lag=1, cases=tuple(cases), neighbours=(), actions=tuple(actions))
    results, record = record_schedule(tiny, schedule, blank=True)
    assert results["soon"] == results["late"]
    assert [step.turn for step in record.steps] == [0, 1, 10**12, 10**12 + 1]
    assert replay(tiny, record).ok


def test_a_record_holds_all_that_ran(honest: Record) -> None:
    assert honest.first_difference is None and len(honest.alone) == 40
    assert sum(len(step.chunks) for step in honest.steps) >= 40
    assert {name for step in honest.steps for name, _, _ in step.admitted} >= set(honest.alone)
    assert max(epoch for step in honest.steps for _, _, epoch in step.admitted) > 2, "slots are used again"
    assert all(step.read is not None and step.hash for step in honest.steps)


def test_requests_without_logprobs_round_trip(tiny: XlaBatchEngine) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    case = Case(request_id="plain", prompt_token_ids=(5, 6), params=params)
    actions = (Action(turn=0, kind="submit", request_id="plain"),)
    schedule = Schedule(lag=1, cases=(case,), neighbours=(), actions=actions)
    _, record = record_schedule(tiny, schedule)
    assert record.batched["plain"].bits is None and not record.fresh
    assert from_json(to_json(record).encode()) == record
    assert replay(tiny, record).ok


def test_every_sampling_field_round_trips(embedded: XlaBatchEngine) -> None:
    params = SamplingParams(
        max_tokens=6,
        seed=1,
        logit_bias={300: 2.5},
        bad_words=["the"],
        repetition_penalty=1.2,
        logprobs=2,
        structured_outputs=StructuredOutputsParams(regex="[a-z ]+"),
    )
    case = Case(request_id="all", prompt_token_ids=(5, 6), params=params)
    actions = (Action(turn=0, kind="submit", request_id="all"),)
    schedule = Schedule(lag=1, cases=(case,), neighbours=(), actions=actions)
    _, record = record_schedule(embedded, schedule)
    assert from_json(to_json(record).encode()) == record
    assert replay(embedded, record).ok
    many = replace(case, params=SamplingParams(n=2))
    with pytest.raises(InvalidRequestError, match="use n 1"):
        record_schedule(embedded, replace(schedule, cases=(many,)))


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [
        (((1, 2), (7, 8), "stop"), ((1, 2), (7, 8), "stop"), None),
        (((1, 2), (7, 8), "stop"), ((1, 3), (7, 8), "stop"), 1),
        (((1, 2), (7, 8), "stop"), ((1, 2), (7, 9), "stop"), 1),
        (((1, 2), (7, 8), "length"), ((1, 2), (7, 8), "stop"), 2),
        (((1, 2), (7, 8), "length"), ((1,), (7,), "stop"), 1),
        (((1, 2), (7, 8), "length"), ((1,), (7,), "abort"), None),
        (((1, 2), (7, 8), "length"), ((3,), (7,), "abort"), 0),
        (((1, 2), None, "length"), ((1, 2), None, "length"), None),
    ],
)
def test_first_difference_of_two_traces(a: Any, b: Any, position: int | None) -> None:
    left, right = (Trace(token_ids=ids, bits=bits, end=end) for ids, bits, end in (a, b))
    assert left.first_difference(right) == right.first_difference(left) == position


def test_every_truncation_is_a_record_error(honest: Record) -> None:
    raw = to_json(honest).encode()
    for length in {*range(0, len(raw) - 2, 211), *range(60)}:
        with pytest.raises(RecordError):
            from_json(raw[:length])
    with pytest.raises(RecordError, match="the file is truncated"):
        from_json(raw[: raw.index(b'"steps"')])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the file is truncated"),
        (b"[]", "not a record"),
        (b'{"a": 1}', "not a record"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"format": "xla-engine record", "version": 2}', "format version 2; .* reads 1"),
        (b'{"format": "xla-engine record"}', "format version None"),
        (b'{"format": "xla-engine record", "version": 1}', "damaged record: no 'model'"),
    ],
)
def test_foreign_files_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_json(raw)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.full
@settings(
    max_examples=examples(80, 300),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_a_damaged_record_is_read_or_refused(honest: Record, data: st.DataObject) -> None:
    """Any value in any place: a record or a RecordError, never another exception."""
    record = json.loads(to_json(honest))
    place: Any = record
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON)
    with contextlib.suppress(RecordError):
        assert isinstance(from_json(json.dumps(record).encode()), Record)
