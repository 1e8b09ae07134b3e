"""Control lines of a stream: their effects and answers; an invalid one changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.batch.test_event_stream import serve
from tests.support.fake_engine import FakeEngine
from tests.support.models import TINY_ENGINE
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

Event = dict[str, Any]
DRAIN = {"op": "drain"}


def text_of(events: list[Event], name: str) -> str:
    """The pieces of a choice put together, with what replaces earlier ones."""
    text = ""
    for event in events:
        if event["event"] == "delta" and event["id"] == name:
            text = text[: event.get("text_from", len(text))] + event["text"]
    return text


def kinds(events: list[Event]) -> list[str]:
    return [event["event"] for event in events]


@pytest.mark.full
def test_a_request_goes_on_and_its_pieces_are_those_of_the_longer_one() -> None:
    engine = XlaBatchEngine.from_pretrained(
        None, EngineConfig(max_num_seqs=2, max_model_len=128, keep_finished=4)
    )
    with engine:
        assert engine.tokenizer is not None
        halves = engine.tokenizer.encode("\u20ac", add_special_tokens=False)
        assert len(halves) > 1
        hot = {
            "temperature": 3.0,
            "ignore_eos": True,
            "logprobs": 0,
            "stop": ["ion", "\n\n"],
            "min_tokens": 2,
        }
        taken_back = 0
        for seed in range(40):
            fields = {**hot, "allowed_token_ids": halves} if seed % 2 else hot
            line = {"id": "a", "prompt": "é", "seed": seed, "max_tokens": 4, **fields}
            more = {"op": "extend", "id": "a", "max_tokens": 5}
            events, totals = serve(engine, line, DRAIN, more, DRAIN, more, keep_finished=4)
            engine.submit("é", SamplingParams.from_mapping({**fields, "seed": seed, "max_tokens": 14}))
            (alone,) = (output.outputs[0] for output in engine.drain())
            deltas = [event for event in events if event["event"] == "delta"]
            tokens = [token for event in deltas for token in event["token_ids"]]
            assert tuple(tokens) == alone.token_ids[: len(tokens)]
            refused = [event for event in events if event["event"] == "error"]
            if not refused:  # else it came to a stop string before it was extended
                assert len(tokens) == len(alone.token_ids) and text_of(events, "a") == alone.text
                assert [value for event in deltas for value in event["logprobs"]] == list(
                    alone.logprobs or ()
                )
                assert kinds(events).count("finish") == 3 and totals.ok == 1
                assert totals.generated_tokens == len(tokens)
            taken_back += sum("text_from" in event for event in deltas)
        assert taken_back > 0


def test_turns_and_drains_hold_the_next_line() -> None:
    lines = [{"id": f"r{n}", "prompt": "x"} for n in range(3)]
    events, _ = serve(
        FakeEngine(seed=3), *lines, {"op": "step", "turns": 2}, {"op": "stats"}, DRAIN, {"op": "list"}
    )
    answers = [event for event in events if event["event"] in ("step", "stats", "drain", "list")]
    assert answers[0] == {"event": "step", "turns": 2} and answers[1]["steps"] == 2
    assert kinds(answers) == ["step", "stats", "drain", "list"] and answers[3]["requests"] == []
    assert kinds(events[: events.index(answers[2])]).count("finish") == 3
    # With nothing under way both are over at once.
    events, _ = serve(FakeEngine(), {"op": "step"}, DRAIN, {"op": "step", "turns": 5})
    assert [event for event in events if event["event"] != "end"] == [
        {"event": "step", "turns": 0},
        {"event": "drain"},
        {"event": "step", "turns": 0},
    ]


def test_a_look_ahead_names_what_comes_and_who_waits(tiny: XlaBatchEngine) -> None:
    slots = tiny.max_num_seqs
    lines = [
        {"id": f"r{n}", "prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True} for n in range(slots + 1)
    ]
    peek = {"op": "peek"}
    events, totals = serve(tiny, *lines, peek, {"op": "step"}, {"op": "step", "turns": 2}, peek, DRAIN, peek)
    first, later, last = (event for event in events if event["event"] == "peek")
    names = [line["id"] for line in lines]
    assert first["admitted"] == names[:slots]
    assert first["prefill"][0] == {"id": "r0", "tokens": 3}
    assert later["decode"] == names[:slots] and not later["prefill"]
    (waits,) = later["waiting"]
    assert waits["id"] == names[slots] and "slot" in waits["reason"]
    assert not any(last[part] for part in ("admitted", "prefill", "decode", "waiting", "expired"))
    assert totals.ok == slots + 1


def test_what_ended_goes_on_when_all_have_ended() -> None:
    lines = [
        *({"id": f"r{n}", "prompt": "x"} for n in range(4)),
        {"op": "cancel", "id": "r1"},
        DRAIN,
        {"op": "extend", "id": "r1", "max_tokens": 2},
        {"op": "extend", "id": "r2", "max_tokens": 2, "priority": -1},
        DRAIN,
        {"op": "list"},
    ]
    events, totals = serve(FakeEngine(seed=5), *lines, keep_finished=9)
    assert kinds(events).count("finish") == 6 and kinds(events).count("extend") == 2
    assert text_of(events, "r2") == "<x><x>" and text_of(events, "r3") == "<x>"
    assert totals.ok == 4


@pytest.mark.parametrize(
    "line",
    [
        {"op": "extend"},
        {"op": "extend", "id": "a"},
        {"op": "extend", "id": "a", "max_tokens": 0},
        {"op": "extend", "id": "a", "max_tokens": "4"},
        {"op": "extend", "id": "a", "max_tokens": 500},
        {"op": "extend", "id": "unknown", "max_tokens": 1},
        {"op": "extend", "id": "a", "max_tokens": 1, "seed": 3},
        {"op": "extend", "id": ["a"], "max_tokens": 1},
        {"op": "step", "turns": 0},
        {"op": "step", "turns": True},
        {"op": "step", "id": "a"},
        {"op": "drain", "id": "a"},
        {"op": "stats", "id": "a"},
        {"op": "peek", "id": "a"},
        {"op": None},
    ],
)
def test_a_wrong_line_is_an_error_and_harms_nothing(line: dict[str, Any]) -> None:
    events, totals = serve(
        FakeEngine(), {"id": "a", "prompt": "x"}, DRAIN, line, {"id": "b", "prompt": "y"}, keep_finished=2
    )
    (error,) = (event for event in events if event["event"] == "error")
    assert error["line"] == 3 and error["code"] in ("invalid_request", "token_limit_exceeded")
    assert totals.ok == 2 and kinds(events).count("finish") == 2


def test_the_oldest_names_are_forgotten_and_a_live_one_is_refused() -> None:
    lines = [{"id": name, "prompt": "x"} for name in "abc"]
    more = [{"op": "extend", "id": name, "max_tokens": 1} for name in "abcc"]
    events, _ = serve(FakeEngine(max_num_seqs=1), *lines, DRAIN, *more, keep_finished=2)
    assert [event["id"] for event in events if event["event"] == "extend"] == ["b", "c"]
    messages = [event["message"] for event in events if event["event"] == "error"]
    assert "--keep-finished" in messages[0] and "still running" in messages[1]


def test_an_engine_without_kept_requests_says_what_to_set(tiny: XlaBatchEngine) -> None:
    assert tiny.config.keep_finished == TINY_ENGINE.keep_finished == 0
    events, _ = serve(
        tiny, {"id": "a", "prompt": [1]}, DRAIN, {"op": "extend", "id": "a", "max_tokens": 1}, keep_finished=1
    )
    (error,) = (event for event in events if event["event"] == "error")
    assert "keep_finished" in error["message"]
