"""The audit for bits="portable": what it refuses, which families pass, and the effect of a barrier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support.instruction_sets import NAMES
from tests.support.models import TINY, tiny_checkpoint
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs import portable
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import RopeScaling, RoutedExperts
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.portable import ISAS, refusals
from xla_engine.runner.runner import Runner

FLOATS = jax.ShapeDtypeStruct((4, 8), jnp.float32)
FUSED = "a product that a sum may be fused with (an optimization_barrier keeps them apart)"


def found(function: Callable[..., Any], *given: Any) -> list[str]:
    return refusals(jax.jit(function).trace(*(given or (FLOATS, FLOATS))).jaxpr.jaxpr)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda a, b: jnp.exp(a) + b, "'exp' of floats outside of the C++ kernels"),
        (lambda a, b: a * lax.rsqrt(b), "'rsqrt' of floats outside of the C++ kernels"),
        (lambda a, b: a / b, "'div' of floats outside of the C++ kernels"),
        (lambda a, b: jnp.sum(a + b, axis=1), "'reduce_sum' of floats outside of the C++ kernels"),
        (lambda a, b: a @ b.T, "'dot_general' of floats outside of the C++ kernels"),
        (lambda a, b: a.at[0].add(b[0]), "'scatter-add' of floats outside of the C++ kernels"),
        (
            lambda a, b: (a + b).astype(jnp.int32),
            "'convert_element_type' of floats outside of the C++ kernels",
        ),
        (lambda a, b: a * b + a, FUSED),
        (lambda a, b: a - (a * b).reshape(8, 4).T, FUSED),
        (lambda a, b: jax.jit(lambda x: x * b)(a) + b, FUSED),
        (lambda a, b: jax.jit(lambda x: x + b)(a * b), FUSED),
        (lambda a, b: lax.cond(a[0, 0] > 0, lambda: a * b, lambda: a) + b, FUSED),
        (lambda a, b: lax.fori_loop(0, 3, lambda _, x: x + b, a), FUSED),
        (lambda a, b: a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16), "'add' of bfloat16"),
        (
            lambda a, b: jax.ffi.ffi_call("xla_engine_lora_bf16_avx2", FLOATS)(a),
            "the kernel xla_engine_lora_bf16_avx2, whose bits are not known on every processor",
        ),
        (
            lambda a, b: jax.ffi.ffi_call("xla_engine_linear_bf16_amx", FLOATS)(a),
            "the kernel xla_engine_linear_bf16_amx, whose bits are not known on every processor",
        ),
    ],
)
def test_what_processors_may_round_in_other_ways_is_refused(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], wrong: str
) -> None:
    monkeypatch.setattr(portable, "barriers_hold", lambda: True)
    assert found(function) == [wrong]


def test_what_every_processor_rounds_in_one_way_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "barriers_hold", lambda: True)

    def moved(a: jax.Array, b: jax.Array, at: jax.Array) -> Any:
        apart = lax.optimization_barrier(a * b)
        rows = jnp.where(a > b, apart, b)[at]
        return rows + 1, (rows - b[0]) * 2, b.at[at].set(rows), jnp.concatenate([a, b]).astype(jnp.bfloat16)

    assert found(moved, FLOATS, FLOATS, jax.ShapeDtypeStruct((4,), jnp.int32)) == []
    counted = lambda at: jnp.cumsum(at) * at + at // 3  # noqa: E731
    assert found(counted, jax.ShapeDtypeStruct((4,), jnp.int32)) == []
    for isa in ISAS:
        assert (
            found(lambda a, isa=isa: jax.ffi.ffi_call(f"xla_engine_linear_int8_{isa}", FLOATS)(a) + a, FLOATS)
            == []
        )


def test_a_barrier_keeps_a_product_from_the_sum_behind_it() -> None:
    """Else XLA rounds both as one where the processor can, and the audit counts no barrier."""
    assert portable.barriers_hold() or jax.__version_info__ < (0, 12)


def test_a_barrier_that_xla_removes_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "barriers_hold", lambda: False)
    (why,) = found(lambda a, b: lax.optimization_barrier(a * b) + a)
    assert "removes barriers; use a newer one" in why


def test_products_that_need_no_rounding_may_be_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of int8 values and bfloat16 scales, whatever becomes of barriers; and fusing changes none of their bits."""
    monkeypatch.setattr(portable, "barriers_hold", lambda: False)

    def short(a: jax.Array, b: jax.Array) -> Any:
        values, scales = a.astype(jnp.int8), jnp.repeat(b.astype(jnp.bfloat16), 2, axis=0)
        exact = lax.optimization_barrier(values.astype(jnp.float32) * scales.astype(jnp.float32)[:4])
        return (exact + 1) * 0.125 + exact

    assert found(short, jax.ShapeDtypeStruct((4, 8), jnp.int8), FLOATS) == []
    for changed in (
        lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32) * b + 1,
        lambda a, b: (a + 1) * 0.3 + b,
        lambda a, b: (
            a.astype(jnp.float16).astype(jnp.float32) * b.astype(jnp.float16).astype(jnp.float32) + 1
        ),
    ):
        assert len(found(changed)) == 1
    draw = np.random.default_rng(0)
    values = draw.integers(-127, 128, (64, 64), np.int8)
    scales, c = (draw.standard_normal((64, 64), np.float32) for _ in range(2))
    scales = scales.astype(jnp.bfloat16)
    fused = jax.jit(lambda a, b, c: a.astype(jnp.float32) * b.astype(jnp.float32) + c)(values, scales, c)
    np.testing.assert_array_equal(np.asarray(fused), values * scales.astype(np.float32) + c)


