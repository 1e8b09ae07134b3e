"""`kv_cache_dtype="int8"` keeps every law in half the memory, and the checks detect planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from tests.graphs.test_hybrid import MODEL as HYBRID
from tests.support.engine_faults import bits
from tests.support.instruction_sets import NATIVE_ISAS
from tests.support.models import TINY, TINY_ENGINE
from tests.support.tensor_parallel import run as run_parallel
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.environment import embedded_model_directory
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.levels import across_configurations, run_together, table
from xla_engine.equivalence.verify import verify
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import tree_bytes
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.runner.backends import make_spec
from xla_engine.runner.memory import kv_bytes_per_token
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.bench.models import write_checkpoint

pytestmark = pytest.mark.skipif(not NATIVE_ISAS, reason="no C++ attention on this platform")
MakeEngine = Callable[..., XlaBatchEngine]
KV8 = replace(TINY_ENGINE, kv_cache_dtype="int8")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
BLOCKS = replace(KV8, num_blocks=16, block_size=64, speculative_config=DRAFTS)
WIDE = replace(TINY, hidden_size=64, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
WINDOWS = replace(
    WIDE,
    head_dim=64,
    sliding_window=20,
    layer_types=("sliding_attention", "full_attention"),
    attn_logit_softcapping=5.0,
)
ONE_ORDER = [each.name for each in available() if each.name in ("avx512_bf16", "avx512", "avx2")]
FULL = pytest.mark.full
PARAMS = SamplingParams(temperature=0.8, max_tokens=24, logprobs=0, seed=7, ignore_eos=True)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        pytest.param(KV8, TINY, id="slots"),
        pytest.param(BLOCKS, WIDE, id="blocks and drafts", marks=FULL),
        pytest.param(KV8, WINDOWS, id="windows", marks=FULL),
        pytest.param(KV8, HYBRID, id="recurrent layers beside", marks=FULL),
        pytest.param(replace(KV8, quantization="int8"), WIDE, id="int8 weights", marks=FULL),
    ],
)
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_law_1_holds(make_engine: MakeEngine, config: EngineConfig, model: ModelConfig, isa: str) -> None:
    engine = make_engine(replace(config, isa=isa), model=model)
    assert {store.keys.dtype for store in engine.runner.state.cache if hasattr(store, "keys")} == {
        jnp.dtype(jnp.int8)
    }
    assert engine.self_check is not None and engine.self_check.ok
    report = verify(engine, requests=40, schedules=2, seed=3, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())
    assert report.compiles_after_warmup == 0


@FULL
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_configurations_change_no_bit(make_engine: MakeEngine, isa: str) -> None:
    """Other widths, lanes, chunks, lags, and prefill in place of decode change no bit."""
    engine = make_engine(replace(KV8, isa=isa, self_check=False), model=WIDE)  # the check compares fewer
    results = list(across_configurations(engine, requests=30, seed=5))
    assert len(results) == 11 and all(result.compared.tokens > 100 for result in results)
    assert all(result.compared.ok for result in results), "\n".join(table(results))


@FULL
@pytest.mark.skipif(len(ONE_ORDER) < 2, reason="one such instruction set here")
def test_instruction_sets_give_the_same_bits(make_engine: MakeEngine) -> None:
    results = []
    for isa in ONE_ORDER:
        engine = make_engine(replace(KV8, isa=isa), model=WIDE)
        found = run_together(engine, draw_cases(engine, 60, seed=4))
        results.append({name: (each.token_ids, each.logprobs) for name, each in found.items()})
    assert results.count(results[0]) == len(results)


@pytest.mark.full
def test_preempted_and_extended_requests_are_those_of_one_run(make_engine: MakeEngine) -> None:
    """Cells move to the host and back, or are computed again from the same tokens; a prefix is read from a slot."""
    engine = make_engine(replace(KV8, keep_finished=4), model=WIDE)
    prompt = [3 + k % 190 for k in range(70)]

    def answer(outputs: list[Any]) -> bytes:
        (output,) = [each for each in outputs if each.finished]
        return bits(output.outputs[0])

    engine.submit(prompt, PARAMS, request_id="whole")
    expected = answer(engine.drain())
    assert {"park", "recompute"} <= set(engine.ways_to_preempt)
    for how in engine.ways_to_preempt:
        engine.submit(prompt, PARAMS, request_id=how)
        for _ in range(12):
            engine.step()
        assert engine.preempt(how, how=how)
        assert answer(engine.drain()) == expected
    assert engine.stats().cached_tokens > 0
    engine.submit(prompt, replace(PARAMS, max_tokens=9), request_id="part")
    engine.drain()
    engine.extend("part", 24 - 9)
    assert answer(engine.drain()) == expected


@FULL
def test_draft_models_change_no_bit(make_engine: MakeEngine, tmp_path: Path) -> None:
    write_checkpoint(WIDE, random_weights(WIDE, dtype="bfloat16", seed=1, scale=0.3), tmp_path)
    drafting = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    results, engines = [], []
    for speculation in (None, drafting):
        config = replace(KV8, speculative_config=speculation)
        with XlaBatchEngine.from_pretrained(tmp_path, config) as engine:
            results.append(
                {name: bits(each) for name, each in run_together(engine, draw_cases(engine, 30, 6)).items()}
            )
            engines.append(engine.stats())
    assert results[0] == results[1] and engines[1].accepted_tokens > 0


@FULL
def test_no_bit_depends_on_the_number_of_devices() -> None:
    (results,) = run_parallel({"model": "wide", "engine": {"kv_cache_dtype": "int8"}}, sizes=(1, 2))
    assert results[1]["outputs"] == results[2]["outputs"] and results[2]["cache"] < results[1]["cache"]


# -- faults ---------------------------------------------------------------------------------------------------------

decode, prefill = NativeAttention.attend_decode, NativeAttention.attend_prefill
KEY_SCALES, VALUE_SCALES = -2, -1  # vectors behind sixteen keys


def neighbours_scales(self: Any, layer: Any, qkv: Any, call: Any, **rows: Any) -> Any:
    """Plant a fault: keys are read with the scales of the neighbouring slot."""
    layer, _ = decode(self, layer, qkv, call, **rows)
    scales = layer.keys[:, :, :, :, KEY_SCALES]
    beside = layer._replace(keys=layer.keys.at[:, :, :, :, KEY_SCALES].set(jnp.roll(scales, 1, axis=1)))
    return layer, decode(self, beside, qkv, call, **rows)[1]


def stale_scales(self: Any, layer: Any, qkv: Any, call: Any, lanes: Any) -> Any:
    """A prompt's values keep the scales that the slot's previous owner wrote."""
    before = layer.keys[:, :, :, :, VALUE_SCALES]
    layer, out = prefill(self, layer, qkv, call, lanes)
    return layer._replace(keys=layer.keys.at[:, :, :, :, VALUE_SCALES].set(before)), out


def stale_cells(self: Any, layer: Any, qkv: Any, call: Any, lanes: Any) -> Any:
    """The last position of a chunk is not written."""
    short = lanes._replace(size=jnp.maximum(lanes.size - 1, 0))
    written, _ = prefill(self, layer, qkv, call, short)
    return written, prefill(self, layer, qkv, call, lanes)[1]


@FULL
@pytest.mark.parametrize(
    ("name", "fault"),
    [("attend_decode", neighbours_scales), ("attend_prefill", stale_scales), ("attend_prefill", stale_cells)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_cell_is_caught_by_verify(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, name: str, fault: Any
) -> None:
    config = replace(KV8, self_check=False, enable_prefix_caching=False, preemption=False)
    assert verify(make_engine(config), requests=20, schedules=1, seed=11).ok
    monkeypatch.setattr(NativeAttention, name, fault)
    assert not verify(make_engine(config), requests=20, schedules=1, seed=11).ok


# -- the option -----------------------------------------------------------------------------------------------------


def test_it_takes_half_the_memory(make_engine: MakeEngine) -> None:
    """A head of 64 takes two times 64 bytes and two scales instead of two times 128, and all reports agree."""
    model, dtype = replace(WIDE, head_dim=64), jnp.dtype(jnp.bfloat16)
    small, large = (
        kv_bytes_per_token(make_spec(replace(TINY_ENGINE, kv_cache_dtype=kind), model, dtype))
        for kind in ("int8", "auto")
    )
    assert (small, large) == (2 * 2 * (2 * 64 + 8), 2 * 2 * (2 * 128))
    reports = [
        inspect_model(embedded_model_directory(), EngineConfig(kv_cache_dtype=kind))
        for kind in ("int8", "auto")
    ]
    eight, sixteen = (each.memory for each in reports)
    assert eight is not None and sixteen is not None and reports[0].ok
    for name in ("kv_bytes_per_token", "slot"):
        assert 0.5 * sixteen[name] <= eight[name] < 0.6 * sixteen[name]
    engine = make_engine(KV8)
    assert tree_bytes(engine.runner.state.cache) == 8 * 512 * engine.runner.kv_bytes_per_token


@pytest.mark.parametrize(
    ("options", "dtype", "message"),
    [
        ({}, "float32", r"needs the C\+\+ attention in bfloat16.*Leave it out"),
        ({"attention_backend": "xla"}, "bfloat16", r"needs the C\+\+ attention"),
        ({"isa": "none"}, "bfloat16", r"needs the C\+\+ attention"),
        ({"num_blocks": 8}, "bfloat16", "block_size must be one of 64, 128, 256 here, not 16"),
        ({"kv_cache_dtype": "fp8"}, "bfloat16", "kv_cache_dtype must be one of auto, int8, not 'fp8'"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    make_engine: MakeEngine, options: dict[str, Any], dtype: str, message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        make_engine(replace(KV8, **options), dtype=dtype)


def test_files_of_another_cache_are_refused_by_name(make_engine: MakeEngine) -> None:
    eight, sixteen = (
        make_engine(replace(TINY_ENGINE, kv_cache_dtype=kind, self_check=False)).identity()
        for kind in ("int8", "auto")
    )
    assert "kv_cache_dtype" not in sixteen.config, "files from before the option stay valid"
    (difference,) = sixteen.differences(eight)
    assert "kv_cache_dtype" in difference and "int8" in difference
