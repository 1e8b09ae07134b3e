"""Run a file through an engine: one output line for each input line, in any order, with errors, or interrupted."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_lines import HEADER, by_line, interrupt_at, line_of, prompts
from tests.support.batch_runs import LINES, run
from tests.support.fake_engine import FakeEngine
from xla_engine.batch.dry_run import DryRun
from xla_engine.batch.lines import Line, read_lines
from xla_engine.batch.run import ORDERED_WINDOW, BatchRun
from xla_engine.batch.stream import EventStream
from xla_engine.config import EngineConfig
from xla_engine.environment import embedded_model_directory
from xla_engine.openai import requests
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

CODES = {
    "broken": "invalid_json_line",
    "Infinity": "invalid_json_line",
    "bytes": "invalid_json_line",
    "long": "line_too_long",
    "unknown": "invalid_request",
    "zero": "invalid_request",
    "empty": "invalid_request",
    "chat": "invalid_request",
    "chat without content": "invalid_request",
    "one of several": "invalid_request",
    "bad priority": "invalid_request",
    "over": "token_limit_exceeded",
    "refused": "invalid_request",
}


@pytest.mark.parametrize("where", ["load_object", "SamplingParams.from_mapping"])
def test_whatever_reading_a_line_raises_is_that_lines_error(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In a run, in a dry run, in a stream."""

    def raising(value: Any, **options: Any) -> Any:
        if b"bad" in (value if isinstance(value, bytes) else json.dumps(value).encode()):
            raise RuntimeError("a fault of ours")
        return usual(value, **options)

    usual = requests.load_object if where == "load_object" else SamplingParams.from_mapping
    monkeypatch.setattr(f"xla_engine.openai.requests.{where}", raising)
    data = (
        b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "y", "seed": "bad"}\n{"prompt": "c", "id": "z"}\n'
    )
    records, totals = run(data)
    assert (totals.ok, totals.failed) == (2, {"engine_error": 1}) and totals.failure is None
    assert "a fault of ours" in by_line(records)[2]["error"]["message"]
    errors: list[Any] = []
    checks = DryRun(embedded_model_directory(), EngineConfig())
    assert checks.run(read_lines(io.BytesIO(data)), on_error=errors.append).ok == 2
    assert [(error.line, error.code) for error in errors] == [(2, "engine_error")]
    sink = io.BytesIO()
    totals = EventStream(FakeEngine(), io.BytesIO(data), sink).run()
    events = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [event["line"] for event in events if event["event"] == "error"] == [2] and totals.ok == 2


@given(
    kinds=st.lists(st.sampled_from(sorted(LINES)), max_size=60),
    slots=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    ordered=st.booleans(),
    end=st.sampled_from([b"", b"\n", b"\r\n"]),
)
@settings(deadline=None)
def test_every_line_gives_exactly_one_line(
    kinds: list[str], slots: int, seed: int, ordered: bool, end: bytes
) -> None:
    engine = FakeEngine(max_num_seqs=slots, seed=seed)
    records, totals = run(b"\n".join(LINES[kind] for kind in kinds) + end, engine, ordered=ordered)
    expected = {number: kind for number, kind in enumerate(kinds, 1) if kind != "blank"}
    numbered = by_line(records)
    assert sorted(numbered) == sorted(expected)
    named = [number for number, kind in expected.items() if kind == "named"]
    for number, kind in expected.items():
        code = "duplicate_custom_id" if kind == "named" and number != named[0] else CODES.get(kind)
        record = numbered[number]
        assert record["custom_id"] == ("same" if kind == "named" else f"line-{number}")
        if code is None:
            assert record["error"] is None
            body = record["response"]["body"]
            texts = [
                choice.get("text", choice.get("message", {}).get("content")) for choice in body["choices"]
            ]
            wanted = {"ids": ["<(1, 2)>"], "talk": ["<te|xt>"], "several": ["<text>", "<(1, 2)>", "<text>"]}
            assert texts == wanted.get(kind, ["<text>"])
            assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
            assert body["object"] == ("chat.completion" if kind == "talk" else "text_completion")
        else:
            assert record["response"] is None
            assert (record["error"]["code"], record["error"]["line"]) == (code, number)
    if ordered:
        assert [line_of(record) for record in records] == sorted(expected)
    assert totals.done == len(expected) and totals.unwritten == 0
    several = sum("several" in kind for kind in kinds)
    assert engine.peak <= 2 * slots + 2 * several and not engine.live
    assert len(engine.aborted) == kinds.count("one of several")  # its first prompt was in the engine already