WIDE = replace(TINY, hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
LONG = RopeScaling(
    rope_type="longrope",
    factor=4.0,
    original_max_position_embeddings=128,
    short_factor=(1.0,) * 8,
    long_factor=(1.5,) * 8,
)
ADMITTED = {
    "llama": WIDE,
    "qwen2": replace(WIDE, qkv_bias=True, tie_word_embeddings=True),
    "qwen3": replace(WIDE, qk_norm="head"),
    "mistral": replace(WIDE, layer_types=("sliding_attention",) * 2, sliding_window=64),
    "phi3": replace(WIDE, rope_scaling=LONG),
}
REFUSED = {
    "gemma": replace(WIDE, post_norm=True, embedding_multiplier=8.0, hidden_act="gelu_tanh"),
    "soft cap": replace(WIDE, final_logit_softcapping=30.0),
    "experts": replace(
        WIDE, experts=RoutedExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    ),
    "norm over heads": replace(WIDE, qk_norm="all"),
    "layer norm": replace(WIDE, layer_norm=True),
}
CONFIG = EngineConfig(
    bits="portable", max_num_seqs=8, max_model_len=200, prefill_lanes=(2,), self_check=False
)


class Audited(Exception):
    """All programs passed; nothing was compiled."""


def audit(monkeypatch: pytest.MonkeyPatch, model: ModelConfig, **options: Any) -> None:
    """Start a runner up to the audit of its programs. Raises ConfigError if the audit refuses one, else Audited."""

    def only_audit(inventory: Inventory, programs: list[Program], **_: Any) -> None:
        for _lowered in inventory._lower([(program, None) for program in programs]):
            pass
        raise Audited

    monkeypatch.setattr(Inventory, "compile", only_audit)
    checkpoint = tiny_checkpoint(model=model)
    Runner(checkpoint.config, checkpoint.weights, checkpoint.dtype, replace(CONFIG, **options))


needs_kernels = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not {*NAMES} & {*ISAS}, reason="needs a CPU with one of these sets"
)


@needs_kernels
@pytest.mark.parametrize("name", default(ADMITTED))
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"quantization": "int8", "num_blocks": 20}, marks=pytest.mark.full)],
    ids=["bf16", "int8"],
)
def test_families_whose_sums_are_all_in_cpp_are_admitted(
    monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(Audited):
        audit(monkeypatch, ADMITTED[name], **options)


@needs_kernels
@pytest.mark.parametrize("name", default(REFUSED))
def test_other_families_are_refused_by_what_they_compute(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ConfigError, match=r"bits 'portable' cannot run this model .* Use bits 'machine'"):
        audit(monkeypatch, REFUSED[name])
