"""Slots that borrow pages: the bits of slots of their own, more requests in one memory, every page accounted for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.conftest import TINY_ENGINE
from tests.test_preemption import PARAMS, PROMPTS, answers, submit_all
from xla_engine.config import EngineConfig
from xla_engine.engine import XlaBatchEngine
from xla_engine.errors import ConfigError, TokenLimitError
from xla_engine.verify import verify

MakeEngine = Callable[..., XlaBatchEngine]
PAGED = replace(TINY_ENGINE, prefill_lanes=(8,), block_size=32, num_blocks=24, max_num_seqs=16)


def test_pages_hold_more_requests_and_change_no_bit(tiny: XlaBatchEngine, make_engine: MakeEngine) -> None:
    """24 pages of 32 are the memory of three slots of 256; more than eight requests share it."""
    engine = make_engine(PAGED)
    assert engine.runner.cache_bytes < tiny.runner.cache_bytes / 2
    tiny.reset_prefix_cache()
    submit_all(tiny)
    expected = answers(tiny.drain())
    submit_all(engine)
    most, ended = 0, []
    while engine.has_unfinished:
        ended += engine.step(only_finished=True)
        most = max(most, sum(view.request is not None for view in engine.snapshot().slots))
        engine.scheduler.check()
    assert answers(ended) == expected
    assert most > 8, f"{most} requests at once"


@pytest.mark.parametrize("attention", ["auto", "xla"])
def test_law_1_over_pages(make_engine: MakeEngine, attention: str) -> None:
    engine = make_engine(replace(PAGED, attention_backend=attention, max_model_len=128, num_blocks=12))
    assert engine.ways_to_preempt[0] == "park"
    report = verify(engine, requests=40, schedules=2, seed=31, lags=(0, 2))
    assert report.ok and report.preempted > 2, "\n".join(report.lines())
    engine.scheduler.check()


def test_what_never_fits_is_refused_with_the_arithmetic(make_engine: MakeEngine) -> None:
    engine = make_engine(replace(PAGED, num_blocks=4, max_num_seqs=8))
    with pytest.raises(TokenLimitError, match="219 tokens take 7 blocks of 32; the pool has 4"):
        engine.submit(PROMPTS[5], PARAMS[0])
    engine.submit(PROMPTS[4], PARAMS[0])
    assert len(engine.drain()) == 1


def test_sizes_that_make_no_pages_are_refused() -> None:
    with pytest.raises(ConfigError, match="pages hold 16, 32, 64, 128, 256 tokens, not 48"):
        EngineConfig(num_blocks=4, block_size=48)
