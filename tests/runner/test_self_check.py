"""The start-up self-check: true on an honest engine, false where a fault was planted, and what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.faults import attend_decode, attend_prefill, top_k_of_the_batch
from tests.support.models import BOTH_LANES, TINY, TINY_ENGINE
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.schedule import run_alone
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.row_state.rows import Extents
from xla_engine.graphs.row_state.sampling_fields import SamplingRows
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.sampling.logits import ByRow
from xla_engine.runner.runner import Runner
from xla_engine.runner.self_check import check as check_module
from xla_engine.runner.self_check.check import SelfCheck, run_self_check
from xla_engine.runner.self_check.probe import enough_blocks

MakeEngine = Callable[..., XlaBatchEngine]


def test_an_honest_engine_passes(embedded: XlaBatchEngine) -> None:
    check = embedded.self_check
    assert check is not None and check.ok
    assert check.prefill_equals_decode or jax.default_backend() != "cpu"
    assert not check.differences or not check.prefill_equals_decode
    assert check.promise.startswith("level A: same bits")
    assert check.seconds > 0
    assert embedded.runner.sizes.lanes == (2, 8)
    assert embedded.runner.sizes.keys == embedded.runner.buckets


def test_the_check_leaves_the_engine_as_it_was(make_engine: MakeEngine) -> None:
    """No row is active, no slot was used, nothing was compiled, and requests get the bits they get without it."""
    checked = make_engine()
    checked.runner.blank()
    again = run_self_check(checked.runner, TINY.vocab_size)
    assert replace(again, seconds=0.0) == replace(first_check(checked), seconds=0.0, day=None)
    now, idle = (
        np.asarray(rows.words) for rows in (checked.runner.state.rows, checked.runner.state.idle_rows())
    )
    assert np.array_equal(now, idle)
    assert not checked.runner.dispatch.lengths.any()
    assert checked.stats().prefill_calls == checked.stats().compiles_after_warmup == 0
    unchecked = make_engine(replace(TINY_ENGINE, self_check=False))
    assert unchecked.self_check is None
    assert checked.snapshot() == unchecked.snapshot()
    for case in draw_cases(unchecked, 10, seed=7):
        assert run_alone(checked, case) == run_alone(unchecked, case)


@pytest.mark.full
@pytest.mark.parametrize("context_length", [2, pytest.param(9, marks=pytest.mark.release)])
def test_a_context_too_short_for_two_chunks_is_checked_as_well(
    make_engine: MakeEngine, context_length: int
) -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=context_length, prefill_lanes=(1,), chunk_size=8)
    assert first_check(make_engine(config)).ok


def first_check(engine: XlaBatchEngine) -> SelfCheck:
    assert engine.self_check is not None
    return engine.self_check


# -- planted faults ---------------------------------------------------------------------------------------------


def bucket_changes_decode(self: Any, layer: Any, qkv: Any, call: Any, **rest: Any) -> Any:
    layer, out = attend_decode(self, layer, qkv, call, **rest)
    return layer, out * (1 + call.key_length * 1e-4)


def bucket_changes_prefill(self: Any, layer: Any, qkv: Any, call: Any, lanes: Extents) -> Any:
    layer, out = attend_prefill(self, layer, qkv, call, lanes)
    return layer, out * (1 + call.key_length * 1e-4)


def lane_count_changes_prefill(self: Any, layer: Any, qkv: Any, call: Any, lanes: Extents) -> Any:
    layer, out = attend_prefill(self, layer, qkv, call, lanes)
    return layer, out * (1 + len(lanes.slot) * 1e-2)


def slot_changes_logits(logits: Any, rows: SamplingRows, *rest: Any, **named: Any) -> Any:
    drift = 1 + jnp.arange(len(rows.temperature), dtype=jnp.float32) * 1e-3
    by_row = isinstance(logits, ByRow)
    moved = ByRow(logits.values * drift[:, None]) if by_row else logits * drift
    return sampling.sample(moved, rows, *rest, **named)


@pytest.mark.parametrize(
    ("target", "fault", "flag"),
    [
        (
            "xla_engine.graphs.attention.xla.XlaAttention.attend_decode",
            bucket_changes_decode,
            "bucket_invariant",
        ),
        pytest.param(
            "xla_engine.graphs.attention.xla.XlaAttention.attend_prefill",
            bucket_changes_prefill,
            "bucket_invariant",
            marks=pytest.mark.release,
        ),
        pytest.param(
            "xla_engine.graphs.attention.xla.XlaAttention.attend_prefill",
            lane_count_changes_prefill,
            "lane_invariant",
            marks=pytest.mark.release,
        ),
    ],
)
@pytest.mark.full
def test_the_largest_graphs_take_over_where_sizes_change_bits(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    make_engine: MakeEngine,
    target: str,
    fault: Any,
    flag: str,
) -> None:
    """The right flag becomes false, one warning is logged, and the law holds again; without the check it does not."""
    monkeypatch.setattr(target, fault)
    engine = make_engine(replace(BOTH_LANES, attention_backend="xla"))
    check = first_check(engine)
    flags = {name: getattr(check, name) for name in ("row_invariant", "lane_invariant", "bucket_invariant")}
    assert flags == {name: name != flag for name in flags}
    assert not check.ok and "largest graphs only" in check.promise
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("xla_engine.self_check", logging.WARNING)
    assert check.differences[0] in record.getMessage()
    buckets = engine.config.buckets(engine.max_model_len)
    assert engine.runner.sizes.lanes == ((8,) if flag == "lane_invariant" else (2, 8))
    assert engine.runner.sizes.keys == (buckets[-1:] if flag == "bucket_invariant" else buckets)
    report = verify(engine, requests=40, schedules=2, seed=8)
    assert report.ok, "\n".join(report.lines())
    # What the check bought: the same programs with every size in use.
    engine.runner.sizes = engine.runner.sizes._replace(lanes=(2, 8), keys=buckets)
    assert not verify(engine, requests=40, schedules=2, seed=8).ok


@pytest.mark.parametrize("fault", default([slot_changes_logits, top_k_of_the_batch]))
def test_rows_that_differ_are_beyond_help_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make_engine: MakeEngine, fault: Any
) -> None:
    monkeypatch.setattr("xla_engine.graphs.steps.decode.sample", fault)
    engine = make_engine(replace(TINY_ENGINE, prefill_lanes=(2,)))
    check = first_check(engine)
    assert not check.row_invariant and check.lane_invariant and check.bucket_invariant
    assert "cannot be promised" in check.promise
    assert "against slot 0 alone: sample" in check.differences[0]
    (record,) = caplog.records
    assert "cannot be promised" in record.getMessage()
    assert engine.runner.sizes.keys == engine.runner.buckets


def middle_bucket_changes_long_rows(self: Any, layer: Any, qkv: Any, call: Any, **rest: Any) -> Any:
    layer, out = attend_decode(self, layer, qkv, call, **rest)
    is_long = (rest["length"] >= 256)[:, None]
    return layer, jnp.where(is_long & (call.key_length == 512), out * 1.001, out)


@pytest.mark.full
def test_each_bucket_is_probed_with_keys_that_need_it(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    """Only rows of more than one block notice, and only in a bucket that is neither the first nor the last."""
    monkeypatch.setattr(
        "xla_engine.graphs.attention.xla.XlaAttention.attend_decode", middle_bucket_changes_long_rows
    )
    model = replace(TINY, max_position_embeddings=600)
    config = replace(
        TINY_ENGINE, attention_backend="xla", max_model_len=600, prefill_lanes=(4,), key_buckets=(256, 512)
    )
    engine = make_engine(config, model=model)
    check = first_check(engine)
    assert check.row_invariant and check.lane_invariant and not check.bucket_invariant
    assert all("with 512 keys against 768" in difference for difference in check.differences)
    assert engine.runner.sizes.keys == (768,)


# -- pools of few blocks ----------------------------------------------------------------------------------------

SMALL_POOL = replace(TINY_ENGINE, num_blocks=6, block_size=32, max_model_len=128)


@pytest.mark.full
def test_a_pool_too_small_for_the_check_is_checked_in_a_temporary_one(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are recomputed and reused as with more blocks, nothing compiles later, and the bits are the same."""
    checked: list[int | None] = []
    compare = check_module._compare

    def seen(runner: Runner, *rest: Any, **named: Any) -> Any:
        checked.append(runner.config.num_blocks)
        return compare(runner, *rest, **named)

    monkeypatch.setattr(check_module, "_compare", seen)
    engine = make_engine(SMALL_POOL)
    assert checked[0] == 6 and len(set(checked)) == 2 and checked[-1] == enough_blocks(engine.config)
    assert first_check(engine).ok and engine.config.num_blocks == 6
    assert engine.scheduler.config.prefill_equals_decode is first_check(engine).prefill_equals_decode
    assert engine.stats().compiles_after_warmup == 0
    report = verify(engine, requests=12, schedules=1, seed=3)
    assert report.ok, "\n".join(report.lines())


