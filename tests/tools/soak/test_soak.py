"""The soak passes with an honest engine, and finds planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.command_line import invoke
from xla_engine.config import EngineConfig
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.engine.requests.request_table import RequestTable
from xla_engine.environment import embedded_model_directory
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.runner.kv_moves import Parked
from xla_engine.scheduler.kv.allocator import Slots
from xla_engine.scheduler.kv.block_manager import BlockPool
from xla_engine.tools.soak.faults import FaultyDevice, FaultyTokenizer
from xla_engine.tools.soak.report import SoakReport
from xla_engine.tools.soak.soak import soak, tiny_model

CONFIG = EngineConfig(
    max_num_seqs=4, max_model_len=128, prefill_lanes=(2,), key_buckets=(128,), self_check=False
)
MANY = replace(CONFIG, max_num_seqs=16)
SLOTS, BLOCKS = 0, 1  # lives without speculation
THROUGH_ASYNC_LLM = 5  # with blocks


def run(life: int, rounds: int = 3, seed: int = 5) -> SoakReport:
    files = embedded_model_directory()
    checkpoint = load_checkpoint(files, dtype=CONFIG.dtype)
    tokenizer = FaultyTokenizer.from_pretrained(files)
    return soak(checkpoint, tokenizer, CONFIG, lives=1, first_life=life, seed=seed, rounds=rounds)


def run_many(life: int, **options: Any) -> SoakReport:
    """Rounds of many requests for many slots, with the tiny model."""
    files = embedded_model_directory()
    checkpoint = tiny_model(load_checkpoint(files, dtype=MANY.dtype), MANY.dtype)
    tokenizer = FaultyTokenizer.from_pretrained(files)
    return soak(
        checkpoint, tokenizer, MANY, lives=1, first_life=life, seed=5, rounds=2, requests=90, **options
    )


@pytest.mark.parametrize("life", [pytest.param(SLOTS, marks=pytest.mark.release), BLOCKS])
@pytest.mark.full
def test_all_holds_and_all_happens(life: int) -> None:
    report = run(life)
    assert report.ok, report.lines()
    tally = report.tally
    assert tally.rounds == 3 and tally.requests > 30 and tally.compared >= 8 and tally.failed_steps > 0
    assert {"stop", "length", "abort"} <= set(tally.ends) and tally.preemptions > 0 and tally.refused > 0


@pytest.mark.parametrize("life", [BLOCKS, pytest.param(THROUGH_ASYNC_LLM, marks=pytest.mark.release)])
@pytest.mark.full
def test_many_requests_of_a_tiny_model_are_compared_in_the_same_share(life: int) -> None:
    said: list[int] = []
    report = run_many(life, on_life=lambda so_far: said.append(so_far.tally.requests))
    assert report.ok, report.lines()
    tally = report.tally
    assert tally.requests + tally.refused > 90 and said == [tally.requests]  # a full queue refuses
    assert tally.compared >= 15  # of the first round; in the second the engine ends
    assert {"stop", "length", "abort"} <= set(tally.ends) and tally.failed_steps > 0 and tally.preemptions > 0
    ((name, times),) = report.kinds.items()
    assert name == ("blocks" if life == BLOCKS else "blocks, AsyncLLM")
    assert (times.lives, times.requests) == (1, tally.requests)
    assert 0 < times.seconds["alone"] < sum(times.seconds.values()) <= report.seconds
    assert any(line.startswith(name) and f"{tally.requests} requests" in line for line in report.lines())


def test_the_tiny_model_is_the_same_each_time_and_has_the_others_vocabulary() -> None:
    other = load_checkpoint(embedded_model_directory(), dtype="auto")
    tiny, again = tiny_model(other, "auto"), tiny_model(other, "auto")
    assert tiny.config.vocab_size == other.config.vocab_size and tiny.eos_token_ids == other.eos_token_ids
    assert all(np.array_equal(tiny.weights[name], again.weights[name]) for name in again.weights)


@pytest.mark.full
def test_blocks_of_a_few_slots_speculate_as_well() -> None:
    """The start-up check, without which nothing speculates, does not fit into as many blocks as preempt the most."""
    files = embedded_model_directory()
    checkpoint = tiny_model(load_checkpoint(files, dtype=CONFIG.dtype), CONFIG.dtype)
    tokenizer = FaultyTokenizer.from_pretrained(files)
    config = EngineConfig(max_num_seqs=4, max_model_len=128)
    report = soak(checkpoint, tokenizer, config, lives=1, first_life=3, seed=5, rounds=3)
    assert report.ok and report.without_speculation is None, report.lines()
    assert list(report.kinds) == ["blocks, speculation"] and report.tally.drafted_tokens > 0


@pytest.mark.release
def test_a_seed_says_what_happens() -> None:
    tally, again = run(SLOTS).tally, run(SLOTS)
    assert (again.tally.ends, again.tally.steps) == (tally.ends, tally.steps)


@pytest.mark.release
def test_the_command_says_what_it_did_and_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = invoke(
        *("soak", "--lives", "2", "--seed", "1", "--max-num-seqs", "4", "--max-model-len", "128"),
        *("--tiny", "--verbose", "--rounds", "5", "--requests", "30"),
    )
    assert found.exit_code == 0, found.output
    assert "2 engines" in found.stderr and " 0 problems" in found.stderr
    assert "HTTP, honest clients        64 answers compared in 4 rounds" in found.stdout
    assert "no problem found, but not measured: memory, memory of the server" in found.stdout
    assert "all held" not in found.stdout and "seed                       1" in found.stdout
    assert "steps long, hung" in found.stdout and "error" in found.stdout
    _slots_are_kept(monkeypatch)
    found = invoke(
        *("soak", "--lives", "2", "--seed", "1", "--max-num-seqs", "4", "--max-model-len", "128", "--no-http")
    )
    assert found.exit_code == 1 and "NOT all held" in found.stdout
    assert (
        "to see it again, with the same options: xla-engine soak --seed 1 --first-life 0 --lives 1"
        in found.stdout
    )


def _now_and_then(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
    """Call `fault` in place of a method, with the method first, in one of seven calls."""
    real, calls = getattr(owner, name), 0

    def call(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return fault(real, self, *arguments) if calls % 7 == 0 else real(self, *arguments)

    monkeypatch.setattr(owner, name, call)


def _nothing(*_: Any) -> None:
    """What a forgotten call does."""


def _slots_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _now_and_then(monkeypatch, Slots, "release", _nothing)


def _blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _now_and_then(monkeypatch, BlockPool, "release", _nothing)


def _parked_state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parked, "discard", _nothing)
    monkeypatch.setattr(Parked, "clear", _nothing)
    monkeypatch.setattr(Parked, "take", lambda self, name: self._states[name])


def _ends_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(real: Any, self: OutputCollector, request: Any) -> None:
        if not request.finished:
            real(self, request)

    _now_and_then(monkeypatch, OutputCollector, "put", lose)


def _a_token_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(real: Any, self: FaultyDevice, step: Any) -> Any:
        result = real(self, step)
        tokens = [token if token < 0 else token ^ 1 for token in result.decode.tokens]
        return replace(result, decode=replace(result.decode, tokens=tokens)) if self.active else result

    _now_and_then(monkeypatch, FaultyDevice, "wait", change)


def _a_logprob_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(real: Any, self: FaultyDevice, step: Any) -> Any:
        result = real(self, step)
        logprobs = [
            None if value is None else float(np.nextafter(np.float32(value), np.float32(0)))
            for value in result.decode.logprobs
        ]
        return replace(result, decode=replace(result.decode, logprobs=logprobs)) if self.active else result

    _now_and_then(monkeypatch, FaultyDevice, "wait", change)


def _a_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_one(real: Any, self: FaultyDevice, step: Any) -> Any:
        jax.jit(lambda x: x + 1)(np.zeros(3))
        return real(self, step)

    _now_and_then(monkeypatch, FaultyDevice, "wait", compile_one)


def _sequences_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    real = RequestTable.end

    def end(self: RequestTable, name: str, *arguments: Any) -> Any:
        kept.append(self[name])
        return real(self, name, *arguments)

    monkeypatch.setattr(RequestTable, "end", end)


PLANTED = [
    (BLOCKS, _blocks_are_kept, "blocks were not given back|the scheduler"),
    (SLOTS, _parked_state_is_kept, "bytes of parked requests"),
    (SLOTS, _ends_are_lost, "0 terminal results"),
    (SLOTS, _a_token_is_changed, "not as alone: tokens"),
    (SLOTS, _a_logprob_is_changed, "not as alone: log-probabilities"),
    (BLOCKS, _a_program_is_compiled, "compiled after warm-up"),
    (SLOTS, _sequences_are_kept, "these live on: .*LiveSequence"),
]


@pytest.mark.release
@pytest.mark.parametrize(
    ("life", "plant", "said"), PLANTED, ids=[plant.__name__[1:] for _, plant, _ in PLANTED]
)
def test_what_is_planted_is_found(
    monkeypatch: pytest.MonkeyPatch, life: int, plant: Callable[[pytest.MonkeyPatch], None], said: str
) -> None:
    plant(monkeypatch)
    problems = run(life).tally.problems
    assert any(re.search(said, problem) for problem in problems), problems


@pytest.mark.full
@pytest.mark.parametrize(
    "plant", [_a_token_is_changed, _a_logprob_is_changed], ids=["a_token_is_changed", "a_logprob_is_changed"]
)
def test_what_is_planted_is_found_with_the_tiny_model(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    assert any("not as alone" in problem for problem in run_many(SLOTS).tally.problems)


@pytest.mark.full
def test_a_thread_that_is_left_waiting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a life that ends with a step that hangs."""
    devices: list[FaultyDevice] = []
    monkeypatch.setattr(FaultyDevice, "release", lambda self: devices.append(self))
    monkeypatch.setattr("xla_engine.tools.soak.soak._PATIENCE_S", 1.0)  # nothing will end the thread
    try:
        problems = run(life=1, rounds=1).tally.problems
        assert any("wait for steps" in problem for problem in problems), problems
    finally:
        for device in devices:
            device._released.set()


def test_a_slot_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _slots_are_kept(monkeypatch)
    problems = run(SLOTS, rounds=2).tally.problems  # a recovery takes all slots back
    assert any("slots" in problem for problem in problems), problems


def test_memory_that_grows_by_a_kilobyte_a_request_is_not_let_pass() -> None:
    """What engines of different sizes hide is not called measured."""
    mib = 1 << 20
    flat = [(24 * index, 900 * mib + (index % 5) * mib) for index in range(400)]

    def last(resident: list[tuple[int, int]]) -> tuple[bool, str]:
        report = SoakReport(0, 0, resident=resident)
        return report.ok, report.lines()[-1]

    assert last(flat) == (True, "all held")
    assert last([(requests, size + 2048 * requests) for requests, size in flat]) == (False, "NOT all held")
    for few in (flat[:2], flat[:20], [(requests, size + 2048 * requests) for requests, size in flat[:20]]):
        assert last(few) == (True, "no problem found, but not measured: memory")
