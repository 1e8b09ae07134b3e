"""A file through an engine: one output line per input line, whatever the order, the errors and the end."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.batch_lines import HEADER, by_line, interrupt_at, line_of, prompts
from tests.support.fake_engine import FakeEngine
from xla_engine.batch import requests
from xla_engine.batch.dry_run import DryRun
from xla_engine.batch.event_stream import EventStream
from xla_engine.batch.lines import Line, count_lines, read_lines
from xla_engine.batch.run import ORDERED_WINDOW, BatchRun
from xla_engine.batch.totals import RunTotals, summary_lines
from xla_engine.config import EngineConfig, embedded_model_directory
from xla_engine.engine.stats import EngineStats
from xla_engine.errors import EngineClosedError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.utils.progress import Progress

LIMIT = 200  # bytes of a line in these tests


def run(
    data: bytes, engine: FakeEngine | None = None, **options: Any
) -> tuple[list[dict[str, Any]], RunTotals]:
    sink = io.BytesIO()
    lines = read_lines(io.BytesIO(data), LIMIT)
    engine = engine or FakeEngine()
    totals = BatchRun(engine, lines, sink, header=HEADER, **options).run()
    assert len(set(engine.submitted)) == len(engine.submitted)
    return [json.loads(line) for line in sink.getvalue().splitlines()], totals


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n \t\r\n\n", []),
        (b"a", [(1, b"a")]),
        (b"a\nb", [(1, b"a"), (2, b"b")]),
        (b"a\r\n\r\nb\r\n", [(1, b"a"), (3, b"b")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"\xef\xbb\xbf\na\n", [(2, b"a")]),
        (b"12345\n123456\r\n", [(1, b"12345"), (2, None)]),
        (b"12345\r\n12345", [(1, b"12345"), (2, b"12345")]),
        (b"1234567\n1", [(1, None), (2, b"1")]),
        (b"1234567890123", [(1, None)]),
        (b"a\x0cb\x1cc\n", [(1, b"a\x0cb\x1cc")]),
    ],
)
def test_read_lines(data: bytes, lines: list[tuple[int, bytes | None]]) -> None:
    assert [(line.number, line.raw) for line in read_lines(io.BytesIO(data), 5)] == lines


@given(
    st.lists(st.binary(max_size=12).filter(lambda raw: b"\n" not in raw and b"\r" not in raw)), st.booleans()
)
def test_read_lines_agrees_with_split(raws: list[bytes], crlf: bool) -> None:
    data = (b"\r\n" if crlf else b"\n").join(raws)
    expected = [
        (n, raw if len(raw) <= 8 else None) for n, raw in enumerate(raws, 1) if raw.strip() or len(raw) > 8
    ]
    assume(not data.startswith(b"\xef\xbb\xbf"))
    assert [(line.number, line.raw) for line in read_lines(io.BytesIO(data), 8)] == expected
    assert count_lines(io.BytesIO(data), 8) == (len(expected) if data else None)


def test_a_10_mb_line_is_never_held() -> None:
    source = io.BytesIO(b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n{"prompt": "after"}\n')
    tracemalloc.start()
    first, second = read_lines(source, 2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (first.raw, first.size) == (None, 10_000_015)
    assert second == Line(2, 19, b'{"prompt": "after"}')
    assert peak < 4 * 2**20


LINES = {
    "good": b'{"prompt": "text", "max_tokens": 4}',
    "ids": b'{"prompt": [1, 2], "max_tokens": 4}',
    "batch": b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "text"}}',
    "named": b'{"prompt": "text", "custom_id": "same"}',
    "blank": b"  ",
    "broken": b'{"prompt": "te',
    "NaN": b'{"prompt": "text", "temperature": NaN}',
    "bytes": b'{"prompt": "\xff\xfe"}',
    "long": b'{"prompt": "' + b"x" * LIMIT + b'"}',
    "unknown": b'{"prompt": "text", "what": 1}',
    "zero": b'{"prompt": "text", "max_tokens": 0}',
    "empty": b'{"prompt": ""}',
    "chat": b'{"method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}',
    "chat without content": b'{"messages": [{"role": "user"}]}',
    "talk": b'{"messages": [{"role": "user", "content": "te"}, {"role": "user", "content": "xt"}]}',
    "several": b'{"url": "/v1/completions", "body": {"prompt": ["text", [1, 2], "text"]}}',
    "one of several": b'{"url": "/v1/completions", "body": {"prompt": ["text", "not this!", "text"]}}',
    "patient": b'{"prompt": "text", "priority": -1, "deadline_s": 9, "queue_timeout_s": 3.5, "cache_salt": "a"}',
    "bad priority": b'{"url": "/v1/completions", "body": {"prompt": "text", "priority": "high"}}',
    "over": b'{"prompt": "text", "max_tokens": 97}',
    "refused": b'{"prompt": "not this!"}',
}
CODES = {
    "broken": "invalid_json_line",
    "NaN": "invalid_json_line",
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
    monkeypatch.setattr(f"xla_engine.batch.requests.{where}", raising)
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
    assert sink.getvalue() == b"" and (totals.written, totals.unwritten) == (
        0,
        read[0],
    )  # no line before the first


def test_bad_lines_do_not_hold_up_live_requests() -> None:
    bad = (Line(number, 1, b"{") for number in range(2, 1000))
    lines = itertools.chain([Line(1, 15, b'{"prompt": "a"}')], bad)
    sink = io.BytesIO()
    BatchRun(FakeEngine(), lines, sink, header=HEADER).run()
    numbers = [line_of(json.loads(line)) for line in sink.getvalue().splitlines()]
    assert numbers.index(1) < 200


def test_memory_does_not_grow_with_the_file() -> None:
    class Sink(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    def peak(count: int) -> int:
        lines = (Line(number, 15, b'{"prompt": "a"}') for number in range(count))
        tracemalloc.start()
        BatchRun(FakeEngine(max_num_seqs=16), lines, Sink(), header=HEADER).run()  # type: ignore[arg-type]
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    assert peak(8_000) - peak(2_000) < 6_000 * 250  # the hash of each id


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


def test_totals_count_results_and_errors() -> None:
    data = b"\n".join([LINES["good"], LINES["broken"], LINES["ids"], LINES["zero"], LINES["zero"]])
    _, totals = run(data)
    assert (totals.ok, totals.failed) == (2, {"invalid_json_line": 1, "invalid_request": 2})
    assert (totals.prompt_tokens, totals.generated_tokens) == (6, 4)
    assert [error.line for error in totals.first_errors] == [2, 4, 5]
    stats = EngineStats(compiles_warmup=5, cached_tokens=7, prompt_tokens=4)
    text = "\n".join(summary_lines(totals, stats, wall=2.0, cold_start=1.5))
    assert "time to first token  none" not in text
    assert "7 tokens found, 4 computed" in text and "preemptions" not in text
    for part in (
        "5: 2 ok, 3 failed (invalid_json_line 1, invalid_request 2)",
        "6 prompt, 4 generated, 2.0 tok/s",
    ):
        assert part in text
    assert "5 before, 0 after warm-up" in text and "1.50 s from process start" in text


def test_no_latency_without_samples() -> None:
    assert "time to first token  none" in summary_lines(RunTotals(), EngineStats(), wall=1.0, cold_start=None)


class Screen(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self._tty = tty

    def isatty(self) -> bool:
        return self._tty


@pytest.mark.parametrize("total", [40, None])
def test_progress_is_a_bar_on_a_terminal(total: int | None) -> None:
    screen = Screen(tty=True)
    with Progress(total, slots=16, stream=screen) as progress:
        progress.show(done=12, tokens=100, busy=7)
    assert "12/40 requests" in screen.getvalue() if total else "12 requests" in screen.getvalue()
    assert "7/16 slots busy" in screen.getvalue() and "tok/s" in screen.getvalue()


def test_progress_is_a_line_now_and_then_elsewhere() -> None:
    screen, now = Screen(tty=False), [0.0]
    with Progress(40, slots=16, stream=screen, clock=lambda: now[0]) as progress:
        assert not progress.due
        now[0] = 5.0
        assert progress.due
        progress.show(done=12, tokens=100, busy=7)
        assert not progress.due
    assert screen.getvalue() == "12/40 requests, 5 s, 20 tok/s, 7/16 slots busy\n"


def test_progress_can_be_off() -> None:
    with Progress(40, slots=16, stream=None) as progress:
        assert not progress.due
        progress.show(done=40, tokens=100, busy=0)


def test_the_summary_counts_finish_reasons() -> None:
    _, totals = run(prompts(3) + b'{"prompt": "", "max_tokens": 2}\n')
    assert totals.finish_reasons.total() == 3
    text = summary_lines(totals, EngineStats(), wall=1.0, cold_start=None)
    assert any(
        line.startswith("finish reasons") and line.endswith(f"{reason} {count}")
        for line in text
        for reason, count in totals.finish_reasons.items()
    )
