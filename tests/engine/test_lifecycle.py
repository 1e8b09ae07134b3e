"""Cancellation, deadlines, priorities and streams: every request ends once, on time, and disturbs no other."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.support.models import BOTH_LANES, TINY_ENGINE
from tests.support.tiers import default
from xla_engine import LLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.turn import answer_turn
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.outputs import RequestOutput

SLOTS = TINY_ENGINE.max_num_seqs
CHUNK = TINY_ENGINE.chunk_size
LONG = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


class Clock:
    """The engine's clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tiny, "clock", clock)
    return clock


def reasons(outputs: list[RequestOutput]) -> dict[str, str | None]:
    assert len({output.request_id for output in outputs}) == len(outputs)
    return {output.request_id: output.outputs[0].finish_reason for output in outputs}


def held(engine: XlaBatchEngine) -> set[str]:
    return {view.request.request_id for view in engine.snapshot().slots if view.request is not None}


# -- cancel ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", default([1, 0, 2]))
@pytest.mark.parametrize("state", ["queued", "prefilling", "running", "all planned", "finished", "unknown"])
def test_abort_in_every_state_frees_the_slot_and_gives_one_result(
    tiny: XlaBatchEngine, state: str, lag: int
) -> None:
    """Other requests keep their bits, the slot is free for the next plan, and a second abort does nothing."""
    tiny.lag = lag
    neighbours = {str(n): [n + 1] * 5 for n in range(SLOTS - 1)}
    expected = {name: _alone(tiny, prompt) for name, prompt in neighbours.items()}
    for name, prompt in neighbours.items():
        tiny.submit(prompt, LONG, request_id=name)
    outputs: list[RequestOutput] = []
    if state == "queued":
        tiny.submit([9], LONG, request_id="filler")
        tiny.submit([7] * 5, LONG, request_id="x")
        outputs += tiny.step()
        assert [view.request_id for view in tiny.snapshot().waiting] == ["x"]
    elif state == "prefilling":
        tiny.submit([7] * (BOTH_LANES.prefill_lanes[-1] * CHUNK + 100), LONG, request_id="x")
        outputs += tiny.step()
        (view,) = [v.request for v in tiny.snapshot().slots if v.request and v.request.request_id == "x"]
        assert view is not None and view.status == "prefilling" and view.prefilled > 0
    elif state in ("running", "all planned"):
        tiny.submit([7] * 5, replace(LONG, max_tokens=8 if state == "running" else 2), request_id="x")
        outputs += tiny.step()  # its first token
        outputs += tiny.step()
        assert ("x" in held(tiny)) == (state == "running")
    elif state == "finished":
        tiny.submit([7] * 5, replace(LONG, max_tokens=1), request_id="x")
        while not any(o.request_id == "x" and o.finished for o in outputs):
            outputs += tiny.step()
    over = any(o.request_id == "x" and o.finished for o in outputs)
    was_live = state not in ("finished", "unknown") and not over
    assert tiny.abort("x") == was_live and not tiny.abort("x")
    assert "x" not in held(tiny) and "x" not in {view.request_id for view in tiny.snapshot().waiting}
    tiny.submit([8], replace(LONG, max_tokens=1), request_id="next")
    outputs += tiny.step()
    outputs += tiny.drain()
    finished = reasons([output for output in outputs if output.finished])
    assert finished.pop("x", None) == ("abort" if was_live else None if state == "unknown" else "length")
    assert finished.pop("next") == "length"
    for output in outputs:
        if output.finished and output.request_id in expected:
            assert output.outputs[0].token_ids == expected[output.request_id]


def _alone(engine: XlaBatchEngine, prompt: list[int], params: SamplingParams = LONG) -> tuple[int, ...]:
    engine.submit(prompt, params)
    (output,) = engine.drain()
    return output.outputs[0].token_ids


# -- deadlines ---------------------------------------------------------------------------------------------


def test_a_deadline_keeps_what_there_is_and_changes_no_neighbour(tiny: XlaBatchEngine, clock: Clock) -> None:
    expected = _alone(tiny, [5, 6])
    tiny.submit([5, 6], LONG, request_id="late", deadline_s=10)
    tiny.submit([5, 6], LONG, request_id="other", deadline_s=1000)
    outputs: list[RequestOutput] = []
    while not outputs or len(outputs[-1].outputs[0].token_ids) < 5:
        outputs = tiny.step()
    clock.now += 10
    ended = [output for output in tiny.step() if output.finished]
    assert reasons(ended) == {"late": "deadline"}
    found = ended[0].outputs[0]
    assert 5 <= len(found.token_ids) < 30 and found.token_ids == expected[: len(found.token_ids)]
    assert held(tiny) == {"other"}
    (other,) = tiny.drain()
    assert other.outputs[0].token_ids == expected and other.outputs[0].finish_reason == "length"


