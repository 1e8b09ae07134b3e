"""Requests over one pair of pipes: the events of each id are complete and in order, for every reader and input."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_engine import FakeEngine
from xla_engine.batch.stream import EventStream
from xla_engine.batch.totals import RunTotals
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

Event = dict[str, Any]
HOT: dict[str, Any] = {"temperature": 3.0, "ignore_eos": True}  # bytes of half characters come, too


def serve(engine: Any, *lines: Any, **options: Any) -> tuple[list[Event], RunTotals]:
    source = b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
    )
    sink = io.BytesIO()
    totals = EventStream(engine, io.BytesIO(source), sink, **options).run()
    events = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [event.pop("seq") for event in events] == list(range(len(events)))
    return events, totals


def by_id(events: list[Event]) -> dict[str, list[Event]]:
    """Events of each id; checks that each ends once, and last."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["event"] in ("delta", "finish", "error"):
            found[event["id"]].append(event)
    for own in found.values():
        assert [event["event"] for event in own[:-1]] == ["delta"] * (len(own) - 1)
        assert own[-1]["event"] in ("finish", "error")
    return found


def text_of(events: list[Event]) -> str:
    return "".join(event["text"] for event in events[:-1])


def tokens_of(events: list[Event]) -> list[int]:
    return [token_id for event in events[:-1] for token_id in event["token_ids"]]


def test_many_requests_are_told_apart_and_are_what_they_are_alone(embedded: XlaBatchEngine) -> None:
    requests = [
        {"id": f"r{n}", "prompt": f"def f{n}(", "seed": n, "max_tokens": 5 + n, "logprobs": 0, **HOT}
        for n in range(24)
    ]
    events, totals = serve(embedded, *requests)
    assert events[-1] == {"event": "end", "requests": 24, "interrupted": False} and totals.ok == 24
    found = by_id(events)
    order = [event["id"] for event in events if event["event"] == "delta"]
    assert any(order[n] != order[n + 1] and order[n] in order[n + 2 :] for n in range(len(order) - 2))
    for request in requests:
        name, prompt = request.pop("id"), request.pop("prompt")
        embedded.submit(prompt, SamplingParams.from_mapping(request))
        (alone,) = embedded.drain()
        (choice,) = alone.outputs
        own = found[str(name)]
        assert tokens_of(own) == list(choice.token_ids) and text_of(own) == choice.text
        assert [value for event in own[:-1] for value in event["logprobs"]] == list(choice.logprobs or ())
        assert own[-1]["finish_reasons"] == ["length"]
        assert own[-1]["usage"]["completion_tokens"] == len(choice.token_ids)


def test_a_character_of_several_tokens_comes_whole(embedded: XlaBatchEngine) -> None:
    assert embedded.tokenizer is not None
    requests = [{"id": f"r{n}", "prompt": "é", "seed": n, "max_tokens": 60, **HOT} for n in range(16)]
    events, _ = serve(embedded, *requests)
    held = 0
    for own in by_id(events).values():
        assert text_of(own) == embedded.tokenizer.decode(tokens_of(own))
        held += sum(not event["text"] for event in own[:-1])
    assert held > 0  # a token that is part of a character has no text of its own


def test_the_same_line_gets_the_same_noise_as_in_a_batch_file(embedded: XlaBatchEngine) -> None:
    events, _ = serve(embedded, {"prompt": "import ", "max_tokens": 8})
    embedded.submit("import ", SamplingParams(max_tokens=8), request_id="batch-1")
    (alone,) = embedded.drain()
    assert tokens_of(by_id(events)["line-1"]) == list(alone.outputs[0].token_ids)


def test_n_sequences_are_told_apart_by_index(embedded: XlaBatchEngine) -> None:
    request = {"id": "a", "prompt": "def f(", "seed": 3, "max_tokens": 6, "n": 3, **HOT}
    events, totals = serve(embedded, request, {"op": "list"})
    (listed,) = (event["requests"] for event in events if event["event"] == "list")
    assert [entry["id"] for entry in listed] == ["a"] * 3 and totals.ok == 1
    own = by_id(events)["a"]
    assert own[-1]["finish_reasons"] == ["length"] * 3 and own[-1]["usage"]["completion_tokens"] == 18
    embedded.submit("def f(", SamplingParams(seed=3, max_tokens=6, n=3, **HOT))
    (alone,) = embedded.drain()
    for choice in alone.outputs:
        deltas = [event for event in own[:-1] if event["index"] == choice.index]
        assert "".join(event["text"] for event in deltas) == choice.text
        assert tuple(i for event in deltas for i in event["token_ids"]) == choice.token_ids


