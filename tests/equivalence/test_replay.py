"""An honest record replays, an altered one is caught where it was altered."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.support.record_edits import (
    Alter,
    altered,
    fewer_chunks,
    find_step,
    longest,
    other_chunk,
    other_epoch,
    other_hash,
    other_read,
    other_row,
    other_slot,
    other_turn,
    put,
    recorded,
    step_of,
)
from tests.support.tiers import default
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.record import Record, from_json, to_json
from xla_engine.equivalence.replay import engine_config, replay
from xla_engine.equivalence.schedule import run_alone
from xla_engine.errors import ConfigError, EngineFaultError, RecordMismatchError


@pytest.mark.parametrize("lag", default([1, 0, 3]))
def test_an_honest_record_replays(tiny: XlaBatchEngine, lag: int) -> None:
    """Whatever ran in between: a record does not depend on what came before it."""
    record = recorded(tiny, lag=lag)
    run_alone(tiny, draw_cases(tiny, 1, seed=12)[0])
    report = replay(tiny, record)
    assert report.ok, "\n".join(report.lines())
    assert report.steps == len(record.steps)
    assert report.tokens == sum(len(trace.token_ids) for trace in record.batched.values())
    assert tiny.lag == tiny.config.lag and not tiny.observers
    assert replay(tiny, from_json(to_json(record).encode())).ok


@pytest.mark.parametrize("position", default([0, 1, -1]))
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
    assert difference.sampled is not None
    assert (difference.request_id, difference.sampled.position) == (name, position)
    assert difference.step == step_of(tiny, honest, name, position) == report.steps
    slots = {(name, slot) for step in honest.steps for name, slot, _ in step.admitted}
    assert (name, difference.slot) in slots
    recorded, found = difference.sampled.expected, difference.sampled.found
    assert recorded is not None and found is not None
    distance = [a ^ b for a, b in zip(recorded.bits[:2], found.bits[:2], strict=True)]  # type: ignore[operator]
    assert distance == ([1, 0] if what == "token" else [0, 1])
    assert difference.gap is not None and "gap" in difference.gap
    text = "\n".join(report.lines())
    assert name in text and "bits" in text and "NOT the same" in text
    assert replay(tiny, honest).ok, "a replay that stopped early leaves the engine fit for the next"


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
    two = altered(honest, put("engine", "tensor_parallel_size", value=2))  # left out of records where it is 1
    assert engine_config(two) == replace(config, tensor_parallel_size=2)
    older = altered(honest, lambda data: data["engine"].pop("chunk_size"))
    with pytest.raises(RecordMismatchError, match="chunk_size: not in the record"):
        engine_config(older)
    for name, value in (("chunk_size", "32"), ("prefill_lanes", 5), ("prefill_lanes", ["a", 1])):
        with pytest.raises((ConfigError, RecordMismatchError)):
            engine_config(altered(honest, put("engine", name, value=value)), force=True)


def test_a_dead_engine_ends_a_replay_with_an_error(
    make_engine: Callable[..., XlaBatchEngine], honest: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(engine_config(honest))

    def fails(step: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.runner, "wait", fails)
    with pytest.raises(EngineFaultError, match="the device is gone"):
        replay(engine, honest)