def test_a_queue_timeout_counts_for_those_who_wait_only(tiny: XlaBatchEngine, clock: Clock) -> None:
    for number in range(SLOTS):
        tiny.submit([number + 1], LONG, request_id=str(number), queue_timeout_s=5)
    tiny.submit([1], LONG, request_id="waits", queue_timeout_s=5)
    tiny.submit([1], LONG, request_id="patient", queue_timeout_s=50)
    tiny.step()
    calls = tiny.stats().prompt_tokens
    clock.now += 5
    ended = [output for output in tiny.step() if output.finished]
    assert reasons(ended) == {"waits": "queue_timeout"} and ended[0].outputs[0].token_ids == ()
    assert tiny.stats().prompt_tokens == calls  # it cost the device nothing
    assert set(reasons(tiny.drain()).values()) == {"length"}


@pytest.mark.parametrize(
    "fields",
    [
        {"deadline_s": 0},
        {"deadline_s": -1.0},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"deadline_s": "5"},
        {"queue_timeout_s": True},
        {"queue_timeout_s": 10**400},
        {"priority": 11},
        {"priority": -11},
        {"priority": 1.5},
        {"priority": True},
    ],
)
def test_what_is_no_time_or_no_priority_is_refused_by_name(
    tiny: XlaBatchEngine, fields: dict[str, Any]
) -> None:
    (name,) = fields
    with pytest.raises(InvalidRequestError, match=f"{name} must be"):
        tiny.submit([1], LONG, **fields)
    assert not tiny.has_unfinished


# -- priority ----------------------------------------------------------------------------------------------


def test_priority_decides_who_is_admitted_and_no_token(tiny: XlaBatchEngine) -> None:
    expected = {str(n): _alone(tiny, [n + 1, 3]) for n in range(3 * SLOTS)}
    for number, priority in enumerate(itertools.islice(itertools.cycle((5, 0, -5)), 3 * SLOTS)):
        tiny.submit([number + 1, 3], LONG, request_id=str(number), priority=priority)
    outputs = tiny.drain()
    assert {output.request_id: output.outputs[0].token_ids for output in outputs} == expected
    order = [output.request_id for output in sorted(outputs, key=lambda o: o.metrics.admitted_time)]  # type: ignore[union-attr,arg-type,return-value]
    urgent = [str(number) for number in range(3 * SLOTS) if number % 3 == 2]
    assert set(order[:SLOTS]) == set(urgent)


# -- streams -----------------------------------------------------------------------------------------------


def test_a_stream_submits_when_it_is_read_and_cancels_when_it_is_dropped(tiny: XlaBatchEngine) -> None:
    llm = LLM.from_engine(tiny)
    never_read = llm.stream([[1, 2]], LONG)
    assert not tiny.has_work
    del never_read
    stream = llm.stream([[1, 2], [3, 4]], LONG)
    assert not next(stream).finished
    assert tiny.num_running == 2
    del stream
    gc.collect()
    assert tiny.num_running == 0
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
        next(llm.stream([[1], []], LONG))
    assert tiny.num_running + tiny.num_waiting == 0


def test_streams_read_in_turns_lose_nothing(tiny: XlaBatchEngine) -> None:
    """Each stream has one end and all of its own tokens; requests that were submitted otherwise are unaffected."""
    expected = {number: _alone(tiny, [number, 1]) for number in range(1, 5)}
    tiny.submit([9, 9], LONG, request_id="by hand")
    llm = LLM.from_engine(tiny)
    streams = {number: llm.stream([[number, 1]], LONG) for number in range(1, 5)}
    last: dict[int, RequestOutput] = {}
    finished: dict[int, int] = dict.fromkeys(streams, 0)
    while streams:
        for number, pace in zip(list(streams), (1, 2, 5, 1), strict=False):
            for _ in range(pace):
                output = next(streams[number], None)
                if output is None:
                    del streams[number]
                    break
                last[number] = output
                finished[number] += output.finished
    assert finished == dict.fromkeys(finished, 1)
    assert {number: output.outputs[0].token_ids for number, output in last.items()} == expected
    outputs = [output for output in tiny.drain() if output.finished]
    assert reasons(outputs) == {"by hand": "length"}


def test_unread_news_merge(tiny: XlaBatchEngine) -> None:
    """A collector holds one entry per request, however late it is read; then everything is there."""
    calls: list[int] = []
    collector = OutputCollector(on_news=lambda: calls.append(1))
    expected = _alone(tiny, [1, 2])
    tiny.submit([1, 2], LONG, request_id="slow", collector=collector)
    tiny.submit([1, 2], LONG, request_id="other")
    assert reasons(tiny.drain()) == {"other": "length"}
    assert len(calls) == 1
    (request,) = collector.take()
    assert request.output().outputs[0].token_ids == expected and request.output().finished
    assert not collector and collector.take() == []


