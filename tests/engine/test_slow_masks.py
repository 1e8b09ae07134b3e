"""A row whose mask takes long waits for it alone: other rows go on, and no result changes."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.requests import comparable
from tests.support.simulation import COST
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case
from xla_engine.equivalence.record import from_json, to_json
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import replay
from xla_engine.equivalence.schedule import Action, Schedule
from xla_engine.errors import InvalidRequestError
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.token_mask import TokenMask
from xla_engine.tools.simulator.compare import compare
from xla_engine.utils.call_thread import Pending

pytest.importorskip("llguidance")

PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
GATED = [
    SamplingParams.from_mapping(fields)
    for fields in (
        {"temperature": 1, "seed": 4, "max_tokens": 14, "logprobs": 2, "structured_outputs": {"regex": "[a-z ]{1,9}"}},
        {"temperature": 0.9, "seed": 5, "max_tokens": 14, "logprobs": 0, "structured_outputs": {"json_object": True}},
        {"temperature": 0.9, "seed": 6, "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no", "maybe"]}},
        {"temperature": 0, "max_tokens": 14, "structured_outputs": {"regex": "ab*"}, "stop": ["bb"]},
    )
]  # fmt: skip


class Masks:
    """Masks are computed in a background thread, and `slow` is called before each; `made` counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.made = 0
        self.slow: Callable[[], object] = self._wait
        self.is_slow: Callable[[], bool] = lambda: True
        real = TokenMask.make

        def make(mask: TokenMask) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.slow()
                self.made += 1
            real(mask)
            mask.seconds = 1.0

        monkeypatch.setattr(TokenMask, "may_be_slow", property(lambda _: self.is_slow()))
        monkeypatch.setattr(TokenMask, "make", make)

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(600)

    def close(self) -> None:
        """Let the next mask of the background thread wait."""
        self.gate.clear()
        self.entered.clear()


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Masks]:
    masks = Masks(monkeypatch)
    yield masks
    masks.gate.set()


def alone(engine: XlaBatchEngine, params: SamplingParams, name: str) -> Any:
    engine.submit("x = ", params, request_id=name)
    (output,) = engine.drain()
    return comparable(output)


def until_a_mask_is_made(engine: XlaBatchEngine, masks: Masks) -> None:
    while not any(isinstance(row, Pending) for row in engine.state.masks._rows.values()):
        engine.step()
    assert masks.entered.wait(600)  # no step meanwhile: without another row it would wait for the mask


def test_other_rows_take_no_step_more_while_a_mask_is_made(embedded: XlaBatchEngine, masks: Masks) -> None:
    """Not even if it never ends: here the mask of one request is made only when the other has ended."""
    before = embedded.stats().steps
    alone(embedded, PLAIN, "plain")
    steps = embedded.stats().steps - before
    masks.slow = lambda: time.sleep(0.2)
    slow = GATED[3]
    expected = alone(embedded, slow, "slow")
    assert masks.made >= 1
    masks.slow = masks._wait
    masks.close()
    before = embedded.stats().steps
    embedded.submit("x = ", PLAIN, request_id="plain")
    embedded.submit("x = ", slow, request_id="slow")
    ended: list[str] = []
    while not ended:
        ended += [output.request_id for output in embedded.step() if output.finished]
    assert embedded.stats().steps - before == steps and ended == ["plain"]
    masks.gate.set()
    assert [comparable(output) for output in embedded.drain()] == [expected]


def test_results_are_those_of_masks_that_are_made_at_once(embedded: XlaBatchEngine, masks: Masks) -> None:
    names = [f"g{place}" for place in range(len(GATED))]
    masks.is_slow = lambda: False
    at_once = {name: alone(embedded, params, name) for name, params in zip(names, GATED, strict=True)}
    assert not masks.made
    draw = random.Random(3)
    masks.is_slow = lambda: draw.random() < 0.6
    for lag in (0, 1, 2):
        embedded.lag = lag
        for name, params in zip(names, GATED, strict=True):
            embedded.submit("x = ", params, request_id=name)
        found = {}
        for turn in range(12):  # preempted in all ways, some of them while they wait for a mask
            found |= {output.request_id: comparable(output) for output in embedded.step() if output.finished}
            embedded.preempt(names[turn % 4], how=draw.choice(embedded.ways_to_preempt))
            embedded.scheduler.check()
        assert found | {output.request_id: comparable(output) for output in embedded.drain()} == at_once
    assert masks.made > 10