def test_cancel_and_list(embedded: XlaBatchEngine) -> None:
    long = {"prompt": "def f(", "max_tokens": 400, **HOT}
    events, _ = serve(
        embedded,
        *({"op": "submit", "id": f"r{n}", **long} for n in range(20)),  # more than there are slots
        {"op": "list"},
        *({"op": "cancel", "id": f"r{n}"} for n in range(20)),
        {"op": "cancel", "id": "r3"},
        {"op": "cancel", "id": "unknown"},
        {"id": "after", "prompt": "x", "max_tokens": 2},
    )
    (listed,) = (event["requests"] for event in events if event["event"] == "list")
    assert {request["id"] for request in listed} == {f"r{n}" for n in range(20)}
    assert all(request["status"] and request["prompt_tokens"] for request in listed)
    slots = [request["slot"] for request in listed if request["slot"] is not None]
    assert len(set(slots)) == len(slots)
    for request in listed:
        assert (request["slot"] is None) == (request["epoch"] is None)
        assert request["remaining"] == 400 - request["generated"] and request["quantum"] is None
        assert request["reason"] and (request["slot"] is None or "free" not in request["reason"])
    answers = [(event["id"], event["found"]) for event in events if event["event"] == "cancel"]
    assert answers == [*((f"r{n}", True) for n in range(20)), ("r3", False), ("unknown", False)]
    found = by_id(events)
    assert all(found[f"r{n}"][-1]["finish_reasons"] == ["abort"] for n in range(20))
    assert found["after"][-1]["finish_reasons"] in (["length"], ["stop"])


def test_bad_lines_are_error_events_and_harm_no_other() -> None:
    bad = [
        (b"{\n", "invalid_json_line"),
        (b"[1]\n", "invalid_json_line"),
        (b'{"op": "stop"}\n', "invalid_request"),
        (b'{"op": ["submit"]}\n', "invalid_request"),
        (b'{"op": "cancel"}\n', "invalid_request"),
        (b'{"op": "cancel", "id": "a", "b": 1}\n', "invalid_request"),
        (b'{"op": "list", "id": "a"}\n', "invalid_request"),
        (b'{"prompt": ""}\n', "invalid_request"),
        (b'{"prompt": "no!"}\n', "invalid_request"),
        (b'{"prompt": "x", "what": 1}\n', "invalid_request"),
        (b'{"url": "/v1/completions", "body": {"prompt": ["a", "b"]}}\n', "invalid_request"),
        (b'{"prompt": "x", "max_tokens": 500}\n', "token_limit_exceeded"),
        (b'{"prompt": "' + b"x" * 300 + b'"}\n', "line_too_long"),
    ]
    events, totals = serve(
        FakeEngine(), {"id": "a", "prompt": "x"}, *(raw for raw, _ in bad), max_line_bytes=300
    )
    errors = {event["line"]: event for event in events if event["event"] == "error"}
    for line, (_, code) in enumerate(bad, 2):
        assert (errors[line]["code"], errors[line]["id"]) == (code, f"line-{line}")
    assert by_id(events)["a"][-1]["event"] == "finish"
    assert (totals.ok, totals.failed.total()) == (1, len(bad))


