"""Every instruction set of this machine can be selected, keeps the laws, and is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from tests.support.instruction_sets import NATIVE_ISAS
from tests.support.models import TINY, TINY_ENGINE
from xla_engine.config import ISAS, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import requested_isa
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.levels import across_configurations, run_together, table
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.runner import backends
from xla_engine.runner.native_library import widening
from xla_engine.runner.native_library.build import ATTENTION
from xla_engine.runner.native_library.instruction_sets import INSTRUCTION_SETS, available
from xla_engine.runner.native_library.needed import native_parts

WIDE = replace(TINY, hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
ONE_ORDER = ("avx512_bf16", "avx512", "avx2")
HERE = [each.name for each in available()]
LEVELS = [
    pytest.param(isa, marks=[pytest.mark.release] if place else [])
    for place, isa in enumerate([*HERE, "none"])
]


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.full)])
@pytest.mark.parametrize("isa", LEVELS)
def test_law_1_holds_in_every_instruction_set(
    make_engine: Callable[..., XlaBatchEngine], isa: str, quantization: str | None
) -> None:
    engine = make_engine(replace(TINY_ENGINE, isa=isa, quantization=quantization))
    found = engine.runner.platform
    assert engine.self_check is not None
    if isa == "none":
        assert engine.runner.isa is None and (found["attention"], found["linear"]) == ("xla", "xla")
    else:
        assert engine.runner.isa == isa and engine.self_check.promise.endswith(f"({isa})")
    report = verify(engine, requests=40, schedules=2, seed=2, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())
    assert report.compiles_after_warmup == 0


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.release)])
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_configurations_change_no_bit_in_any_instruction_set(
    make_engine: Callable[..., XlaBatchEngine], isa: str, quantization: str | None
) -> None:
    """Other widths, lanes, chunks, lags, and prefill in place of decode change no bit."""
    config = replace(
        TINY_ENGINE, isa=isa, quantization=quantization, self_check=False
    )  # which compares fewer
    engine = make_engine(config, model=WIDE)
    assert engine.runner.has_one_row_code and engine.runner.isa == isa
    results = list(across_configurations(engine, requests=30, seed=5))
    assert len(results) == 11 and all(result.compared.tokens > 100 for result in results)
    assert all(result.compared.ok for result in results), "\n".join(table(results))


@pytest.mark.full
@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.release)])
def test_instruction_sets_that_sum_in_one_order_give_the_same_bits(
    make_engine: Callable[..., XlaBatchEngine], quantization: str | None
) -> None:
    """At least on one machine: XLA compiles its part for the processor (findings/same_bits.md)."""
    results = []
    for isa in (isa for isa in HERE if isa in ONE_ORDER):
        engine = make_engine(replace(TINY_ENGINE, isa=isa, quantization=quantization), model=WIDE)
        found = run_together(engine, draw_cases(engine, 60, seed=4))
        results.append({name: (each.token_ids, each.logprobs) for name, each in found.items()})
    assert results.count(results[0]) == len(results)


@pytest.mark.full
@pytest.mark.parametrize(
    "experts",
    [
        None,
        pytest.param(
            RoutedExperts(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=96),
            marks=pytest.mark.release,
        ),
    ],
    ids=["dense", "experts"],
)
def test_a_set_has_the_same_bits_by_pairs_and_widened(
    make_engine: Callable[..., XlaBatchEngine], experts: RoutedExperts | None
) -> None:
    """Whichever numbers of rows widen: what the first start finds faster depends on the machine."""
    if widening.ISA not in HERE:
        pytest.skip(f"needs a processor with {widening.ISA}")
    config = replace(TINY_ENGINE, isa=widening.ISA, self_check=False)
    engine = make_engine(config, model=replace(WIDE, experts=experts))
    results = []
    for rows in ((), widening.ALL_ROWS, (3, 6, 10)):
        before = widening.widen("bf16", rows)
        try:
            found = run_together(engine, draw_cases(engine, 60, seed=4))
        finally:
            widening.widen("bf16", before)
        results.append({name: (each.token_ids, each.logprobs) for name, each in found.items()})
    assert results.count(results[0]) == len(results)


def test_an_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="isa must be one of auto, amx"):
        EngineConfig(isa="mmx")
    monkeypatch.setenv("XLA_ENGINE_ISA", "mmx")
    with pytest.raises(ConfigError, match="XLA_ENGINE_ISA must be one of auto, amx"):
        requested_isa()
    assert requested_isa("avx2") == "avx2"
    with pytest.raises(ConfigError, match=r"^isa must be one of auto, amx"):
        requested_isa("avx3")
    assert {*ISAS} == {"auto", "none", *(each.name for each in INSTRUCTION_SETS)}


def test_an_instruction_set_of_other_machines_is_refused(make_engine: Callable[..., XlaBatchEngine]) -> None:
    foreign = next(each.name for each in INSTRUCTION_SETS if each.name not in HERE)
    with pytest.raises(
        ConfigError, match=f"isa '{foreign}' is not supported on this machine; use one of auto, "
    ):
        make_engine(replace(TINY_ENGINE, isa=foreign))


def test_the_environment_chooses_where_the_option_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_ENGINE_ISA", "none")
    dtype = jnp.dtype(jnp.bfloat16)
    assert backends.make_spec(TINY_ENGINE, TINY, dtype).isa is None
    assert backends.make_spec(replace(TINY_ENGINE, isa=HERE[0]), TINY, dtype).isa == HERE[0]


def test_vectors_serve_models_whose_widths_are_not_whole_tiles(
    monkeypatch: pytest.MonkeyPatch, make_engine: Callable[..., XlaBatchEngine]
) -> None:
    """On a machine with matrix tiles (pretended here), the best instruction set that fits the model is used."""
    tiles = next(each for each in INSTRUCTION_SETS if each.name == "amx")
    vectors = next(each for each in available() if each.name != "amx")
    monkeypatch.setattr(backends, "available", lambda: (tiles, vectors))
    monkeypatch.delenv("XLA_ENGINE_ISA", raising=False)
    engine = make_engine(replace(TINY_ENGINE, self_check=False))
    assert engine.runner.has_one_row_code and engine.runner.isa == vectors.name
    config = EngineConfig()
    for model, stored, isa in (
        (TINY, jnp.bfloat16, vectors.name),
        (WIDE, jnp.bfloat16, "auto"),
        (WIDE, jnp.int8, "auto"),
        (replace(WIDE, intermediate_size=224), jnp.int8, "auto"),  # no set has its groups of 64
        (TINY, jnp.float32, "auto"),
    ):
        assert backends.isa_of_model(config, model, jnp.dtype(stored), {"sampler"}) == isa
    assert backends.isa_of_model(replace(config, isa="amx"), TINY, jnp.dtype(jnp.bfloat16), ()) == "amx"


@pytest.mark.parametrize(
    ("options", "dtype", "needed"),
    [
        ({}, "bfloat16", {"attention_bf16"}),
        ({}, "float32", {"attention_f32"}),
        ({"quantization": "int8"}, "bfloat16", {"attention_bf16"}),
        ({"kv_cache_dtype": "int8"}, "bfloat16", {"attention_int8"}),
        ({"bits": "portable"}, "bfloat16", {"attention_bf16"}),
    ],
)
def test_a_model_needs_the_attention_for_the_dtype_of_its_cache(
    options: dict[str, Any], dtype: str, needed: set[str]
) -> None:
    config = EngineConfig(**options)
    parts = native_parts(config, TINY, dtype)
    assert parts & ATTENTION == needed and "sampler" in parts


def test_what_was_written_before_instruction_sets_had_names_stays_valid() -> None:
    assert "isa" not in EngineConfig().options()
    assert EngineConfig(isa="none").options()["isa"] == "none"
