"""Threads of a web server or a notebook share one `LLM`: each call gets its own results, as if it were alone."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.again import again
from xla_engine import LLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def prompts_of(thread: int) -> list[list[int]]:
    return [[thread + 1, number + 3, 7] for number in range(6)]


def complete(llm: LLM, thread: int) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts_of(thread), PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_threads_generate_at_once(tiny: XlaBatchEngine) -> None:
    llm = LLM.from_engine(tiny)
    alone = [complete(llm, thread) for thread in range(6)]
    for _ in range(3):
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(lambda thread: complete(llm, thread), range(6))) == alone
    assert not tiny.has_unfinished


@again
def test_a_short_call_does_not_wait_for_a_long_one(tiny: XlaBatchEngine) -> None:
    """Threads take turns fairly: each returns when it has its results."""
    llm, ended = LLM.from_engine(tiny), []
    long = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    running = threading.Event()

    def endless() -> None:
        for _ in llm.stream([[5, 6, 7]] * 4, long):
            running.set()
            time.sleep(0.002)
        ended.append("long")

    thread = threading.Thread(target=endless)
    thread.start()
    assert running.wait(600)
    short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate([[1, 2]], short, use_tqdm=False)
    ended.append("short")
    thread.join(600)
    assert ended == ["short", "long"]


def test_threads_submit_and_abort_while_another_drives(tiny: XlaBatchEngine) -> None:
    collectors = [OutputCollector() for _ in range(5)]

    def submit(number: int) -> list[str]:
        names = [
            tiny.submit(
                [number + 1, 2, 3], PARAMS, collector=collectors[number], request_id=f"{number}-{index}"
            )
            for index in range(8)
        ]
        assert tiny.abort(names[0])
        tiny.stats(), tiny.snapshot()
        return names

    with ThreadPoolExecutor(5) as pool:
        jobs = [pool.submit(submit, number) for number in range(5)]
        while tiny.has_work or not all(job.done() for job in jobs):
            tiny.advance()
    for collector, job in zip(collectors, jobs, strict=True):
        outputs = {request.request_id: request.output() for request in collector.take()}
        reasons = [outputs[name].outputs[0].finish_reason for name in job.result()]
        assert reasons == ["abort"] + ["length"] * 7
        assert len({outputs[name].outputs[0].token_ids for name in job.result()[1:]}) == 1


def test_an_engine_that_fails_tells_every_thread(
    tiny: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM.from_engine(tiny)

    def broken() -> None:
        raise OSError("gone")

    with monkeypatch.context() as patch:
        patch.setattr(tiny.runner, "wait", lambda step: broken())
        patch.setattr(tiny.runner, "rebuild", broken)
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(complete, llm, thread) for thread in range(4)]
            for job in jobs:
                assert job.exception() is None or isinstance(job.exception(), EngineClosedError)
    tiny.state.closed = None
    tiny.runner.rebuild()
    assert complete(llm, 0)