@pytest.mark.parametrize("way", ["park", "recompute", "replay", "fault", "abort", "deadline"])
def test_what_may_happen_to_a_row_while_its_mask_is_made(
    embedded: XlaBatchEngine, masks: Masks, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way in ("park", "recompute", "replay") and way not in embedded.ways_to_preempt:
        pytest.skip(f"no {way} on this machine")
    expected = alone(embedded, GATED[0], "slow"), alone(embedded, PLAIN, "plain")
    masks.close()
    now = 0.0
    with monkeypatch.context() as clock:
        clock.setattr(embedded, "clock", lambda: now)
        deadline = {"deadline_s": 5.0} if way == "deadline" else {}
        embedded.submit("x = ", GATED[0], request_id="slow", **deadline)  # type: ignore[arg-type]
        embedded.submit("x = ", PLAIN, request_id="plain")
        until_a_mask_is_made(embedded, masks)
        if way in ("abort", "deadline"):
            now = 6.0
            assert way == "deadline" or embedded.abort("slow")
            (output,) = (each for each in embedded.step() if each.finished)
            assert output.outputs[0].finish_reason == way and not embedded.state.masks.making
            embedded.submit("x = ", GATED[0], request_id="slow")  # its id is free
        elif way == "fault":
            real, failed = embedded.runner.wait, []

            def wait(step: Any) -> Any:
                if not failed:
                    failed.append(step)
                    raise RuntimeError("planted")
                return real(step)

            clock.setattr(embedded.runner, "wait", wait)
            while not failed:
                embedded.step()
        else:
            assert embedded.preempt("slow", how=way)
        embedded.step()
        masks.gate.set()
        found = {output.request_id: comparable(output) for output in embedded.drain()}
    assert (found["slow"], found["plain"]) == expected


def test_a_row_that_may_not_go_on_ends_alone_with_what_it_has(
    embedded: XlaBatchEngine, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, real = alone(embedded, PLAIN, "plain"), TokenMask._next
    faults = embedded.stats().recoveries
    for beside in (True, False):
        masks.is_slow = lambda beside=beside: beside  # type: ignore[misc]

        def next_words(mask: TokenMask, length: int) -> Any:
            if length == 3:
                raise InvalidRequestError("its masks take more than planted")
            return real(mask, length)

        with monkeypatch.context() as planted:
            planted.setattr(TokenMask, "_next", next_words)
            embedded.submit("x = ", GATED[0], request_id="slow")
            embedded.submit("x = ", PLAIN, request_id="plain")
            found = {output.request_id: output for output in embedded.drain()}
        completion = found["slow"].outputs[0]
        assert completion.finish_reason == "error" and len(completion.token_ids) == 3
        assert "planted" in (found["slow"].error or "") and comparable(found["plain"]) == expected
        assert embedded.stats().recoveries == faults


def test_runs_with_slow_masks_are_recorded_replayed_and_simulated(
    embedded: XlaBatchEngine, masks: Masks, tmp_path: Path
) -> None:
    draw = random.Random(7)
    masks.slow = lambda: time.sleep(draw.choice((0.0, 0.0, 0.03)))
    prompt = tuple(embedded.tokenizer.encode("x = ")) if embedded.tokenizer else ()
    cases = tuple(
        Case(request_id=f"c{at}", prompt_token_ids=prompt, params=params)
        for at, params in enumerate((GATED[0], PLAIN, GATED[1]))
    )
    actions = tuple(
        Action(turn=4 * at, kind="submit", request_id=case.request_id) for at, case in enumerate(cases)
    )
    for count in (3, 1):  # of one row alone, turns pass in which there is nothing to plan
        schedule = Schedule(lag=1, cases=cases[:count], neighbours=(), actions=actions[:count])
        _, record = record_schedule(embedded, schedule, blank=True)
        record = from_json(to_json(record).encode())
        assert any(step.held if count > 1 else step.is_late for step in record.steps)
        for pause in (0.0, 0.02):
            masks.slow = lambda pause=pause: time.sleep(pause)  # type: ignore[misc]
            assert (report := replay(embedded, record)).ok, report.lines()
        masks.slow = lambda: time.sleep(draw.choice((0.0, 0.0, 0.03)))
        with logging_steps(embedded, tmp_path / "log"):
            for case in cases[:count]:
                embedded.submit(case.prompt_token_ids, case.params, request_id=case.request_id)
                embedded.step()
            embedded.drain()
        log = read_step_log(tmp_path / "log")
        assert any(step.held or step.is_late for step in log.steps)
        assert compare(log, COST).first_difference is None


def test_an_event_loop_sleeps_until_a_mask_is_there(
    embedded: XlaBatchEngine, masks: Masks, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(embedded, GATED[0], "slow")
    masks.slow, turns, real = (lambda: time.sleep(0.03)), 0, embedded.turn

    def counted() -> Any:
        nonlocal turns
        turns += 1
        return real()

    async def read() -> Any:
        llm = AsyncLLM.from_engine(embedded)
        return [output async for output in llm.generate("x = ", GATED[0], request_id="slow")][-1]

    monkeypatch.setattr(embedded, "turn", counted)
    assert comparable(asyncio.run(read())) == expected
    assert turns < 6 * GATED[0].max_tokens