@pytest.mark.full
@pytest.mark.parametrize("config", [TINY_ENGINE, BOTH_LANES], ids=["two lanes", "eight lanes"])
def test_enough_blocks_are_enough(make_engine: MakeEngine, config: EngineConfig) -> None:
    """And a pool of as many is checked itself."""
    pool = replace(config, num_blocks=6, block_size=32)
    engine = make_engine(replace(pool, num_blocks=enough_blocks(pool)))
    assert run_self_check(engine.runner, TINY.vocab_size) is not None


@pytest.mark.full
def test_a_check_that_cannot_run_says_so(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(replace(SMALL_POOL, enable_lora=True))
    assert engine.self_check is None and not engine.scheduler.config.prefill_equals_decode
    (record,) = (each for each in caplog.records if each.name == "xla_engine.self_check")
    assert "more than the 6 blocks" in record.getMessage() and "num_blocks" in record.getMessage()


def test_a_temporary_pool_without_memory_says_so(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(replace(SMALL_POOL, self_check=False))

    def refuse(blocks: int) -> Runner:
        raise ConfigError("the engine does not fit")

    assert run_self_check(engine.runner, TINY.vocab_size, refuse) is None
    (record,) = caplog.records
    assert "does not fit: the engine does not fit" in record.getMessage()
