"""A model on several devices gives the bits of one device; no float is summed across devices."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support.gguf_files import Kind, write_gguf
from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.tensor_parallel import GOLDEN, MODELS, WIDE, WIDE_MODELS, run
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import ConfigError
from xla_engine.graphs.linear.native import fits
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.runner import memory
from xla_engine.runner.sizing import resolve_sizes
from xla_engine.tools.bench.models import write_checkpoint

FAMILIES = sorted(path.name for path in GOLDEN.iterdir())
Result = dict[int, dict[str, Any]]


def check(results: Result) -> None:
    """The results equal those of one device. Devices gather their parts, and only integers are summed across them."""
    one = results[1]
    assert not any(one["collectives"].values())
    for size, found in results.items():
        assert found["outputs"] == one["outputs"], f"{size} devices"
        assert found["compiles"] == 0 and found["verified"]
        for program, kinds in found["collectives"].items() if size > 1 else ():
            assert set(kinds) <= {"all-gather", "all-reduce"}, program
            assert set(kinds.get("all-reduce", ())) <= {"s32"}, program
            assert kinds or not program.startswith(("decode", "prefill", "verify")), program


@pytest.mark.full
def test_no_bit_depends_on_the_number_of_devices() -> None:
    """The model runs with the C++ products; its three key/value heads are padded on two and on four devices."""
    (results,) = run({"model": "tiny"})
    assert results[1]["products"] == "native"
    check(results)
    for part in ("weights", "cache"):
        assert results[4][part] < results[2][part] < results[1][part]
    assert results[2]["cached"] > 0


@pytest.mark.full
def test_no_bit_depends_on_it_in_float32() -> None:
    """XLA's products run. Of a small model, each device has every weight completely, and the cache of some heads."""
    (results,) = run({"model": "tiny", "dtype": "float32"}, sizes=(1, 2))
    assert results[1]["products"] == "xla"
    check(results)
    assert results[2]["weights"] == results[1]["weights"] and results[2]["cache"] < results[1]["cache"]


@pytest.mark.full
def test_no_bit_depends_on_it_from_a_quantised_file(tmp_path: Path) -> None:
    """With three key/value heads, as SmolLM2 has, one of four devices reads no row of keys."""
    model = replace(TINY, hidden_size=64)
    write_checkpoint(model, random_weights(model, dtype="bfloat16", scale=0.3), tmp_path / "model")
    path = write_gguf(tmp_path / "model", tmp_path / "model.gguf", kind=Kind.Q4_0)
    (results,) = run({"model": str(path), "engine": {"prefill_lanes": (1,)}}, sizes=(1, 4))
    assert results[1]["products"] == "native"
    check(results)


BOTH = (None, "int8")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "quantizations", "sizes"),
    [
        # The others differ in what the tests of one device cover; recurrent layers are the same in int8.
        ("routed", ("int8",), (1, 4)),
        ("recurrent", (None,), (1, 4)),
        ("mamba", (None,), (1, 2)),
        ("convolution", (None,), (1, 2)),
        ("latent", (None,), (1, 4)),
        ("shared_keys", (None,), (1, 4)),
        ("keys_as_values", (None,), (1, 4)),
        ("streams", (None,), (1, 4)),
        *(
            pytest.param(name, BOTH, sizes, marks=pytest.mark.release)
            for name in sorted(MODELS)
            for sizes in ((1, 2), (1, 4))
            if (name, sizes) not in (("mamba", (1, 2)), ("convolution", (1, 2)))
        ),
    ],
    ids=str,
)
def test_no_bit_depends_on_it_in_any_kind_of_layer(
    name: str, quantizations: tuple[str | None, ...], sizes: tuple[int, ...]
) -> None:
    """The C++ operations run: routed experts, recurrent layers, latent attention, two sizes of heads, layers without
    keys, and norms over all heads, in bf16 and int8."""
    model = MODELS[name]
    saves = {"mamba_cache_mode": "align", "mamba_block_size": 32} if model.recurrent is not None else {}
    jobs = [{"model": name, "engine": {"quantization": each} | saves} for each in quantizations]
    if name in ("recurrent", "latent", "shared_keys"):
        jobs.append({"model": name, "engine": {"num_blocks": 80} | saves, "preempts": True})
        quantizations = (*quantizations, None)
    for quantization, results in zip(quantizations, run(*jobs, sizes=sizes), strict=True):
        assert model.recurrent is None or results[1]["cached"] > 0, "from saved states"
        fitting = quantization is None or fits(model, jnp.dtype(jnp.int8), "avx2")
        assert results[1]["products"] == ("native" if fitting else "xla")
        check(results)


@pytest.mark.full
def test_rows_of_an_embedding_in_eight_bits_are_rounded_by_themselves() -> None:
    """They have scales and a multiplier. On one device, too, no multiplication is fused with the sum that follows."""
    (results,) = run({"model": "wide_scaled", "engine": {"quantization": "int8"}}, sizes=(1, 4))
    assert results[1]["products"] == "native"
    check(results)


