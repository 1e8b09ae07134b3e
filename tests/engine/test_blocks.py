"""Slots that borrow blocks: same bits as contiguous slots, more requests in the same memory, no block lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.device import num_parked
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.requests import PARAMS, PROMPTS, answers, submit_all
from tests.support.simulation import COST, record
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.recorder import record_schedule
from xla_engine.equivalence.replay import replay
from xla_engine.equivalence.schedule import draw_schedule
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError, TokenLimitError
from xla_engine.observability.observer import Observer
from xla_engine.observability.step_log import read_step_log
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import BlockCopy, Scheduler
from xla_engine.tools.simulator.compare import compare

MakeEngine = Callable[..., XlaBatchEngine]
PAGED = replace(
    TINY_ENGINE, prefill_lanes=(8,), block_size=32, num_blocks=24, max_num_seqs=16, max_model_len=400
)
DRAW = random.Random(9)
STEMS = [[DRAW.randrange(TINY.vocab_size) for _ in range(100)] for _ in range(3)]


@pytest.fixture(scope="module")
def shared_paged() -> Iterator[XlaBatchEngine]:
    """24 blocks of 32 are the memory of three slots of 256; more than eight requests share it."""
    with XlaBatchEngine(tiny_checkpoint(), None, PAGED) as engine:
        yield engine


@pytest.fixture
def paged(shared_paged: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    shared_paged.reset_prefix_cache()
    yield shared_paged
    shared_paged.lag = shared_paged.config.lag
    shared_paged.drain()
    shared_paged.scheduler.check()
    manager = shared_paged.scheduler.kv.blocks
    assert manager is not None and manager.pool.num_free == PAGED.num_blocks, "a block leaked"
    assert num_parked(shared_paged.runner) == 0


def run_checked(engine: XlaBatchEngine, disturb: Callable[[], object] = lambda: None) -> list[RequestOutput]:
    ended = []
    while engine.has_unfinished:
        ended += engine.step(only_finished=True)
        engine.scheduler.check()
        disturb()
    return ended


def test_blocks_hold_more_requests_and_change_no_bit(tiny: XlaBatchEngine, paged: XlaBatchEngine) -> None:
    assert paged.runner.cache_bytes < tiny.runner.cache_bytes / 2
    tiny.reset_prefix_cache()
    submit_all(tiny)
    expected = answers(tiny.drain())
    submit_all(paged)
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, sum(view.request is not None for view in paged.snapshot().slots))

    assert answers(run_checked(paged, count)) == expected
    assert most > 8, f"{most} requests at once"


def storm(engine: XlaBatchEngine, seed: int, lag: int, requests: int = 24) -> int:
    """Prompts with a common beginning, aborts, and preemption at random steps; returns the number of preemptions.

    Each request is first run alone, with nothing of it cached.
    """
    draw = random.Random(seed)
    drawn = []
    for index in range(requests):
        stem = draw.choice(STEMS)[: draw.choice((0, 16, 31, 32, 64, 100))]
        tail = [draw.randrange(TINY.vocab_size) for _ in range(draw.choice((0, 1, 5, 40)))]
        params = replace(draw.choice(PARAMS), max_tokens=draw.choice((1, 6, 30)), min_tokens=0)
        drawn.append((f"{seed}/{index}", (stem + tail) or [1], params))
    expected = {}
    for name, prompt, params in drawn:
        engine.reset_prefix_cache()
        engine.submit(prompt, params, request_id=name)
        expected.update(answers(engine.drain()))
    before, cached = engine.stats().preemptions, engine.stats().cached_tokens
    engine.lag = lag
    waiting, ended = list(drawn), []
    while waiting or engine.has_unfinished:
        for _ in range(draw.choice((0, 1, 3))):
            if waiting:
                name, prompt, params = waiting.pop()
                engine.submit(prompt, params, request_id=name)
                if draw.random() < 0.2:
                    engine.submit(prompt, params, request_id=f"neighbour-{name}")
        ended += engine.step(only_finished=True)
        for view in [slot.request for slot in engine.snapshot().slots if slot.request is not None]:
            if view.request_id.startswith("neighbour") and draw.random() < 0.2:
                engine.abort(view.request_id)
            elif draw.random() < 0.1:
                engine.preempt(view.request_id, how=draw.choice((None, *engine.ways_to_preempt)))
        engine.scheduler.check()
    found = {name: bits for name, bits in answers(ended).items() if not name.startswith("neighbour")}
    assert found == expected
    assert engine.stats().cached_tokens > cached, "nothing was shared"
    return engine.stats().preemptions - before


@pytest.mark.parametrize("lag", [0, 2])
def test_a_storm_over_few_blocks_changes_no_bit(paged: XlaBatchEngine, lag: int) -> None:
    assert storm(paged, seed=lag, lag=lag) > 10


@contextlib.contextmanager
def scheduled(engine: XlaBatchEngine, **options: Any) -> Iterator[None]:
    """A second scheduler, with fewer slots and blocks than the engine has."""
    usual = engine.scheduler
    engine.scheduler = Scheduler(replace(usual.config, **options))
    yield
    engine.scheduler.check()
    assert not engine.scheduler.has_unfinished
    engine.scheduler = usual
    engine.reset_prefix_cache()


def test_turns_of_one_step_over_fewer_blocks_than_requests_change_no_bit(paged: XlaBatchEngine) -> None:
    """Each request loses its slot after every step, blocks run out, and prefixes are cached and evicted."""
    turns = {"scheduling_policy": "round_robin", "quantum": 1, "preemption": False}
    with scheduled(paged, **turns, max_num_seqs=4, num_blocks=10):
        assert storm(paged, seed=7, lag=1, requests=12) > 100


@pytest.mark.full
def test_a_storm_with_the_cpp_operations_changes_no_bit() -> None:
    """With them, generated tokens are shared as well, and a cached prompt computes only its last token."""
    config = EngineConfig(max_num_seqs=8, max_model_len=400, prefill_lanes=(8,), block_size=32, num_blocks=22)
    with XlaBatchEngine.from_pretrained(config=config) as engine:
        if not engine.runner.has_one_row_code:
            pytest.skip("this machine has no C++ products")
        assert storm(engine, seed=3, lag=1) + storm(engine, seed=4, lag=2) > 10


def test_rows_grow_and_the_last_in_line_gives_way(paged: XlaBatchEngine) -> None:
    """Sixteen requests grow from one block to four, so that they need 64 blocks, and there are 24."""
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=100, logprobs=2, ignore_eos=True)
    prompts = [[index, 7, 9] for index in range(16)]
    expected = {}
    for index, prompt in enumerate(prompts):
        paged.submit(prompt, params, request_id=str(index))
        expected.update(answers(paged.drain()))
    paged.reset_prefix_cache()
    before = paged.stats().preemptions
    for index, prompt in enumerate(prompts):
        paged.submit(prompt, params, request_id=str(index))
    paged.step()
    assert paged.num_running == 16, "admission takes what the prompts need"
    ended = run_checked(paged)
    assert answers(ended) == expected
    assert paged.stats().preemptions - before >= 8
    assert ended[0].request_id == "0", "the first in line never gives way"


def test_samples_of_one_prompt_share_its_blocks(paged: XlaBatchEngine) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=4, n=8, logprobs=0, ignore_eos=True)
    prompt = STEMS[0][:96]
    paged.submit(prompt, params, request_id="alone")
    (alone,) = paged.drain()
    assert len({output.token_ids for output in alone.outputs}) > 1, "eight samples are not the same"
    manager = paged.scheduler.kv.blocks
    assert manager is not None
    fewest = manager.pool.num_free

    def count() -> None:
        nonlocal fewest
        fewest = min(fewest, manager.pool.num_free)

    copies: list[BlockCopy] = []
    paged.observers.add(observer := Observer(started=lambda plan: copies.extend(plan.moves.copies)))
    paged.submit(prompt, params, request_id="alone")
    (again,) = run_checked(paged, count)
    paged.observers.remove(observer)
    assert copies, "the last block holds the last chunk, which each computes for itself"
    assert [output.token_ids for output in again.outputs] == [output.token_ids for output in alone.outputs]
    # 99 positions are four blocks: two or three are shared by all, and eight sequences would take 32 of their own.
    assert 24 - fewest <= 3 + 8 * 2


def test_law_1_over_blocks(paged: XlaBatchEngine) -> None:
    preempted = 0  # how often depends on the tokens, which are another CPU kind's own
    for seed in (31, 32):
        with scheduled(paged, num_blocks=14):
            report = verify(paged, requests=60, schedules=2, seed=seed, lags=(0, 2))
        assert report.ok, "\n".join(report.lines())
        preempted += report.preempted
    assert preempted > 2


@pytest.mark.full
def test_law_1_over_blocks_with_pure_jax(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(PAGED, attention_backend="xla", max_model_len=128, num_blocks=12))
    assert engine.ways_to_preempt[0] == "park"
    report = verify(engine, requests=40, schedules=2, seed=31, lags=(0, 2))
    assert report.ok and report.preempted > 2, "\n".join(report.lines())
    engine.scheduler.check()


def test_a_record_of_a_run_over_blocks_replays(paged: XlaBatchEngine) -> None:
    cases = draw_cases(paged, 24, seed=5)
    drawn = draw_schedule(cases, 5, lag=1, preempts=paged.ways_to_preempt)
    _, record = record_schedule(paged, drawn, blank=True)
    assert record.identity.config["num_blocks"] == 24
    report = replay(paged, record)
    assert report.ok, "\n".join(report.lines())


def test_a_simulated_run_over_blocks_is_the_real_one_step_for_step(
    paged: XlaBatchEngine, tmp_path: Path
) -> None:
    record(paged, tmp_path / "steps.jsonl", seed=1)
    log = read_step_log(tmp_path / "steps.jsonl")
    found = compare(log, COST)
    assert found.first_difference is None, f"of {found.steps} steps, {found.first_difference} differs"
    assert any(step.parks for step in log.steps) and any(step.reuses for step in log.steps)


@pytest.mark.full
def test_the_start_up_check_runs_over_blocks_however_few_there_are(
    paged: XlaBatchEngine, make_engine: MakeEngine
) -> None:
    assert paged.self_check is not None and paged.self_check.row_invariant
    small = make_engine(replace(PAGED, num_blocks=4, max_num_seqs=8))
    assert small.self_check is not None and small.self_check.row_invariant
    assert small.runner.sizes.lanes == paged.runner.sizes.lanes
    with pytest.raises(TokenLimitError, match="219 tokens take 7 blocks of 32; the pool has 4"):
        small.submit(PROMPTS[5], PARAMS[0])
    small.submit(PROMPTS[4], PARAMS[0])
    assert len(small.drain()) == 1


def test_sizes_that_make_no_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size must be one of 16, 32, 64, 128, 256, not 48"):
        EngineConfig(num_blocks=4, block_size=48)
    with pytest.raises(ConfigError, match="give one"):
        EngineConfig(num_blocks=4, kv_cache_memory_bytes=1 << 20)


def test_every_program_over_blocks_works_in_place(paged: XlaBatchEngine) -> None:
    reports = paged.inventory_report()
    assert len(reports) <= 8 + len(paged.runner.sizes.few)
    for report in reports:
        if not report.name.startswith(("prompt_logprobs", "read_blocks")):
            assert report.alias_bytes >= paged.runner.cache_bytes, report
