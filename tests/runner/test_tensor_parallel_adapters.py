"""Adapters of a model on several devices: the same bits as on one device; no float is summed across devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import TINY, TINY_ENGINE
from tests.support.tensor_parallel_adapters import run
from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.lora.form import LoraForm
from xla_engine.runner.adapters import lora_form

Result = dict[int, dict[str, Any]]


def check(results: Result) -> None:
    one = results[1]
    outputs = one["outputs"]
    assert len(outputs) == 12
    assert all(outputs[f"0/{index}"] != outputs[f"1/{index}"] for index in range(6)), (
        "adapters change what comes"
    )
    for size, found in results.items():
        assert found["outputs"] == one["outputs"], f"{size} devices"
        assert found["compiles"] == 0 and found["checked"]
        for program, kinds in found["collectives"].items() if size > 1 else ():
            assert set(kinds) <= {"all-gather", "all-reduce"}, program
            assert set(kinds.get("all-reduce", ())) <= {"s32"}, program
        assert not found["collectives"]["write_adapter"]


@pytest.mark.full
def test_no_bit_depends_on_the_number_of_devices() -> None:
    """The three key/value heads are padded on two and on four devices."""
    (results,) = run({"model": "tiny"})
    assert results[1]["products"] == "native"
    check(results)
    assert results[4]["weights"] < results[2]["weights"] < results[1]["weights"]


@pytest.mark.release
@pytest.mark.parametrize(
    "job",
    [
        {"model": "wide"},
        {"model": "biased"},
        {"model": "routed"},
        {"model": "shared_keys"},
        {"model": "streams"},
        {"model": "wide", "engine": {"quantization": "int8"}},
        {"model": "tiny", "engine": {"num_blocks": 18, "self_check": True}},
        {"model": "wide", "dtype": "float32", "engine": {"isa": "none"}},
    ],
    ids=str,
)
def test_no_bit_depends_on_it_in_other_engines(job: dict[str, Any]) -> None:
    """The engines have whole tasks of features, biases, experts, two sizes of heads and layers without keys,
    several streams, eight bits, blocks, a start-up check with an adapter, or XLA's products."""
    (results,) = run(job)
    assert (results[1]["products"] == "native") is (job.get("dtype") is None)
    check(results)


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(-1, 79), min_size=16 * width, max_size=16 * width), min_size=1, max_size=4
        )
    ),
    st.booleans(),
)
def test_a_device_has_the_features_that_it_is_given(rows: list[list[int]], packed: bool) -> None:
    form = LoraForm(1, 4, np.dtype(np.float32), packed=packed)
    up = np.random.default_rng(0).standard_normal((4, 80), np.float32)
    found = form.stored_rows(form.stored(up), np.array(rows))
    width = len(rows[0])
    for device, own in enumerate(rows):
        mine = np.where(np.array(own) < 0, 0, up[:, own])
        assert np.array_equal(found[:, device * width : (device + 1) * width], form.stored(mine))


def test_heads_that_are_no_whole_vectors_are_refused() -> None:
    model = replace(TINY, head_dim=24, num_attention_heads=4, num_key_value_heads=2)
    config, dtype = replace(TINY_ENGINE, enable_lora=True), np.dtype(np.float32)
    assert lora_form(config, model, dtype, NativeProducts("avx512")) is not None
    several: EngineConfig = replace(config, tensor_parallel_size=2)
    wide = replace(
        model, head_dim=32, layer_types=("sliding_attention", "full_attention"), global_head_dim=24
    )
    for each in (model, wide):
        with pytest.raises(ConfigError, match="multiples of 16"):
            lora_form(several, each, dtype, NativeProducts("avx512"))
