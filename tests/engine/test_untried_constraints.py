"""A new constraint is compiled in a background thread: its request waits, and no other does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.requests import comparable
from xla_engine import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.observability.observer import Observer
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.text import trials

pytest.importorskip("llguidance")

PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


class Gate:
    """Trials that do not return until the gate is opened. entered: one has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()
        self._real = trials.PROCESS.ask
        monkeypatch.setattr(trials.PROCESS, "ask", self._ask)

    def _ask(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(600)
        return self._real(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def constrained(number: int, **fields: Any) -> SamplingParams:
    """A constraint that no other test has."""
    regex = {"regex": f"a{{1,{number}}}"}
    return SamplingParams(temperature=0, max_tokens=6, structured_outputs=regex, **fields)  # type: ignore[arg-type]


def never(error: Exception) -> None:
    raise AssertionError(f"refused: {error}")


def test_other_rows_go_on_while_a_constraint_is_tried(embedded: XlaBatchEngine, gate: Gate) -> None:
    embedded.submit("x = ", PLAIN, request_id="plain")
    embedded.submit("x = ", constrained(301), request_id="waits", on_refused=never)
    assert gate.entered.wait(600), "it is tried in another thread"
    (view,) = [view for view in embedded.snapshot().waiting if view.request_id == "waits"]
    assert view.decision is not None and "being compiled" in view.decision.reason
    assert embedded.num_waiting == 2 and embedded.has_unfinished
    ended: list[RequestOutput] = []
    while not ended:
        ended = [output for output in embedded.step() if output.finished]
    assert [output.request_id for output in ended] == ["plain"], "its neighbour ran from beginning to end"
    assert embedded.step() == [] and embedded.state.awaits_background and embedded.num_waiting == 1
    gate.opened.set()
    (beside,) = embedded.drain()
    embedded.submit("x = ", constrained(301), request_id="waits")
    (alone,) = embedded.drain()
    assert comparable(beside) == comparable(alone) and set(alone.outputs[0].text) == {"a"}


def test_a_constraint_that_is_none_is_told_in_a_turn_and_leaves_nothing(
    embedded: XlaBatchEngine, gate: Gate
) -> None:
    told: list[Exception] = []
    bad = SamplingParams(max_tokens=4, structured_outputs={"regex": "(unclosed"})  # type: ignore[arg-type]
    before = embedded.stats().finished
    embedded.submit("x", bad, request_id="bad", on_refused=told.append)
    with pytest.raises(InvalidRequestError, match="in use"):
        embedded.submit("x", PLAIN, request_id="bad")
    assert told == []
    gate.opened.set()
    assert embedded.drain() == [] and not embedded.has_unfinished
    assert isinstance(told[0], InvalidRequestError) and "structured_outputs" in str(told[0])
    assert embedded.stats().finished == before and embedded.num_waiting == 0
    embedded.submit("x", PLAIN, request_id="bad")  # the id is free
    assert len(embedded.drain()) == 1
    with pytest.raises(InvalidRequestError, match="structured_outputs"):
        embedded.submit("x", bad, on_refused=never)  # the verdict is known


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_waits_for_its_constraint_can_be_taken_back(
    embedded: XlaBatchEngine, gate: Gate, n: int
) -> None:
    ended: list[str] = []
    observer = Observer(ended=lambda name, reason: ended.append(f"{name} {reason}"))
    with embedded.observers.having(observer):
        params = SamplingParams(n=n, max_tokens=4, structured_outputs={"regex": f"b{{1,{310 + n}}}"})  # type: ignore[arg-type]
        embedded.submit("x", params, request_id="gone", on_refused=never)
        assert embedded.abort("gone") and not embedded.abort("gone")
        (output,) = embedded.step()
        assert output.finished and [each.finish_reason for each in output.outputs] == ["abort"] * n
        assert len(ended) == n and not embedded.has_unfinished
        gate.opened.set()
        assert embedded.step() == []


def test_its_deadlines_count_while_it_waits(
    embedded: XlaBatchEngine, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(embedded, "clock", lambda: now)
    embedded.submit("x", constrained(320), request_id="late", deadline_s=5, on_refused=never)
    embedded.submit("x", constrained(321), request_id="queued", queue_timeout_s=3, on_refused=never)
    embedded.expire()
    assert embedded.num_waiting == 2
    now = 4.0
    embedded.expire()
    now = 6.0
    embedded.expire()
    outputs = {output.request_id: output.outputs[0].finish_reason for output in embedded.step()}
    assert outputs == {"late": "deadline", "queued": "queue_timeout"} and not embedded.has_unfinished


def test_it_ends_with_its_engine(make_engine: Any, gate: Gate) -> None:
    engine = XlaBatchEngine.from_pretrained()
    engine.submit("x", constrained(330), request_id="waits", on_refused=never)
    engine.close()
    (output,) = engine.step()
    assert output.outputs[0].finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        engine.submit("x", constrained(330), on_refused=never)


def test_a_drain_aborts_it_when_the_time_is_over(embedded: XlaBatchEngine, gate: Gate) -> None:
    embedded.submit("x", constrained(340), request_id="waits", on_refused=never)
    (output,) = embedded.drain(0.0)
    assert output.outputs[0].finish_reason == "abort" and "was drained" in str(output.error)


def test_another_threads_turns_go_on_while_a_caller_waits_in_submit(
    embedded: XlaBatchEngine, gate: Gate
) -> None:
    """Without `on_refused` the caller waits, but without holding the engine's lock."""
    caller = threading.Thread(
        target=embedded.submit, args=("x = ", constrained(350)), kwargs={"request_id": "late"}
    )
    caller.start()
    assert gate.entered.wait(600)
    embedded.submit("x = ", PLAIN, request_id="plain")
    (output,) = embedded.drain()
    assert output.request_id == "plain" and caller.is_alive()
    gate.opened.set()
    caller.join(600)
    (output,) = embedded.drain()
    assert output.request_id == "late"


def test_an_event_loop_serves_others_and_raises_where_it_was_asked(
    embedded: XlaBatchEngine, gate: Gate
) -> None:
    async def read(llm: AsyncLLM, params: SamplingParams) -> RequestOutput:
        return [output async for output in llm.generate("x = ", params)][-1]

    async def main() -> None:
        llm = AsyncLLM.from_engine(embedded)
        bad = SamplingParams(max_tokens=4, structured_outputs={"regex": "(open"})  # type: ignore[arg-type]
        waiting = asyncio.create_task(read(llm, constrained(360)))
        refused = asyncio.create_task(read(llm, bad))
        output = await read(llm, PLAIN)
        assert output.finished and not waiting.done() and not refused.done()
        gate.opened.set()
        assert set((await waiting).outputs[0].text) == {"a"}
        with pytest.raises(InvalidRequestError, match="structured_outputs"):
            await refused
        assert not embedded.has_work
        while llm._driver is not None and not llm._driver.done():
            await asyncio.sleep(0)
        llm._waiter.close()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_lines_of_a_run_do_not_wait_for_a_constraint_before_them(tmp_path: Any, gate: Gate) -> None:
    """The line after it gets its result first; the invalid constraint gets its error."""
    import io
    import json

    from xla_engine.batch.lines import read_lines
    from xla_engine.batch.run import BatchRun
    from xla_engine.openai.results import ResultHeader

    lines = [
        {"custom_id": "waits", "prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "c{1,371}"}},
        {"custom_id": "bad", "prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": "(c{1,371}"}},
        {"custom_id": "plain", "prompt": "x", "max_tokens": 4},
    ]
    source = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))

    class Sink(io.BytesIO):
        def write(self, data: Any) -> int:
            gate.opened.set()  # only what does not wait can have opened it
            return super().write(data)

    with XlaBatchEngine.from_pretrained() as engine:
        sink = Sink()
        header = ResultHeader(created=1, model="m", tokenizer=engine.tokenizer)
        totals = BatchRun(engine, read_lines(source), sink, header=header).run()
    records = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert records[0]["custom_id"] == "plain" and totals.ok == 2 and sum(totals.failed.values()) == 1
    errors = {record["custom_id"]: record["error"] for record in records}
    assert errors["waits"] is None and errors["bad"]["code"] == "invalid_request"
