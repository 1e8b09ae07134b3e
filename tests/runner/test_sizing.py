"""max_num_seqs "auto" and the memory budget."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.cli import main
from xla_engine.config import DEFAULT_MAX_MODEL_LEN, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import RopeScaling
from xla_engine.graphs.kv_cache.cache import block_bytes, make_cache
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.row_state.rows import Pool, make_rows, make_tables, pack_rows
from xla_engine.runner import memory
from xla_engine.runner.backends import choose_attention, make_spec
from xla_engine.runner.memory_plan import MemoryPlan
from xla_engine.runner.sizing import (
    DEFAULT_SHARE,
    MOST_ROWS,
    MOST_ROWS_ELSEWHERE,
    resolve_length,
    resolve_sizes,
)
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS
from xla_engine.utils import host_memory

SPEC = ModelSpec(TINY, jnp.dtype("bfloat16"), choose_attention("xla"), None)
AUTO = replace(TINY_ENGINE, max_num_seqs="auto")


class Device:
    """Reports a fixed amount of memory."""

    platform = "gpu"

    def __init__(self, free: int | None, in_use: int = 0) -> None:
        self._free, self._in_use = free, in_use

    def memory_stats(self) -> dict[str, int]:
        return {} if self._free is None else {"bytes_limit": self._free, "bytes_in_use": self._in_use}


@settings(max_examples=25, deadline=None)
@given(st.integers(10**5, 10**8), st.floats(0.1, 1.0))
def test_auto_fills_the_budget_and_does_not_exceed_it(free: int, share: float) -> None:
    config, device = replace(AUTO, memory_utilization=share), Device(free)

    def fits(slots: int) -> bool:
        return memory.plan_memory(SPEC, replace(config, max_num_seqs=slots), 300, int(free * share)).fits

    if not fits(8):
        with pytest.raises(ConfigError, match="memory_utilization"):
            resolve_sizes(config, SPEC, 300, device)
        return
    slots = resolve_sizes(config, SPEC, 300, device).num_slots
    assert slots % 8 == 0 and fits(slots)
    assert slots == MOST_ROWS_ELSEWHERE or not fits(slots + 8)


def test_auto_is_modest_where_memory_is_unknown() -> None:
    assert resolve_sizes(AUTO, SPEC, 300, Device(None)).num_slots == 8


def test_number_that_does_not_fit_the_share_fails_with_the_arithmetic() -> None:
    config = replace(TINY_ENGINE, max_num_seqs=64)
    needed = memory.plan_memory(SPEC, config, 300, None).needed
    assert resolve_sizes(config, SPEC, 300, Device(int(needed / 0.9) + 100)) is config
    with pytest.raises(ConfigError, match=r"64 slots x .*memory_utilization 0.5 of"):
        resolve_sizes(replace(config, memory_utilization=0.5), SPEC, 300, Device(needed))


def test_engine_runs_with_what_auto_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_engine.runner.sizing.MOST_ROWS", {"cpu": 8})
    assert MOST_ROWS["cpu"] > 8
    with XlaBatchEngine(tiny_checkpoint(), None, AUTO) as engine:
        assert engine.max_num_seqs == engine.config.max_num_seqs == engine.scheduler.config.max_num_seqs == 8
        engine.submit([1, 2, 3], request_id="a")
        (output,) = engine.drain()
        assert output.finished


PAGED = replace(TINY_ENGINE, block_size=16, kv_cache_memory_bytes=200_000)


def test_memory_for_pages_becomes_their_number() -> None:
    """An engine with this many blocks allocates the given memory, up to less than a block."""
    config = resolve_sizes(PAGED, SPEC, 300, Device(None))
    assert config.num_blocks is not None and config.kv_cache_memory_bytes is None and config.uses_blocks
    pool = Pool(config.num_blocks, 16, 32)
    cache, rows = jax.eval_shape(
        lambda: (
            make_cache(SPEC, 8, 16, num_blocks=pool.num_blocks),
            pack_rows(make_rows(8, MAX_STOP_TOKEN_IDS, 300, pool)),
        )
    )
    pages = memory.tree_bytes((cache, rows.history))
    assert 0 <= 200_000 - pages < pages / pool.num_blocks
    tables = make_tables(8, TINY.vocab_size, has_blocks=True)
    plan = memory.plan_memory(SPEC, config, 300, None)
    assert plan.pool == pages
    assert plan.slots * plan.slot == memory.tree_bytes((rows, tables)) - memory.tree_bytes(rows.history)


@settings(max_examples=25, deadline=None)
@given(st.integers(10**5, 10**7), st.sampled_from([8, 40, "auto"]))
def test_pages_fill_what_slots_leave_and_no_more_than_slots_could_use(free: int, slots: Any) -> None:
    config, device = replace(PAGED, kv_cache_memory_bytes="auto", max_num_seqs=slots), Device(free)
    try:
        got = resolve_sizes(config, SPEC, 300, device)
    except ConfigError as error:
        assert "19 blocks x" in str(error)  # those of one request
        return
    blocks = got.num_blocks
    assert blocks is not None

    def plan(more: int) -> MemoryPlan:
        return memory.plan_memory(SPEC, replace(got, num_blocks=blocks + more), 300, int(free * 0.9))

    assert plan(0).fits and 19 <= blocks <= 19 * got.num_slots
    assert blocks == 19 * got.num_slots or not plan(1).fits


def test_too_much_or_too_little_memory_for_pages_fails_with_the_arithmetic() -> None:
    block = block_bytes(SPEC, 16)
    with pytest.raises(ConfigError, match=rf"max_model_len 300: 19 blocks x .*Give {19 * block} or more"):
        resolve_sizes(replace(PAGED, kv_cache_memory_bytes=19 * block - 1), SPEC, 300, Device(None))
    free = int(memory.plan_memory(SPEC, replace(TINY_ENGINE, num_blocks=30), 300, None).needed / 0.9) + 2
    assert resolve_sizes(replace(TINY_ENGINE, num_blocks=30), SPEC, 300, Device(free)).num_blocks == 30
    with pytest.raises(
        ConfigError, match=r"\+ 31 blocks x .*\(num_blocks 30\) at most, or fewer slots"
    ) as caught:
        resolve_sizes(replace(PAGED, kv_cache_memory_bytes=31 * block), SPEC, 300, Device(free))
    most = re.search(r"Use kv_cache_memory_bytes (\d+)", str(caught.value))
    assert most is not None
    assert (
        resolve_sizes(replace(PAGED, kv_cache_memory_bytes=int(most[1])), SPEC, 300, Device(free)).num_blocks
        == 30
    )


@pytest.mark.parametrize(
    "wrong", [{"memory_utilization": 0.0}, {"memory_utilization": 1.1}, {"max_num_seqs": "most"}]
)
def test_wrong_sizes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        EngineConfig(**wrong)


def test_undecided_size_says_so() -> None:
    with pytest.raises(ConfigError, match="resolved when an engine starts"):
        _ = AUTO.token_budget


def test_over_asking_fails_at_start_on_the_command_line(tmp_path: Any) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    words = [
        "run",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "--max-num-seqs",
        "100000000",
    ]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 2 and "100000000 slots x" in ran.output, ran.output


LONG = replace(TINY, max_position_embeddings=1 << 20)


def length_of(config: EngineConfig, model: ModelConfig, device: Any) -> EngineConfig:
    return resolve_length(
        config, model, lambda model: make_spec(config, model, jnp.dtype("bfloat16")), device
    )


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_the_length_that_nobody_asked_for_takes_a_quarter_of_the_memory_at_most(share: float) -> None:
    config = replace(TINY_ENGINE, max_model_len=None, memory_utilization=share)
    for free in (10**7, 10**8, 10**9, 10**12):
        found = length_of(config, LONG, Device(free)).context_length(1 << 20)
        budget = int(free * min(share, DEFAULT_SHARE))

        def fits(length: int, budget: int = budget) -> bool:
            spec = make_spec(config, LONG.within(length), jnp.dtype("bfloat16"))
            return memory.plan_memory(spec, config, length, budget).fits

        assert found == DEFAULT_MAX_MODEL_LEN or fits(found)
        assert found == 1 << 20 or not fits(2 * found)


@pytest.mark.parametrize("in_use", [0, 10**8, 9 * 10**8])
def test_the_length_depends_on_the_machine_and_not_on_what_is_free(in_use: int) -> None:
    """Once, free memory entered the fingerprint, and a run could not be resumed after another program took 3 GB."""
    config = replace(TINY_ENGINE, max_model_len=None)
    found = length_of(config, LONG, Device(10**9, in_use))
    assert found == length_of(config, LONG, Device(10**9)) and found.max_model_len
    host = jax.devices("cpu")[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "size", lambda: 10**9)
        patch.setattr(host_memory, "groups", lambda: [(10**10, 7), (2 * 10**9, in_use)])
        assert memory.total_to_each(host, 2) == 5 * 10**8
        patch.setattr(host_memory, "groups", lambda: [(10**8, in_use)])
        assert memory.total_to_each(host, 1) == 10**8


def test_the_size_of_the_memory_decides_no_length_that_bits_depend_on() -> None:
    scaling = RopeScaling(rope_type="dynamic", factor=4.0, original_max_position_embeddings=4096)
    model = replace(LONG, rope_scaling=scaling)
    config = replace(TINY_ENGINE, max_model_len=None)
    assert length_of(config, model, Device(10**12)) == config
    assert length_of(config, TINY, Device(10**12)) == config  # shorter than the default
    asked = replace(config, max_model_len=4096)
    assert length_of(asked, LONG, Device(10**5)) == asked
