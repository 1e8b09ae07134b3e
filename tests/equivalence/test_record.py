"""Records: what is written can be read, an honest one replays, an altered one is caught where it was altered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.command_line import invoke
from xla_engine import cli
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.equivalence.record import Record, RecordError, Trace
from xla_engine.equivalence.record_file import from_json, read_record, to_json, write_record
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import engine_config, replay
from xla_engine.equivalence.schedule import (
    Action,
    Schedule,
    ScheduleError,
    draw_schedule,
    run_alone,
    run_schedule,
)
from xla_engine.errors import ConfigError, EngineFaultError, InvalidRequestError, RecordMismatchError
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Events, Plan
from xla_engine.structured_outputs import StructuredOutputsParams

Alter = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def honest(shared_tiny: XlaBatchEngine) -> Record:
    """40 requests and their neighbours, lag 1."""
    return recorded(shared_tiny, lag=1)


def recorded(engine: XlaBatchEngine, *, lag: int) -> Record:
    cases = draw_cases(engine, 40, seed=11)
    alone = {case.request_id: run_alone(engine, case) for case in cases}
    _, record = record_schedule(engine, draw_schedule(cases, 11, lag=lag), alone=alone, blank=True)
    return record


def altered(record: Record, alter: Alter) -> Record:
    data = json.loads(to_json(record))
    alter(data)
    return from_json(json.dumps(data).encode())


def test_round_trip(honest: Record, tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", honest)
    assert read_record(tmp_path / "record.json") == honest
    assert to_json(read_record(tmp_path / "record.json")) == to_json(honest)
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
    """The record tells the turns as they were asked for."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    cases = [Case(request_id=name, prompt_token_ids=(5, 6), params=params) for name in ("soon", "late")]
    actions = [
        Action(turn=turn, kind="submit", request_id=case.request_id)
        for turn, case in zip((0, 10**12), cases, strict=True)
    ]
    schedule = Schedule(lag=1, cases=tuple(cases), neighbours=(), actions=tuple(actions))
    results, record = record_schedule(tiny, schedule, blank=True)
    assert results["soon"] == results["late"]
    assert [step.turn for step in record.steps] == [0, 10**12]
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
    with pytest.raises(RecordError, match="ends too early"):
        from_json(raw[: raw.index(b'"steps"')])


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "ends too early"),
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


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_an_honest_record_replays(tiny: XlaBatchEngine, lag: int) -> None:
    """Whatever ran in between: a record does not depend on what came before it."""
    record = recorded(tiny, lag=lag)
    run_alone(tiny, draw_cases(tiny, 1, seed=12)[0])
    report = replay(tiny, record)
    assert report.ok, "\n".join(report.lines())
    assert report.steps == len(record.steps)
    assert report.tokens == sum(len(trace.token_ids) for trace in record.batched.values())
    assert tiny.lag == tiny.config.lag and tiny.on_step is None
    assert replay(tiny, from_json(to_json(record).encode())).ok


def step_of(engine: XlaBatchEngine, record: Record, request_id: str, position: int) -> int:
    """The step that credits a token, from a run of its own."""
    first = engine.snapshot().counters.steps_planned
    seen: list[tuple[str, int]] = []

    def watch(plan: Plan, events: Events | None) -> None:
        seen.extend((event.request_id, plan.step - first) for event in events or ())

    engine.on_step = watch
    run_schedule(engine, record.schedule)
    engine.on_step = None
    return [step for name, step in seen if name == request_id][position]


def longest(record: Record) -> int:
    """Index of the case with the most tokens."""
    return max(range(40), key=lambda index: len(record.batched[f"case-{index}"].token_ids))


