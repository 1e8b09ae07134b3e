"""Several engines behind one interface give the results of one engine, even when processes die."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command_line import ROOT
from tests.support.processes import is_running
from xla_engine import LLM, AsyncLLM, SamplingParams
from xla_engine.config import EngineConfig
from xla_engine.data_parallel.engine import DataParallelEngine
from xla_engine.data_parallel.fleet import DEATHS_IN_A_ROW
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError, EngineClosedError, InvalidRequestError, TokenLimitError
from xla_engine.outputs import RequestOutput

pytestmark = pytest.mark.full

CONFIG = EngineConfig(max_num_seqs=4, max_model_len=128, prefill_lanes=(2,), self_check=False)
WORDS = ["def f(x):", "import os", "class A:", "for i in range(3):", "x = 1\n"]


def requests(count: int) -> list[tuple[str, SamplingParams]]:
    draw = random.Random(count)
    return [
        (
            draw.choice(WORDS) + f" # {number}",
            SamplingParams(
                temperature=draw.choice([0.0, 0.9]),
                max_tokens=draw.randrange(1, 60),
                logprobs=draw.choice([None, 0, 2]),
                prompt_logprobs=draw.choice([None, None, 1]),
                n=1,
                stop=draw.choice([(), ("\n\n",)]),
            ),
        )
        for number in range(count)
    ]


def bits(output: RequestOutput) -> Any:
    """All of an output but its times and what caches and guesses did."""
    return (
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        output.outputs,
        output.prompt_logprobs,
        output.error,
    )


@pytest.fixture(scope="module")
def single() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine.from_pretrained(None, CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared() -> Iterator[DataParallelEngine]:
    with DataParallelEngine(None, CONFIG, engines=2) as engine:
        yield engine


@pytest.fixture
def several(shared: DataParallelEngine) -> Iterator[DataParallelEngine]:
    for member in shared.fleet.members:
        member.deaths = 0
    yield shared
    assert not shared.has_unfinished


def expected(single: XlaBatchEngine, wanted: list[tuple[str, SamplingParams]]) -> dict[str, Any]:
    for number, (prompt, params) in enumerate(wanted):
        single.submit(prompt, params, request_id=f"r{number}")
    return {output.request_id: bits(output) for output in single.drain()}


def test_results_and_identity_are_those_of_one_engine(
    single: XlaBatchEngine, several: DataParallelEngine
) -> None:
    wanted = requests(40)
    for number, (prompt, params) in enumerate(wanted):
        several.submit(prompt, params, request_id=f"r{number}")
    found = {output.request_id: bits(output) for output in several.drain()}
    assert found == expected(single, wanted)
    assert several.identity() == single.identity() and several.max_num_seqs == 2 * single.max_num_seqs
    limit = time.monotonic() + 600
    while not all(
        member.stats.get("steps") for member in several.fleet.members
    ):  # both have worked, and say so
        assert time.monotonic() < limit
        time.sleep(0.01)
        several.stats()
    stats = several.stats()
    assert sum(stats.finished.values()) >= 40 and stats.generation_tokens > 0
    assert len(several.snapshot().slots) == 8


def test_killed_processes_change_nothing_that_a_reader_sees(
    single: XlaBatchEngine, several: DataParallelEngine
) -> None:
    """Each id ends once, and every text of a stream begins with the text before it."""
    wanted = requests(150)
    for number, (prompt, params) in enumerate(wanted):
        several.submit(prompt, params, request_id=f"r{number}")
    draw, killed = random.Random(1), 0
    seen: dict[str, RequestOutput] = {}
    ended: list[str] = []
    before = several.stats().recoveries
    while several.has_unfinished:
        for output in several.step():
            if output.request_id in seen and output.outputs:
                for was, now in zip(seen[output.request_id].outputs, output.outputs, strict=False):
                    assert now.token_ids[: len(was.token_ids)] == was.token_ids
            seen[output.request_id] = output
            ended += [output.request_id] if output.finished else []
        ready = [member for member in several.fleet.members if member.ready]
        if killed < 3 and ready and len(ended) > 40 * killed + 5:
            pid = draw.choice(ready).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed += 1
    # One that was killed twice before it was heard of ended once.
    assert killed == 3 and 2 <= several.stats().recoveries - before <= killed
    assert sorted(ended) == sorted(f"r{number}" for number in range(150))
    assert {name: bits(output) for name, output in seen.items()} == expected(single, wanted)


def test_a_request_that_ends_its_process_ends_alone(
    single: XlaBatchEngine, several: DataParallelEngine
) -> None:
    wanted = requests(12)
    for number, (prompt, params) in enumerate(wanted):
        several.submit(prompt, params, request_id=f"r{number}")
    several.submit("poison", SamplingParams(max_tokens=100, ignore_eos=True), request_id="poison")
    found = {}
    while several.has_unfinished:
        for output in several.step(only_finished=True):
            found[output.request_id] = output
        poison = several.loop.live.get("poison")
        if poison is not None and poison.engine is not None:
            pid = several.fleet.members[poison.engine].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    bad = found.pop("poison")
    assert bad.outputs[0].finish_reason == "error" and "3 engines ended with this request" in str(bad.error)
    assert {name: bits(output) for name, output in found.items()} == expected(single, wanted)


def test_requests_are_refused_as_by_one_engine(single: XlaBatchEngine, several: DataParallelEngine) -> None:
    cases: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (TokenLimitError, "x", {"max_tokens": 1000}),
        (InvalidRequestError, [10**6], {}),
        (InvalidRequestError, "", {}),
        (InvalidRequestError, "x", {"logit_bias": {10**6: 1.0}}),
    ]
    for kind, prompt, fields in cases:
        messages = []
        for engine in (single, several):
            with pytest.raises(kind) as caught:
                engine.submit(prompt, SamplingParams(**fields))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    assert not several.has_unfinished


def test_aborts_and_deadlines(several: DataParallelEngine) -> None:
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    several.submit("a", long, request_id="aborted")
    several.submit("b", long, request_id="late", deadline_s=1e-3)
    several.submit("c", SamplingParams(max_tokens=3, ignore_eos=True), request_id="fine")
    assert several.abort("aborted") and not several.abort("aborted")
    several.submit("a", SamplingParams(max_tokens=2, ignore_eos=True), request_id="aborted")  # free again
    found = [(each.request_id, each.outputs[0].finish_reason) for each in several.drain()]
    assert sorted(found) == [
        ("aborted", "abort"),
        ("aborted", "length"),
        ("fine", "length"),
        ("late", "deadline"),
    ]


def test_threads_and_event_loops_share_it(several: DataParallelEngine) -> None:
    llm, results = LLM.from_engine(several), {}  # type: ignore[arg-type, var-annotated]
    params = SamplingParams(temperature=0, max_tokens=20)

    def call(name: int) -> None:
        results[name] = llm.generate([f"def f{name}():"] * 5, params, use_tqdm=False)

    threads = [threading.Thread(target=call, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert all(len({each.outputs[0].token_ids for each in found}) == 1 for found in results.values())

    async def read() -> list[int]:
        model = AsyncLLM.from_engine(several)  # type: ignore[arg-type]
        lengths = [len(output.outputs[0].token_ids) async for output in model.generate("def f0():", params)]
        assert lengths == sorted(lengths)
        return lengths

    assert asyncio.run(read())[-1] == len(results[0][0].outputs[0].token_ids)


def test_an_engine_that_always_ends_is_given_up() -> None:
    with DataParallelEngine(None, CONFIG, engines=1) as engine:
        engine.submit("x", SamplingParams(max_tokens=100, ignore_eos=True))
        engine.submit("y", SamplingParams(max_tokens=100, ignore_eos=True))
        outputs: list[RequestOutput] = []
        engine.fleet.members[0].deaths = DEATHS_IN_A_ROW - 1
        os.kill(engine.pids[0], signal.SIGKILL)
        while engine.has_unfinished:
            outputs += engine.step(only_finished=True)
        assert len(outputs) == 2 and all("ended too often" in str(each.error) for each in outputs)
        with pytest.raises(EngineClosedError):
            engine.submit("z")


def test_processes_end_with_their_parent() -> None:
    """Also where that is killed, and has no time to say so."""
    text = (
        "import os, sys\n"
        "from xla_engine import LLM\n"
        "llm = LLM(data_parallel_size=1 + 1, max_num_seqs=2, max_model_len=64, self_check=False)\n"
        "print(*llm.engine.pids, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    limit = time.monotonic() + 600
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.parametrize("engines", [0, 65, True, "2"])
def test_what_is_no_number_of_engines_is_refused(engines: Any) -> None:
    with pytest.raises(ConfigError, match="1 to 64"):
        DataParallelEngine(None, CONFIG, engines=engines)


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(ConfigError, match="exceeds the model's"):
        LLM(data_parallel_size=2, max_model_len=10**6)


def test_an_interrupt_anywhere_in_a_turn_loses_nothing(
    single: XlaBatchEngine, several: DataParallelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, and while it delivers: every request runs again, and gives the tokens it had."""
    wanted = requests(30)
    for number, (prompt, params) in enumerate(wanted):
        several.submit(prompt, params, request_id=f"r{number}")
    draw, found, interrupted = random.Random(5), {}, 0
    wait, take = several.fleet.wait, several.loop._take

    place = ""

    def wait_and_stop(left: float) -> Any:
        heard = wait(left)
        if place == "wait":
            raise KeyboardInterrupt
        return heard

    def stop_or_take(*arguments: Any) -> None:
        if place == "take":
            raise KeyboardInterrupt
        take(*arguments)

    monkeypatch.setattr(several.fleet, "wait", wait_and_stop)
    monkeypatch.setattr(several.loop, "_take", stop_or_take)
    while several.has_unfinished:
        place = draw.choice(["", "", "wait", "take"]) if interrupted < 8 else ""
        try:
            for output in several.step():
                if output.finished:
                    assert output.request_id not in found
                    found[output.request_id] = bits(output)
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted >= 3 and found == expected(single, wanted)


def test_an_interrupted_drain_keeps_the_results_that_it_had(
    several: DataParallelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {several.submit(prompt, params) for prompt, params in requests(12)}
    advance, stopped = several.loop.advance, False

    def advance_or_stop() -> None:
        nonlocal stopped
        if not stopped and len(several.loop.live) < len(names):
            stopped = True
            raise KeyboardInterrupt
        advance()

    monkeypatch.setattr(several.loop, "advance", advance_or_stop)
    with pytest.raises(KeyboardInterrupt):
        several.drain()
    assert {output.request_id for output in several.drain()} == names