def test_text_deltas_are_never_taken_back(embedded: XlaBatchEngine) -> None:
    llm, shown = LLM.from_engine(embedded), ""
    params = SamplingParams(temperature=0, max_tokens=40, stop=["return", "self.x", "\n\n\n"])
    for output in llm.stream("def area(width, height):\n", params):
        assert output.outputs[0].text.startswith(shown)
        shown = output.outputs[0].text
    assert "return" not in shown


# -- the end of the engine ---------------------------------------------------------------------------------


def test_close_keeps_what_was_not_read(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine()
    collector = OutputCollector()
    engine.submit([1], replace(LONG, max_tokens=1), request_id="done")
    engine.submit([2], LONG, request_id="running")
    engine.submit([3], LONG, request_id="streamed", collector=collector)
    engine.advance()
    engine.advance()
    engine.close()
    assert engine.has_unfinished
    assert reasons([o for o in engine.step() if o.finished]) == {"done": "length", "running": "abort"}
    assert [request.output().outputs[0].finish_reason for request in collector.take()] == ["abort"]
    assert not engine.has_unfinished and engine.drain() == []
    with pytest.raises(EngineClosedError, match=r"close\(\) was called"):
        engine.step()


def test_two_drivers_at_once_are_refused(tiny: XlaBatchEngine) -> None:
    tiny.submit([1], LONG, request_id="x")
    tiny.lag = 0
    wait = next(turn := tiny.turn(), None)
    assert wait is not None
    with pytest.raises(RuntimeError, match="two callers run this engine"):
        tiny.step()
    tiny.submit([2], LONG, request_id="y")  # between start and read of a step
    assert tiny.abort("x")
    answer_turn(turn, wait.call())
    assert reasons([o for o in tiny.drain() if o.finished]) == {"x": "abort", "y": "length"}


# -- introspection -----------------------------------------------------------------------------------------


def test_snapshot_and_stats_touch_no_device(tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(SLOTS + 3):
        tiny.submit([number + 1] * 3, LONG, request_id=str(number), priority=-number % 3, deadline_s=100)
    tiny.step()
    with monkeypatch.context() as patch:
        for name in ("state", "weights", "inventory", "dispatch"):
            patch.delattr(tiny.runner, name)
        snapshot, stats = tiny.snapshot(), tiny.stats()
    views = [
        *(view.request for view in snapshot.slots if view.request),
        *snapshot.waiting,
        *snapshot.draining,
    ]
    assert len(views) == SLOTS + 3 and all(
        view.decision is not None and view.decision.reason for view in views
    )
    places = [view.arrival + view.priority * tiny.config.priority_aging for view in snapshot.waiting]
    assert places == sorted(places)
    assert asdict(stats)["steps"] > 0 and asdict(snapshot)["counters"]["submitted"] >= SLOTS + 3


def test_a_drain_finishes_what_it_can_and_takes_nothing(tiny: XlaBatchEngine) -> None:
    """Time advances with each step. The request that still runs says why it ended; new requests are refused."""
    ticks = iter(range(10**6))
    refused: list[Exception] = []

    def late() -> None:
        try:
            tiny.submit([1])
        except EngineClosedError as error:
            refused.append(error)

    tiny.submit([1, 2], SamplingParams(max_tokens=200, ignore_eos=True), request_id="long")
    short = SamplingParams(max_tokens=2, ignore_eos=True)
    tiny.submit([1, 2], short, request_id="short")
    tiny.submit([1, 2], short, request_id="read", collector=OutputCollector(on_news=late))
    tiny.clock = lambda: next(ticks)
    try:
        found = {output.request_id: output for output in tiny.drain(timeout_s=60)}
    finally:
        tiny.clock = time.monotonic
    assert found["short"].outputs[0].finish_reason == "length" and found["short"].error is None
    assert found["long"].outputs[0].finish_reason == "abort" and "within 60 s" in str(found["long"].error)
    assert found["long"].outputs[0].token_ids and "accepts no more requests" in str(refused[0])
    assert not tiny.has_unfinished


def test_ids_that_are_made_pass_over_those_that_callers_gave(tiny: XlaBatchEngine) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    number = tiny.state.table.submitted
    names = {tiny.submit([1], params, request_id=str(number + count)) for count in (1, 2, 4)}
    names |= {tiny.submit([1], params) for _ in range(3)}
    names.add(tiny.submit([1], replace(params, n=2)))
    assert len(names) == 7 and {output.request_id for output in tiny.drain()} == names


def test_a_forked_process_is_told_that_it_has_no_engine(
    make_engine: Callable[..., XlaBatchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.submit([1, 2], SamplingParams(max_tokens=2))
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        for use in (lambda: engine.submit([1]), engine.step, engine.drain):
            with pytest.raises(EngineClosedError, match="forked from it"):
                use()
        engine.close()  # leaves the parent's memory alone
    (output,) = engine.drain()
    assert output.outputs[0].finish_reason in ("length", "stop")
