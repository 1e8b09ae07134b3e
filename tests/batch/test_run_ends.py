"""How a run ends: interrupts, dead engines, broken inputs and outputs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.batch_lines import HEADER, by_line, interrupt_at, line_of, prompts
from tests.support.batch_runs import run
from tests.support.fake_engine import FakeEngine
from xla_engine.batch.lines import Line, read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.errors import EngineClosedError
from xla_engine.outputs import RequestOutput


@pytest.mark.parametrize("ordered", [False, True])
def test_a_hard_stop_keeps_what_is_written_and_aborts_the_rest(ordered: bool) -> None:
    engine = FakeEngine(on_step=interrupt_at(5))
    records, totals = run(prompts(100), engine, ordered=ordered)
    assert totals.interrupted and totals.written == len(records) > 0
    assert not engine.live and len(engine.aborted) > 0
    assert {f"batch-{line_of(record)}" for record in records}.isdisjoint(engine.aborted)
    assert len(engine.submitted) == totals.written + totals.unwritten
    if ordered:
        assert [line_of(record) for record in records] == list(range(1, len(records) + 1))


@pytest.mark.parametrize("ordered", [False, True])
def test_the_first_interrupt_finishes_what_is_under_way(ordered: bool) -> None:
    def on_step(step: int) -> None:
        if step == 5:
            batch.interrupt()

    engine, sink = FakeEngine(on_step=on_step), io.BytesIO()
    batch = BatchRun(engine, read_lines(io.BytesIO(prompts(100))), sink, header=HEADER, ordered=ordered)
    totals = batch.run()
    assert batch.draining and totals.interrupted and not engine.aborted and not engine.live
    assert 0 < len(engine.submitted) == totals.ok == totals.written < 100 and totals.unwritten == 0
    assert len(sink.getvalue().splitlines()) == totals.ok


def test_the_second_interrupt_stops_at_once() -> None:
    def on_step(step: int) -> None:
        if step in (5, 6):
            batch.interrupt()

    engine = FakeEngine(on_step=on_step)
    batch = BatchRun(engine, read_lines(io.BytesIO(prompts(100))), io.BytesIO(), header=HEADER)
    totals = batch.run()
    assert totals.interrupted and totals.unwritten == len(engine.aborted) > 0 and not engine.live


def test_an_interrupt_after_the_last_line_was_read_loses_nothing() -> None:
    def on_step(step: int) -> None:
        if step == 1:
            assert next(lines, None) is None
            batch.interrupt()

    lines = read_lines(io.BytesIO(prompts(3)))
    engine = FakeEngine(max_num_seqs=4, on_step=on_step)
    batch = BatchRun(engine, lines, io.BytesIO(), header=HEADER)
    totals = batch.run()
    assert totals.ok == 3 and not totals.interrupted


def test_ctrl_c_while_reading() -> None:
    def lines() -> Iterator[Line]:
        yield from read_lines(io.BytesIO(prompts(4)))
        raise KeyboardInterrupt

    engine, sink = FakeEngine(), io.BytesIO()
    totals = BatchRun(engine, lines(), sink, header=HEADER).run()
    assert totals.interrupted and (totals.ok, totals.unwritten) == (4, 0) and not engine.live


def test_a_dead_engine_ends_the_run_with_an_error_line_for_each_request_it_held() -> None:
    def die(step: int) -> None:
        if step == 4:
            raise RuntimeError("device lost")

    engine = FakeEngine(on_step=die)
    records, totals = run(prompts(100), engine)
    failed = [record["error"] for record in records if record["error"]]
    assert {error["code"] for error in failed} == {"engine_error"} and "device lost" in failed[0]["message"]
    assert isinstance(totals.failure, RuntimeError)
    assert len(records) == len(engine.submitted) == totals.done < 100
    by_line(records)


def test_an_engine_that_closes_between_steps_ends_the_run() -> None:
    class Closes(FakeEngine):
        def submit(self, *arguments: Any, **options: Any) -> str:
            if len(self.submitted) == 10:
                raise EngineClosedError("closed")
            return super().submit(*arguments, **options)

    records, totals = run(prompts(100), Closes())
    assert isinstance(totals.failure, EngineClosedError) and len(by_line(records)) == 11


def test_an_engine_that_forgets_a_request_is_found_out() -> None:
    class Forgets(FakeEngine):
        def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
            self.live.pop("batch-3", None)
            return super().step(only_finished=only_finished)

    records, totals = run(prompts(5), Forgets())
    assert (
        by_line(records)[3]["error"]["code"] == "engine_error"
        and totals.ok == 4
        and totals.failure is not None
    )


def test_a_request_that_breaks_submit_harms_no_other() -> None:
    class Breaks(FakeEngine):
        def submit(self, prompt: Any, *arguments: Any, **options: Any) -> str:
            if prompt == "p2":
                raise ZeroDivisionError("bug")
            return super().submit(prompt, *arguments, **options)

    records, totals = run(prompts(5), Breaks())
    assert (
        by_line(records)[2]["error"]["code"] == "engine_error" and totals.ok == 4 and totals.failure is None
    )


def test_an_input_that_cannot_be_read_on_finishes_what_was_read() -> None:
    def lines() -> Iterator[Line]:
        yield from read_lines(io.BytesIO(prompts(4)))
        raise OSError(5, "Input/output error")

    sink = io.BytesIO()
    totals = BatchRun(FakeEngine(), lines(), sink, header=HEADER).run()
    assert totals.ok == 4 and isinstance(totals.failure, OSError)


def test_an_output_that_cannot_be_written_aborts_and_raises() -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() > 1000:
                raise OSError(28, "No space left on device")
            return super().write(data)

    engine = FakeEngine()
    with pytest.raises(OSError, match="No space"):
        BatchRun(engine, read_lines(io.BytesIO(prompts(100))), Full(), header=HEADER).run()
    assert engine.aborted and not engine.live