@pytest.mark.parametrize("position", [0, 1, -1])
@pytest.mark.parametrize("what", ["token", "bit"])
def test_an_altered_sample_is_caught_at_its_step(
    tiny: XlaBatchEngine, honest: Record, what: str, position: int
) -> None:
    index = longest(honest)
    name = honest.schedule.cases[index].request_id
    position %= len(honest.batched[name].token_ids)

    def alter(data: dict[str, Any]) -> None:
        trace = data["requests"][index]["batched"]
        if what == "token":
            trace["tokens"][position] ^= 1
        else:
            digits = trace["bits"]
            at = 8 * position + 7
            trace["bits"] = f"{digits[:at]}{int(digits[at], 16) ^ 1:x}{digits[at + 1 :]}"

    report = replay(tiny, altered(honest, alter))
    difference = report.difference
    assert difference is not None and not report.ok
    assert (difference.request_id, difference.position) == (name, position)
    assert difference.step == step_of(tiny, honest, name, position) == report.steps
    slots = {(name, slot) for step in honest.steps for name, slot, _ in step.admitted}
    assert (name, difference.slot) in slots
    assert difference.recorded is not None and difference.found is not None
    distance = [a ^ b for a, b in zip(difference.recorded, difference.found, strict=True)]  # type: ignore[operator]
    assert distance == ([1, 0] if what == "token" else [0, 1])
    assert difference.gap is not None and "gap" in difference.gap
    text = "\n".join(report.lines())
    assert name in text and "bits" in text and "NOT the same" in text
    assert replay(tiny, honest).ok, "a replay that stopped early leaves the engine fit for the next"


def find_step(data: dict[str, Any], field: str) -> int:
    """A step well into the record that has the field."""
    return next(index for index, step in enumerate(data["steps"]) if index >= 10 and step.get(field))


