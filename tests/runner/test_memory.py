"""Memory accounting: the figures are those of the real engine, and an engine that can never fit is refused with the
calculation."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import xla_engine.runner.memory as memory
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.runner.memory_plan import MemoryPlan, check_memory
from xla_engine.tools.bench.models import LLAMA_3_2_1B
from xla_engine.utils import host_memory
from xla_engine.utils.sizes import size

BF16 = jnp.dtype(jnp.bfloat16)


def spec_of(model: ModelConfig = TINY) -> ModelSpec:
    return ModelSpec(model, BF16)


def test_weights_are_those_of_the_checkpoint() -> None:
    leaves = tiny_checkpoint().weights.values()
    assert memory.weights_bytes(spec_of()) == sum(leaf.nbytes for leaf in leaves)


def test_a_token_of_llama_3_2_1b_costs_what_its_card_says() -> None:
    spec = spec_of(LLAMA_3_2_1B)
    assert memory.kv_bytes_per_token(spec) == 16 * 2 * 8 * 64 * 2  # layers, k and v, heads, Dh, bf16
    assert memory.weights_bytes(spec) == pytest.approx(2.47e9, rel=0.01)


def test_slots_are_what_the_engine_allocates(tiny: XlaBatchEngine) -> None:
    runner, spec = tiny.runner, tiny.runner.spec
    state = memory.tree_bytes((*runner.state.donated, runner.state.tables))
    rows = tiny.config.device_rows
    assert rows * memory.slot_bytes(spec, runner.context_length) == state


@pytest.mark.parametrize("fixture", ["tiny", "embedded"])
def test_the_workspace_covers_every_graph(fixture: str, request: pytest.FixtureRequest) -> None:
    engine = request.getfixturevalue(fixture)
    spec, rows = engine.runner.spec, engine.config.device_rows
    temp = {report.name: report.temp_bytes for report in engine.inventory_report()}
    if tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11):
        temp.pop("copy_span", None)  # there XLA:CPU copies a cache before it writes into it
    for name, taken in temp.items():
        limit = rows * memory.scratch_bytes(spec) + memory.workspace_bytes(spec, engine.config)
        assert taken <= limit, name


def plan(available: int | None, **changes: Any) -> MemoryPlan:
    fields = {"weights": 1000, "slot": 7, "scratch": 3, "slots": 16, "workspace": 40}
    return MemoryPlan(**fields | changes, available=available)


@given(st.integers(0, 2000), st.integers(1, 30), st.integers(1, 64))
def test_as_many_slots_as_are_said_fit_and_no_more(available: int, slot: int, slots: int) -> None:
    made = plan(available, slot=slot, scratch=0, slots=slots)
    most = made.most_slots
    assert most is not None and made.fits == (slots <= most and available >= 1040)
    assert not most or replace(made, slots=most).fits
    assert not replace(made, slots=most + 1).fits


@pytest.mark.parametrize(
    ("available", "words"),
    [
        (
            1199,
            ["max_num_seqs 15", "weights 1 kB + 16 slots x (7 B + 3 B scratch) + workspace 40 B = 1.2 kB"],
        ),
        (1100, ["smaller max_model_len", "8 slots"]),
        (900, ["smaller model", "of 900 B available"]),
    ],
)
def test_never_fit_is_told_with_the_arithmetic_and_a_remedy(available: int, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(plan(available))
    for word in words:
        assert word in str(caught.value)


def test_what_fits_or_is_unknown_passes() -> None:
    check_memory(plan(1200))
    check_memory(plan(None))
    assert plan(None).most_slots is None and "available" not in plan(None).arithmetic()


def test_an_engine_that_cannot_fit_does_not_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10**6)
    with pytest.raises(ConfigError, match=r"does not fit: weights .* of 1 MB"):
        XlaBatchEngine(tiny_checkpoint(), None, replace(TINY_ENGINE, max_num_seqs=10**4))


def test_an_accelerator_tells_what_xla_has_left() -> None:
    def device(stats: dict[str, int] | None) -> Any:
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    assert memory.available_bytes(device({"bytes_limit": 100, "bytes_in_use": 30})) == 70
    assert memory.available_bytes(device({"bytes_limit": 100})) == 100
    assert memory.available_bytes(device({})) is None and memory.available_bytes(device(None)) is None


def test_a_control_group_limits_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimpleNamespace(platform="cpu")
    monkeypatch.setattr(host_memory, "_GROUPS", ((str(tmp_path), "limit", "used", "inactive_file"),))
    everything = memory.available_bytes(host)
    assert everything is not None and everything > 10**6
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\n")
    (tmp_path / "used").write_text("1000\n")
    (tmp_path / "limit").write_text("5000\n")
    assert memory.available_bytes(host) == 5000 - (1000 - 300)
    (tmp_path / "limit").write_text("max\n")
    unlimited = memory.available_bytes(host)
    assert unlimited is not None and unlimited > 10**6


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2_470_000_000, "2.47 GB")]
)
def test_sizes_in_words(count: int, text: str) -> None:
    assert size(count) == text
    assert re.fullmatch(r"[\d.]+ \w+", text)


def test_device_rows_are_what_is_counted() -> None:
    few = memory.plan_memory(spec_of(), EngineConfig(max_num_seqs=2), 512, None)
    assert few.slots == 8 and few.needed == few.weights + 8 * (few.slot + few.scratch) + few.workspace
