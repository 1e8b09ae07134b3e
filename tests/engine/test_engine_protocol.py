"""What every engine promises its callers, checked for the real engine and for the fake one of other tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.models import TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.open_engine import EngineClient
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(params=["real", "fake"])
def engine(request: pytest.FixtureRequest) -> EngineClient:
    return request.getfixturevalue("tiny") if request.param == "real" else FakeEngine()


def submit(engine: EngineClient, count: int, **options: OutputCollector) -> list[str]:
    return [
        engine.submit([n + 1, 7], PARAMS, request_id=f"r{n}", collector=options.get("collector"))
        for n in range(count)
    ]


def ends(outputs: list[RequestOutput]) -> dict[str, str | None]:
    """Finish reasons by request; checks that each request has ended once."""
    finished = [output for output in outputs if output.finished]
    assert len({output.request_id for output in finished}) == len(finished)
    return {output.request_id: output.outputs[0].finish_reason for output in finished}


def test_every_request_ends_once_and_tokens_only_grow(engine: EngineClient) -> None:
    names, outputs = submit(engine, 3 * engine.max_num_seqs), []
    seen = dict.fromkeys(names, 0)
    while engine.has_unfinished:
        assert engine.num_running <= engine.max_num_seqs
        for output in engine.step():
            assert len(output.outputs[0].token_ids) >= seen[output.request_id]
            seen[output.request_id] = len(output.outputs[0].token_ids)
            assert output.finished == (output.outputs[0].finish_reason is not None)
            outputs.append(output)
    assert ends(outputs) == dict.fromkeys(names, "length")
    assert not all(output.finished for output in outputs), "some were read while they ran"
    assert engine.num_running == engine.num_waiting == 0 and engine.step() == []


def test_drain_returns_every_end_and_nothing_else(engine: EngineClient) -> None:
    names = submit(engine, 5)
    outputs = engine.drain()
    assert len(outputs) == 5 and ends(outputs) == dict.fromkeys(names, "length")
    assert not engine.has_unfinished and engine.drain() == []


def test_only_finished_leaves_out_those_that_run(engine: EngineClient) -> None:
    names, outputs = submit(engine, 5), []
    while engine.has_unfinished:
        outputs += engine.step(only_finished=True)
    assert len(outputs) == 5 and set(ends(outputs)) == set(names)


def test_an_aborted_request_has_one_end_that_is_still_to_be_read(engine: EngineClient) -> None:
    submit(engine, 2)
    engine.step()
    assert engine.abort("r0") and not engine.abort("r0") and not engine.abort("unknown")
    engine.abort("r1")
    assert engine.num_running == engine.num_waiting == 0 and engine.has_unfinished
    assert ends(engine.step()).get("r0") == "abort" and not engine.has_unfinished


def test_an_id_is_free_again_once_its_request_has_ended(engine: EngineClient) -> None:
    submit(engine, 1)
    with pytest.raises(InvalidRequestError, match="r0"):
        submit(engine, 1)
    assert len(engine.drain()) == 1
    submit(engine, 1)
    assert len(engine.drain()) == 1


def test_ids_that_were_not_given_are_made(engine: EngineClient) -> None:
    names = {engine.submit([1], PARAMS), engine.submit([1], PARAMS)}
    assert len(names) == 2 and set(ends(engine.drain())) == names


def test_a_bad_request_raises_and_leaves_nothing(engine: EngineClient) -> None:
    with pytest.raises(TokenLimitError):
        engine.submit([1] * 301, PARAMS)
    with pytest.raises(InvalidRequestError):
        engine.submit([1], PARAMS, priority="high")  # type: ignore[arg-type]
    assert engine.num_running + engine.num_waiting == 0 and not engine.has_unfinished


def test_a_collector_has_its_own_requests_and_no_others(engine: EngineClient) -> None:
    news = []
    every, only_ends = OutputCollector(on_news=lambda: news.append(1)), OutputCollector(every_token=False)
    for name, collector in (("every", every), ("ends", only_ends), ("none", None)):
        engine.submit([1, 2], PARAMS, request_id=name, collector=collector)
    while engine.num_running + engine.num_waiting:
        engine.advance()
        assert all(request.finished for request in only_ends.take())
    assert ends(engine.step()) == {"none": "length"} and not engine.has_unfinished
    (request,) = every.take()
    assert news == [1] and request.request_id == "every" and request.finished
    assert request.output().outputs[0].finish_reason == "length"
    assert not every and every.take() == []


def test_a_snapshot_has_every_live_request_once(engine: EngineClient) -> None:
    names = submit(engine, engine.max_num_seqs + 4)
    engine.step()
    snapshot = engine.snapshot()
    held = [view.request for view in snapshot.slots if view.request is not None]
    assert len(snapshot.slots) == engine.max_num_seqs and 0 < len(held) <= engine.num_running
    live = [view.request_id for view in (*held, *snapshot.waiting, *snapshot.draining)]
    assert len(set(live)) == len(live) == engine.num_running + engine.num_waiting
    assert set(live) <= set(names)
    engine.drain()


def test_a_snapshot_tells_how_old_requests_are(engine: EngineClient) -> None:
    submit(engine, engine.max_num_seqs + 2)
    engine.step()
    snapshot = engine.snapshot()
    views = [*(slot.request for slot in snapshot.slots), *snapshot.waiting, *snapshot.draining]
    for view in views:
        if view is not None:
            assert view.times is not None and view.times.age >= view.times.queued >= 0
            assert view.times.first_token is None or view.times.first_token <= view.times.age
    engine.drain()


def test_a_peek_names_who_comes_next_and_why_the_others_wait(engine: EngineClient) -> None:
    names = submit(engine, engine.max_num_seqs + 2)
    before = engine.snapshot()
    peek = engine.peek()
    again = engine.snapshot()
    assert [view.request_id for view in again.waiting] == [view.request_id for view in before.waiting]
    assert again.counters == before.counters and engine.peek().plan == peek.plan
    assert list(peek.plan.admitted) == names[: engine.max_num_seqs]
    late = names[engine.max_num_seqs :]
    assert set(peek.why_not) >= set(late) and all(peek.why_not[name] for name in late)
    assert "<td>" in peek._repr_html_()
    engine.step()
    assert {view.request_id for view in engine.snapshot().waiting} <= set(late)
    engine.drain()
    assert engine.peek().plan.admitted == () and engine.peek().why_not == {}


def test_metrics_are_text_with_what_the_stats_say(engine: EngineClient) -> None:
    submit(engine, 3)
    engine.drain()
    lines = engine.metrics_text().splitlines()
    (steps,) = [line for line in lines if line.startswith("xla_engine_steps_total{")]
    assert float(steps.split()[-1]) == engine.stats().steps > 0


def test_stats_count_what_ended(engine: EngineClient) -> None:
    before = engine.stats()
    submit(engine, 3)
    engine.abort("r1")
    engine.drain()
    after = engine.stats()
    assert after.steps > before.steps and after.generation_tokens > before.generation_tokens
    ended = {reason: after.finished[reason] - before.finished[reason] for reason in after.finished}
    assert {reason: count for reason, count in ended.items() if count} == {"length": 2, "abort": 1}


def test_an_identity_is_that_of_the_engine(engine: EngineClient) -> None:
    assert engine.identity() == engine.identity() and len(engine.identity().digest()) == 16


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_a_request_that_has_ended_goes_on_under_its_id(
    kind: str, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    engine: EngineClient = (
        make_engine(replace(TINY_ENGINE, keep_finished=4)) if kind == "real" else FakeEngine()
    )
    names = submit(engine, 2)
    with pytest.raises(InvalidRequestError):
        engine.extend("r0", 4)  # it is live
    first = {output.request_id: output for output in engine.drain()}
    collector = OutputCollector(every_token=False)
    engine.extend("r0", 4, collector=collector)
    engine.extend("r1", 4)
    with pytest.raises(InvalidRequestError):
        engine.extend("r0", 4)
    with pytest.raises(InvalidRequestError, match="r0"):
        submit(engine, 1)
    (drained,) = engine.drain()
    (own,) = collector.take()
    second = {output.request_id: output for output in (drained, own.output())}
    assert sorted(second) == names and ends(list(second.values())) == dict.fromkeys(names, "length")
    for name in names:
        before, after = first[name].outputs[0], second[name].outputs[0]
        assert len(after.token_ids) > len(before.token_ids)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert first[name].outputs[0].finish_reason is not None
    for bad in ("r0", 0), ("r0", True), ("r0", 1000), ("unknown", 1):
        with pytest.raises(InvalidRequestError):
            engine.extend(*bad)
    assert engine.num_running + engine.num_waiting == 0 and not engine.has_unfinished
    engine.extend("r0", 4)
    assert engine.abort("r0") and ends(engine.drain()) == {"r0": "abort"}
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.extend("r1", 1)


@pytest.mark.parametrize("kind", ["real", "fake"])
def test_a_closed_engine_has_told_every_reader_and_takes_no_more(
    kind: str, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    engine: EngineClient = make_engine() if kind == "real" else FakeEngine()
    collector = OutputCollector()
    names = submit(engine, 3)
    engine.submit([1], PARAMS, request_id="own", collector=collector)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit([1], PARAMS)
    assert ends(engine.drain()) == dict.fromkeys(names, "abort")
    assert [request.output().outputs[0].finish_reason for request in collector.take()] == ["abort"]
    with pytest.raises(EngineClosedError):
        engine.step()


def test_a_drain_ends_what_is_not_finished_in_time(engine: EngineClient) -> None:
    names = submit(engine, 3 * engine.max_num_seqs)
    outputs = engine.drain(timeout_s=0)
    assert ends(outputs) == dict.fromkeys(names, "abort")
    assert engine.num_running == engine.num_waiting == 0 and not engine.has_unfinished
    submit(engine, 1)  # and goes on afterwards
    assert ends(engine.drain()) == {"r0": "length"}