def other_slot(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["admit"][0][1] ^= 1


def other_epoch(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["admit"][0][2] += 1


def other_chunk(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["chunks"][0][2] += 16


def fewer_chunks(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["chunks"].pop()


def other_row(data: dict[str, Any], step: int) -> None:
    """A row that the plan had is not in the record of it, nor in those after."""
    slot = data["steps"][step]["join"].pop()
    for later in data["steps"][step + 1 :]:
        if slot in later.get("leave", []):
            later["leave"].remove(slot)
            return


def other_turn(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["turn"] += 1


def other_hash(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["hash"] = "0" * 12


def other_read(data: dict[str, Any], step: int) -> None:
    data["steps"][step]["read"] += 1


@pytest.mark.parametrize(
    ("alter", "field", "kind"),
    [
        (other_slot, "admit", "plan"),
        (other_epoch, "admit", "plan"),
        (other_chunk, "chunks", "plan"),
        (fewer_chunks, "chunks", "plan"),
        (other_row, "join", "plan"),
        (other_turn, "turn", "plan"),
        (other_hash, "hash", "results"),
        (other_read, "read", "results"),
    ],
)
def test_an_altered_step_is_caught_there(
    tiny: XlaBatchEngine, honest: Record, alter: Any, field: str, kind: str
) -> None:
    step = find_step(json.loads(to_json(honest)), field)
    report = replay(tiny, altered(honest, lambda data: alter(data, step)))
    assert report.difference is not None
    assert report.difference.step == step
    assert report.difference.what.startswith(kind)


def test_missing_and_additional_steps_are_caught(tiny: XlaBatchEngine, honest: Record) -> None:
    count = len(honest.steps)
    report = replay(tiny, altered(honest, lambda data: data["steps"].pop()))
    assert report.difference is not None and report.difference.step == count - 1
    again = {"turn": honest.steps[-1].turn + 1, "read": count - 1, "hash": "0" * 12}
    report = replay(tiny, altered(honest, lambda data: data["steps"].append(again)))
    assert report.difference is not None and report.difference.step == count


def test_an_altered_end_is_caught(tiny: XlaBatchEngine, honest: Record) -> None:
    def alter(data: dict[str, Any]) -> None:
        end = data["requests"][3]["batched"]["end"]
        data["requests"][3]["batched"]["end"] = "stop" if end == "length" else "length"

    difference = replay(tiny, altered(honest, alter)).difference
    assert difference is not None and difference.request_id == "case-3"


def put(*path: str, value: Any) -> Alter:
    def alter(data: dict[str, Any]) -> None:
        place = data
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return alter


MISMATCHES = [
    (put("model", "fingerprint", value="other"), "model: other and random"),
    (put("model", "dtype", value="float32"), "dtype: float32 and bfloat16"),
    (put("engine", "max_num_seqs", value=16), "engine option max_num_seqs: 16 and 8"),
    (put("engine", "prefill_lanes", value=[4]), r"engine option prefill_lanes: \[4\] and \[2, 8\]"),
    (put("platform", "jax", value="0.1"), "jax: 0.1 and "),
    (put("platform", "device", value="abacus"), "device: abacus and "),
]


@pytest.mark.parametrize(("alter", "message"), MISMATCHES)
def test_another_engine_is_refused(tiny: XlaBatchEngine, honest: Record, alter: Alter, message: str) -> None:
    record = altered(honest, alter)
    with pytest.raises(RecordMismatchError, match=message):
        replay(tiny, record)
    assert replay(tiny, record, force=True).ok


def test_options_of_another_version_are_refused(honest: Record) -> None:
    config = engine_config(honest)
    assert asdict(config)["prefill_lanes"] == (2, 8)
    newer = altered(honest, put("engine", "warp", value=9))
    with pytest.raises(RecordMismatchError, match="warp: not known to this version"):
        engine_config(newer)
    assert engine_config(newer, force=True) == config
    older = altered(honest, lambda data: data["engine"].pop("chunk_size"))
    with pytest.raises(RecordMismatchError, match="chunk_size: not in the record"):
        engine_config(older)
    for name, value in (("chunk_size", "32"), ("prefill_lanes", 5), ("prefill_lanes", ["a", 1])):
        with pytest.raises((ConfigError, RecordMismatchError)):
            engine_config(altered(honest, put("engine", name, value=value)), force=True)


@pytest.fixture
def loaded(tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The tiny engine whatever is asked for; what was asked for is in the list."""
    asked: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def load(options: dict[str, Any], *, show: bool) -> Iterator[XlaBatchEngine]:
        asked.append(options)
        yield tiny

    monkeypatch.setattr(cli._common, "load_engine", load)
    return asked


def test_verify_records_and_replay_repeats(tmp_path: Path, loaded: list[dict[str, Any]]) -> None:
    path = tmp_path / "record.json"
    result = invoke("verify", "--requests", 24, "--schedules", 2, "--record", path)
    assert result.exit_code == 0, result.output
    record = read_record(path)
    assert len(record.schedule.cases) == 12 and record.schedule.lag == 1, "the last schedule of two"
    result = invoke("replay", path, "--model", "elsewhere")
    assert result.exit_code == 0, result.output
    assert "same plans, same tokens, same logprob bits" in result.output
    assert loaded[-1]["model"] == "elsewhere"
    assert loaded[-1]["max_num_seqs"] == 8 and loaded[-1]["key_buckets"] == (48,)
    assert invoke("replay", path).exit_code == 0 and loaded[-1]["model"] == "random"


def test_replay_exit_statuses(tmp_path: Path, honest: Record, loaded: list[dict[str, Any]]) -> None:
    path = tmp_path / "record.json"
    write_record(path, altered(honest, lambda data: other_hash(data, 5)))
    result = invoke("replay", path)
    assert result.exit_code == 1 and "step 5" in result.output
    write_record(path, altered(honest, put("platform", "jax", value="0.1")))
    result = invoke("replay", path)
    assert result.exit_code == 2 and "record_mismatch" in result.output and "jax: 0.1" in result.output
    assert invoke("replay", path, "--force").exit_code == 0
    path.write_text(to_json(honest)[:5000])
    result = invoke("replay", path)
    assert result.exit_code == 2 and str(path) in result.output and "not JSON" in result.output
    assert invoke("replay", tmp_path / "missing.json").exit_code == 2
    write_record(path, altered(honest, lambda data: data["requests"][0]["prompt"].append(10**6)))
    result = invoke("replay", path)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_record_file_is_refused_before_the_work(tmp_path: Path, loaded: list[dict[str, Any]]) -> None:
    result = invoke("verify", "--record", tmp_path / "no" / "where.json")
    assert result.exit_code == 2
    assert invoke("verify", "--against", "config", "--record", tmp_path / "x").exit_code == 2


def test_a_dead_engine_ends_a_replay_with_an_error(
    make_engine: Callable[..., XlaBatchEngine], honest: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(engine_config(honest))

    def fails(step: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "wait", fails)
    with pytest.raises(EngineFaultError, match="the device is gone"):
        replay(engine, honest)