@pytest.mark.full
@pytest.mark.parametrize(
    "form",
    [{}, pytest.param({"engine": {"num_blocks": 18}}, marks=pytest.mark.release)],
    ids=["slots", "blocks"],
)
def test_what_a_scheduler_does_changes_nothing(form: dict[str, Any]) -> None:
    """Preemption, prompts with a common beginning, drafts and random schedules give the same results on two devices as
    on one."""
    options = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "self_check": True,  # which speculation needs
        **form.get("engine", {}),
    }
    job = {"model": "tiny", "engine": options, "preempts": True, "tokens": 40, "verifies": 30}
    (results,) = run(job, sizes=(1, 2))
    check(results)
    for found in results.values():
        assert found["preemptions"] > 3 and found["cached"] > 0
        assert found["drafted"] > found["accepted"] > 0


XLA = {"engine": {"isa": "none"}}
XLA_INT8 = {"engine": {"isa": "none", "quantization": "int8"}}


@pytest.mark.release
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    """The widths of these models are odd, so the products are XLA's. The models are so small that each device has
    every weight completely, except for experts; heads and their cache are split."""
    forms: list[dict[str, Any]] = [{}, {"dtype": "float32"}, {"engine": {"quantization": "int8"}}]
    forms.append({"dtype": "float32", "engine": {"num_blocks": 80}})
    for results in run(*({"model": name, **form} for form in forms)):
        check(results)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "sizes", "forms"),
    [
        ("wide", (1, 4), [XLA_INT8]),
        pytest.param(
            "wide", (1, 4), [{"dtype": "float32", "engine": {"num_blocks": 80}}], marks=pytest.mark.release
        ),
        *(
            pytest.param(each, (1, 2, 4), [{"dtype": "float32"}, XLA, XLA_INT8], marks=pytest.mark.release)
            for each in sorted(WIDE_MODELS)
        ),
        pytest.param("wide", (1, 2, 4), [{"dtype": "float32", **XLA}], marks=pytest.mark.release),
    ],
)
def test_products_of_xla_where_each_device_has_some_features(
    name: str, sizes: tuple[int, ...], forms: list[dict[str, Any]]
) -> None:
    for results in run(*({"model": name, **form} for form in forms), sizes=sizes):
        assert results[1]["products"] == "xla"
        check(results)
        for part in ("weights", "cache"):
            for fewer, more in itertools.pairwise(sizes):
                assert results[more][part] < results[fewer][part]


def test_each_device_is_accounted_for_by_itself() -> None:
    model = replace(WIDE, vocab_size=798)
    one, four = (ModelSpec(model, jnp.dtype(jnp.bfloat16), devices=devices) for devices in (None, 4))
    assert memory.kv_bytes_per_token(four) * 4 == memory.kv_bytes_per_token(one)
    norms = 4 * (2 * model.num_hidden_layers + 1) * model.hidden_size
    padding = 2 * 2 * 2 * model.hidden_size  # of the vocabulary of 798: two rows, of embedding and head
    assert 4 * (memory.weights_bytes(four) - norms) == memory.weights_bytes(one) - norms + padding


def test_small_weights_are_accounted_for_on_every_device() -> None:
    one, four = (ModelSpec(TINY, jnp.dtype(jnp.float32), devices=devices) for devices in (None, 4))
    assert memory.weights_bytes(four) == memory.weights_bytes(one)
    assert memory.kv_bytes_per_token(four) * 3 == memory.kv_bytes_per_token(one)


def test_devices_of_a_cpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10**9
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)
    config = EngineConfig(max_num_seqs="auto", tensor_parallel_size=4, max_model_len=300)

    class Cpu:
        platform = "cpu"

    spec = ModelSpec(TINY, jnp.dtype(jnp.bfloat16), devices=4)
    needed = memory.plan_memory(spec, replace(config, max_num_seqs=64), 300, None).needed
    free = int(4 * needed / 0.9) + 100
    assert resolve_sizes(config, spec, 300, Cpu()).max_num_seqs == 64
    free //= 2
    assert resolve_sizes(config, spec, 300, Cpu()).num_slots < 64


def test_too_few_devices_are_an_error_with_the_remedy() -> None:
    config = replace(TINY_ENGINE, tensor_parallel_size=64)
    remedy = ".*device_count=64.*jax_num_cpu_devices" if jax.default_backend() == "cpu" else ""
    with pytest.raises(ConfigError, match=f"64 needs as many devices{remedy}"):
        XlaBatchEngine(tiny_checkpoint(), None, config)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        EngineConfig(tensor_parallel_size=0)


def test_options_of_older_files_stay_what_they_are() -> None:
    assert "tensor_parallel_size" not in EngineConfig().options()
    assert EngineConfig(tensor_parallel_size=2).options()["tensor_parallel_size"] == 2