def test_two_ordered_runs_are_equal_byte_for_byte() -> None:
    def output(seed: int) -> bytes:
        sink = io.BytesIO()
        engine = FakeEngine(seed=seed)
        BatchRun(engine, read_lines(io.BytesIO(prompts(50))), sink, header=HEADER, ordered=True).run()
        return sink.getvalue()

    assert output(1) == output(2)


def test_a_name_made_of_a_line_number_can_be_taken() -> None:
    records, totals = run(b'{"prompt": "a", "custom_id": "line-2"}\n{"prompt": "b"}\n')
    assert by_line(records)[2]["error"]["code"] == "duplicate_custom_id" and totals.ok == 1


def test_an_id_used_by_a_bad_line_is_used() -> None:
    records, _ = run(b'{"prompt": "", "custom_id": "a"}\n{"prompt": "b", "custom_id": "a"}\n')
    assert [by_line(records)[number]["error"]["code"] for number in (1, 2)] == [
        "invalid_request",
        "duplicate_custom_id",
    ]
    assert "line 1" in by_line(records)[2]["error"]["message"]


def test_defaults_reach_lines_that_are_silent() -> None:
    records, _ = run(b'{"prompt": "a"}\n{"prompt": "b", "max_tokens": 9}\n', defaults={"max_tokens": 200})
    assert [by_line(records)[n]["error"] is None for n in (1, 2)] == [False, True]


def counted(lines: Iterator[Line], counter: list[int]) -> Iterator[Line]:
    for line in lines:
        counter[0] += 1
        yield line


def endless(raw: bytes) -> Iterator[Line]:
    return (Line(number, len(raw), raw) for number in itertools.count(1))


def test_lines_are_read_as_slots_need_them() -> None:
    engine, read = FakeEngine(max_num_seqs=3, on_step=interrupt_at(20)), [0]
    sink = io.BytesIO()
    batch = BatchRun(engine, counted(endless(b'{"prompt": "a"}'), read), sink, header=HEADER)
    totals = batch.run()
    assert totals.interrupted and read[0] <= totals.done + 6


def test_ordered_output_holds_a_bounded_number_of_results() -> None:
    class HeadLast(FakeEngine):
        """Never ends the first request."""

        def step(self, *, only_finished: bool = False) -> list[RequestOutput]:
            head = self.live.pop("batch-1")
            outputs = super().step(only_finished=only_finished)
            self.live = {"batch-1": head, **self.live}
            return outputs

    engine, read = HeadLast(max_num_seqs=3, on_step=interrupt_at(2000)), [0]
    sink = io.BytesIO()
    lines = counted(endless(b'{"prompt": "a"}'), read)
    totals = BatchRun(engine, lines, sink, header=HEADER, ordered=True).run()
    assert read[0] == ORDERED_WINDOW * 6
    # no line before the first
    assert sink.getvalue() == b"" and (totals.written, totals.unwritten) == (0, read[0])


def test_bad_lines_do_not_hold_up_live_requests() -> None:
    bad = (Line(number, 1, b"{") for number in range(2, 1000))
    lines = itertools.chain([Line(1, 15, b'{"prompt": "a"}')], bad)
    sink = io.BytesIO()
    BatchRun(FakeEngine(), lines, sink, header=HEADER).run()
    numbers = [line_of(json.loads(line)) for line in sink.getvalue().splitlines()]
    assert numbers.index(1) < 200


@pytest.mark.full
def test_memory_does_not_grow_with_the_file() -> None:
    class Sink(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    def peak(count: int) -> int:
        engine = FakeEngine(max_num_seqs=16, on_step=lambda _: engine.params.clear())
        lines = (Line(number, 15, b'{"prompt": "a"}') for number in range(count))
        tracemalloc.start()
        totals = BatchRun(engine, lines, Sink(), header=HEADER).run()  # type: ignore[arg-type]
        assert totals.written == count and totals.failure is None
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(8_000) - peak(2_000) < 6_000 * 250  # the hash of each id
