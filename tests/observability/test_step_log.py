"""Step logs of real runs, and the timelines drawn from them."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from click.testing import CliRunner

from xla_engine import SamplingParams
from xla_engine.cli import main
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import write_record
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.schedule import draw_schedule
from xla_engine.errors import ConfigError, RecordError
from xla_engine.observability.step_log import Moment, StepLog, read_step_log
from xla_engine.observability.step_log_writer import SHORTEST, _Prefixes, logging_steps
from xla_engine.scheduler import Scheduler
from xla_engine.tools.simulator.trace import of_step_log as arrivals_of
from xla_engine.tools.timeline import Timeline, read_timeline, write_timeline
from xla_engine.tools.timeline.model import Segment, of_step_log
from xla_engine.tools.timeline.write import trace_events


@pytest.fixture
def log_path(tiny: XlaBatchEngine, tmp_path: Path) -> Path:
    """Twenty requests over eight slots, one aborted while it waits and one by a stop id."""
    path = tmp_path / "steps.jsonl"
    tiny.reset_prefix_cache()
    with logging_steps(tiny, path):
        for index in range(20):
            params = SamplingParams(temperature=0, max_tokens=1 + index % 7 * 5, ignore_eos=True)
            tiny.submit(list(range(index, index + 1 + index * 13 % 90)), params, request_id=f"r{index}")
        tiny.step()
        tiny.abort("r19")
        tiny.submit(
            [1, 2, 3], SamplingParams(temperature=0, stop_token_ids=list(range(8)), seed=1), request_id="s"
        )
        tiny.drain()
    return path


def test_log_holds_every_request_step_and_token(tiny: XlaBatchEngine, log_path: Path) -> None:
    before = tiny.stats()
    assert not tiny.observers
    log = read_step_log(log_path)
    assert [each.name for each in log.requests] == [*(f"r{index}" for index in range(20)), "s"]
    assert log.requests[19].end == "abort" and log.requests[19].taken_back == (1, 0, 0)
    assert log.requests[20].came == (1, 0, 1)
    for index, each in enumerate(log.requests[:19]):
        assert (each.end, each.tokens) == ("length", each.max_tokens), each.name
        written = sum(
            length for step in log.steps for request, _, _, length, _ in step.chunks if request == index
        )
        assert written == each.prompt_tokens
    assert all(step.read is not None and step.read >= step.started for step in log.steps)
    assert [step.started for step in log.steps] == sorted(step.started for step in log.steps)
    assert log.scheduler["max_num_seqs"] == tiny.max_num_seqs and log.engine["lag"] == tiny.lag
    assert before.finished["abort"] >= 1


def test_log_that_was_cut_off_is_read_to_its_last_whole_line(log_path: Path) -> None:
    whole = read_step_log(log_path)
    raw = log_path.read_bytes()
    log_path.write_bytes(raw[: len(raw) // 2])
    half = read_step_log(log_path)
    assert 0 < len(half.steps) < len(whole.steps)
    assert [step.decode for step in half.steps] == [step.decode for step in whole.steps[: len(half.steps)]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"step":3', '"step":4', 1),
        lambda text: text.replace('"submit":["r0"', '"submit":[["r0"]', 1),
        lambda text: text.replace('"version":1', '"version":9', 1),
        lambda text: text.replace('"at"', '"when"', 1),
        lambda text: text.replace('"join":[', '"leave":[', 1),
        lambda text: text.replace('"submit":', '"custom_id":1,"submit":', 1),
    ],
)
def test_damaged_log_is_refused_with_its_name(log_path: Path, damage: object) -> None:
    assert callable(damage)
    log_path.write_text(damage(log_path.read_text()))
    with pytest.raises(RecordError, match=r"steps\.jsonl"):
        read_step_log(log_path)


def drawn(timeline: Timeline) -> dict[tuple[int, int], tuple[str, int]]:
    """(lane, step) -> (kind, request); fails where two segments overlap."""
    cells: dict[tuple[int, int], tuple[str, int]] = {}
    for lane, first, last, kind, request in timeline.segments:
        for step in range(first, last + 1):
            assert (lane, step) not in cells, f"two segments at {lane}, {step}"
            cells[lane, step] = kind, request
    return cells


def check_cells(timeline: Timeline, log: StepLog) -> None:
    cells = drawn(timeline)
    for number, step in enumerate(log.steps):
        prefill = {slot: request for request, slot, *_ in step.chunks}
        for slot in range(timeline.slots):
            kind, request = cells.get((slot, number), ("idle", -1))
            if slot in prefill:
                assert (kind, request) in (("prefill", prefill[slot]), ("cached", prefill[slot]))
            else:
                assert (kind == "decode") == (slot in step.decode), (slot, number)
    busy = [len({*(slot for _, slot, *_ in step.chunks), *step.decode}) for step in log.steps]
    assert list(timeline.busy) == busy


def test_timeline_shows_each_slot_doing_what_the_plans_say(log_path: Path) -> None:
    timeline, log = read_timeline(log_path), read_step_log(log_path)
    check_cells(timeline, log)
    decoded = Counter(request for kind, request in drawn(timeline).values() if kind == "decode")
    joined = {
        request: slot in step.decode
        for step in log.steps
        for request, slot, _, _, is_last in step.chunks
        if is_last
    }
    for index, each in enumerate(log.requests[:19]):
        # One decode step a token; the first comes with the last chunk, and with it, where rows decode, the second.
        assert decoded[index] == max(each.max_tokens - 1 - joined[index], 0), each
    assert timeline.waiting[0] == 20 - timeline.slots
    assert timeline.waiting[-1] == 0


def test_parked_and_cached_are_drawn(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    """Twelve requests with a common beginning share eight slots."""
    usual = tiny.scheduler
    options = {"scheduling_policy": "round_robin", "quantum": 4, "preemption": False}
    tiny.scheduler = Scheduler(replace(usual.config, **options))
    with logging_steps(tiny, tmp_path / "turns.jsonl"):
        for index in range(12):
            params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
            tiny.submit([*range(1, 81), index], params, request_id=f"r{index}")
            tiny.step()
        tiny.drain()
    tiny.scheduler = usual
    tiny.reset_prefix_cache()
    log, timeline = read_step_log(tmp_path / "turns.jsonl"), read_timeline(tmp_path / "turns.jsonl")
    check_cells(timeline, log)
    cells = drawn(timeline)
    for number, step in enumerate(log.steps):
        for request, slot, _, length in step.reuses:
            assert length >= 64 and cells[slot, number] == ("cached", request)
    kinds = Counter(segment.kind for segment in timeline.segments)
    assert kinds["cached"] == sum(len(step.reuses) for step in log.steps) > 0
    assert kinds["parked"] == sum(len(step.parks) for step in log.steps) > 0
    assert timeline.lanes > timeline.slots
    for lane, first, last, kind, request in timeline.segments:
        assert (kind == "parked") == (lane >= timeline.slots)
        if kind == "parked":
            assert request in [name for name, *_ in log.steps[first].parks]
            assert request in [name for name, *_ in log.steps[last + 1].resumes]
    # Had one ended by the token that was on its way when it was parked, it would be parked no longer.
    lane, first, last, _, request = next(
        each for each in timeline.segments if each.kind == "parked" and each.last > each.first
    )
    log.requests[request].over = Moment(first + 1, first)
    assert Segment(lane, first, first, "parked", request) in of_step_log(log).segments
    write_timeline(timeline, tmp_path / "t.html")


def test_record_of_verify_is_drawn_too(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    ways = tiny.ways_to_preempt
    schedule = draw_schedule(draw_cases(tiny, 30, seed=3, max_new_tokens=20), seed=4, lag=1, preempts=ways)
    assert {action.kind for action in schedule.actions} == {"submit", "abort", *ways}
    _, record = record_schedule(tiny, schedule)
    write_record(tmp_path / "record.json", record)
    timeline = read_timeline(tmp_path / "record.json")
    assert timeline.steps == len(record.steps) and timeline.times is None
    assert min(timeline.waiting) >= 0
    cells = drawn(timeline)
    for number, step in enumerate(record.steps):
        for name, slot, *_ in step.chunks:
            kind, request = cells[slot, number]
            assert (kind, timeline.requests[request].name) == ("prefill", name)
    parked = [segment for segment in timeline.segments if segment.kind == "parked"]
    assert parked and timeline.lanes > timeline.slots
    for lane, first, last, _, request in parked:  # it was asked for, and the request has a slot again
        name = timeline.requests[request].name
        turns = [
            action.turn for action in schedule.actions if (action.kind, action.request_id) == ("park", name)
        ]
        assert any(turn <= record.steps[first].turn for turn in turns) and lane >= timeline.slots
        assert name in [name for name, *_ in record.steps[last + 1].admitted]
    assert json.dumps(trace_events(timeline))


def test_requests_bear_the_callers_names(tiny: XlaBatchEngine, tmp_path: Path) -> None:
    path, names = tmp_path / "steps.jsonl", {"batch-1": "mine", "batch-2[0]": "two", "batch-2[1]": "two"}
    with logging_steps(tiny, path, names=names.get):
        for index, n in enumerate((1, 2, 1), 1):
            tiny.submit([index], SamplingParams(max_tokens=2, n=n), request_id=f"batch-{index}")
        tiny.drain()
    log, timeline = read_step_log(path), read_timeline(path)
    assert [each.custom_id for each in log.requests] == ["mine", "two", "two", None]
    assert [each.custom_id for each in arrivals_of(log, by_time=False)] == ["mine", "two", "two", None]
    assert [each.name for each in timeline.requests] == ["mine", "two[0]", "two[1]", "batch-3"]
    write_timeline(timeline, tmp_path / "t.html")
    assert '"mine"' in (tmp_path / "t.html").read_text()


def test_pages_figures_and_traces_are_written(log_path: Path, tmp_path: Path) -> None:
    names = ["t.html", "t.json"]
    try:
        import matplotlib
    except ImportError:
        matplotlib = None
    if matplotlib is not None:
        names.append("t.png")
    for name in names:
        ran = CliRunner().invoke(main, ["timeline", str(log_path), "-o", str(tmp_path / name)])
        assert ran.exit_code == 0, ran.output
    page = (tmp_path / "t.html").read_text()
    assert "http:" not in page and "https:" not in page, "the page must load nothing"
    timeline = read_timeline(log_path)
    inside = page.split('type="application/json">')[1].split("</script>")[0]
    assert len(json.loads(inside)["segments"]) == len(timeline.segments)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(timeline.segments) + timeline.steps
    keys = {
        "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
        "C": {"name", "ph", "ts", "pid", "args"},
        "M": {"name", "ph", "pid", "tid", "args"},
    }
    assert all(set(event) == keys[event["ph"]] and event["pid"] == 1 for event in events)
    tracks: dict[int, float] = {}
    for span in sorted(spans, key=lambda span: span["ts"]):
        assert span["dur"] >= 0 and span["ts"] >= tracks.get(span["tid"], 0.0) - 0.002, span
        tracks[span["tid"]] = span["ts"] + span["dur"]
    assert sorted(tracks) == [*range(1, timeline.lanes + 2)]
    if matplotlib is not None:
        assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_hostile_names_stay_data(log_path: Path, tmp_path: Path) -> None:
    log_path.write_text(log_path.read_text().replace('"r0"', '"</script><script>alert(1)//"'))
    write_timeline(read_timeline(log_path), tmp_path / "t.html")
    assert "<script>alert" not in (tmp_path / "t.html").read_text()


def test_unknown_ending_names_those_there_are(log_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.html, \.json"):
        write_timeline(read_timeline(log_path), tmp_path / "t.bmp")


def test_what_any_two_prompts_have_in_common_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a simulated slot holds less of a prompt than the real one, and another is reused."""
    draw, prefixes = random.Random(2), _Prefixes()
    prompts: list[list[int]] = [[]]
    # made of tokens that stand for where a prompt parted from all others
    told: list[list[tuple[int, int]]] = [[]]
    for number in range(1, 300):
        stem = draw.choice(prompts)[: draw.choice((0, 15, 16, 17, 40, 90))]
        prompts.append(stem + [draw.randrange(3) for _ in range(draw.randint(1, 40))])
        other, same = prefixes.add(number, prompts[-1]) or (0, 0)
        told.append(told[other][:same] + [(number, at) for at in range(same, len(prompts[-1]))])

    def common(one: list[object], two: list[object]) -> int:
        pairs = enumerate(zip(one, two, strict=False))
        return next((at for at, (a, b) in pairs if a != b), min(len(one), len(two)))

    for one, two in combinations(range(1, 300), 2):
        real = common([*prompts[one]], [*prompts[two]])
        assert common([*told[one]], [*told[two]]) == (
            real if real >= SHORTEST or prompts[one] == prompts[two] else 0
        )
    monkeypatch.setattr("xla_engine.observability.step_log_writer.REMEMBERED", 100)
    for number in range(50):
        prefixes.add(number, [number] * 20)
    assert len(prefixes._sorted) == len(prefixes._by_age) == 5 and prefixes._tokens == 100
    assert prefixes.add(51, [44] * 20) is None and prefixes.add(52, [49] * 20) == (49, 20)