def test_an_id_is_taken_while_its_request_is_under_way() -> None:
    events, _ = serve(FakeEngine(), {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    (error,) = (event for event in events if event["event"] == "error")
    assert (error["id"], error["code"], error["line"]) == ("line-2", "duplicate_custom_id", 2)
    assert by_id(events)["a"][-1]["event"] == "finish"


def pipe() -> tuple[Any, Any]:
    read, write = os.pipe()
    return os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0)


def in_thread(stream: EventStream) -> tuple[threading.Thread, list[RunTotals]]:
    result: list[RunTotals] = []
    thread = threading.Thread(target=lambda: result.append(stream.run()), daemon=True)
    thread.start()
    return thread, result


def test_another_program_drives_it_over_pipes() -> None:
    """Each answer is awaited before the next line is written; an id may be used again after its end."""
    source, ask = pipe()
    answers, sink = pipe()
    thread, result = in_thread(EventStream(FakeEngine(), source, sink))
    for n in range(5):
        ask.write(b'{"id": "same", "prompt": "p%d"}\n' % n)
        events: Iterator[Event] = (json.loads(line) for line in iter(answers.readline, b""))
        own = []
        while not own or own[-1]["event"] != "finish":
            own.append(next(events))
        assert own[0]["text"] == f"<p{n}>" and all(event["id"] == "same" for event in own)
    ask.close()
    last = json.loads(answers.readline())
    assert last.pop("seq") >= 10 and last == {"event": "end", "requests": 5, "interrupted": False}
    thread.join(600)
    assert result[0].ok == 5
    for file in (source, sink, answers):
        file.close()


class Gate(io.BytesIO):
    """A reader that takes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()

    def write(self, data: Any) -> int:
        self.open.wait()
        return super().write(data)


def test_a_slow_reader_loses_nothing_and_holds_up_no_request() -> None:
    gate, turns = Gate(), []
    engine = FakeEngine(max_num_seqs=4)
    source = b"".join(b'{"prompt": "p%d"}\n' % n for n in range(200))
    stream = EventStream(
        engine,
        io.BytesIO(source),
        gate,
        on_turn=lambda: turns.append(len(engine.live)),
        max_unfinished=8,  # else all lines may be taken before the first event is there
        max_unsent=10_000,
    )
    thread, result = in_thread(stream)
    while engine.live or not engine.submitted or stream._events.unsent < 10_000:
        thread.join(0.01)
    started = len(engine.submitted)
    assert started < 200 and not engine.live  # what was started has ended; no more was started
    gate.open.set()
    thread.join(600)
    events = [json.loads(line) for line in gate.getvalue().splitlines()]
    assert result[0].ok == 200 and len(by_id(events)) == 200


def test_a_reader_that_goes_away_ends_the_run_cleanly() -> None:
    class Gone(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    engine = FakeEngine()
    lines = io.BytesIO(b'{"prompt": "x"}\n' * 5000)

    def on_turn() -> None:
        """Wait until the writer has met the broken pipe, once it has something to write."""
        while stream._events.unsent and stream._events.failure is None:
            time.sleep(0.001)

    stream = EventStream(engine, lines, Gone(), on_turn=on_turn, max_unfinished=8)
    totals = stream.run()
    assert isinstance(totals.failure, BrokenPipeError) and not engine.live and totals.done < 5000


def test_interrupts() -> None:
    def run(at: tuple[int, ...]) -> tuple[FakeEngine, list[Event], RunTotals]:
        def on_step(step: int) -> None:
            if step in at:
                stream.interrupt()

        sink = io.BytesIO()
        engine = FakeEngine(on_step=on_step)
        lines = io.BytesIO(b'{"prompt": "x"}\n' * 64)
        stream = EventStream(engine, lines, sink, max_unfinished=10)
        totals = stream.run()
        return engine, [json.loads(line) for line in sink.getvalue().splitlines()], totals

    engine, events, totals = run((2,))  # the first: no more lines, what is under way is finished
    assert totals.interrupted and totals.ok == len(engine.submitted) < 64 and not totals.unwritten
    assert all(own[-1]["finish_reasons"] == ["length"] for own in by_id(events).values())
    engine, events, totals = run((2, 3))  # the second: every request ends here
    assert totals.interrupted and not engine.live and totals.failed["aborted"] == totals.unwritten > 0
    assert len(by_id(events)) == len(engine.submitted) and events[-1]["interrupted"]


def test_a_dead_engine_ends_every_request() -> None:
    def die(step: int) -> None:
        raise RuntimeError("device lost")

    events, totals = serve(FakeEngine(on_step=die), *({"id": f"r{n}", "prompt": "x"} for n in range(5)))
    found = by_id(events)
    assert len(found) == 5 and isinstance(totals.failure, RuntimeError) and events[-1]["event"] == "end"
    assert all(
        own[-1]["finish_reasons"] == ["error"] and "device lost" in own[-1]["error"] for own in found.values()
    )


def test_an_input_that_cannot_be_read_on_finishes_what_was_read() -> None:
    class Broken(io.BytesIO):
        def readline(self, limit: Any = -1) -> bytes:
            if self.tell() > 40:
                raise OSError(5, "Input/output error")
            return super().readline(limit)

    sink = io.BytesIO()
    totals = EventStream(FakeEngine(), Broken(b'{"prompt": "x"}\n' * 9), sink).run()
    assert totals.ok == 3 and isinstance(totals.failure, OSError)


control = st.one_of(
    st.builds(lambda n: {"id": f"r{n}", "prompt": "x"}, st.integers(0, 5)),
    st.builds(lambda n: {"op": "cancel", "id": f"r{n}"}, st.integers(0, 5)),
    st.sampled_from([b"{\n", b"\n", {"prompt": ""}, {"op": "cancel"}]),
)


@given(lines=st.lists(control, max_size=30), seed=st.integers(0, 9), limit=st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_every_request_line_ends_once(lines: list[Any], seed: int, limit: int) -> None:
    engine = FakeEngine(max_num_seqs=2, seed=seed)
    events, totals = serve(engine, *lines, max_unfinished=limit)
    submits = [line for line in lines if isinstance(line, dict) and line.get("prompt")]
    cancels = [line for line in lines if isinstance(line, dict) and line.get("op")]
    ends = [event for event in events if event["event"] in ("finish", "error")]
    answers = [event for event in events if event["event"] == "cancel"]
    bad = sum(line in (b"{\n", {"prompt": ""}, {"op": "cancel"}) for line in lines)
    assert len(answers) == len(cancels) - lines.count({"op": "cancel"})
    assert totals.failure is None and totals.done == len(ends)
    assert len(ends) == len(submits) + bad and events[-1]["event"] == "end" and not engine.live
