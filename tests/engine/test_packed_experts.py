"""An engine that keeps routed experts in the encoding of their file has every bit of one that dequantises them.

With rows in eight bits it has other bits, which are the same on every instruction set and keep every law.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.engine.test_gguf_weights import results
from tests.support.gguf_files import Kind, write_gguf, write_qwen3_moe
from tests.support.instruction_sets import NAMES, NATIVE_ISAS
from tests.support.models import TINY_ENGINE
from tests.support.quantised import write_gpt_oss
from tests.support.tensor_parallel import run as run_parallel
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.equivalence.verify import verify
from xla_engine.errors import CheckpointError
from xla_engine.graphs.ops.coded import coded_form
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.weights import StoredWeights
from xla_engine.runner.native_library.build import packer, register

pytestmark = pytest.mark.skipif(not NATIVE_ISAS, reason="no C++ products on this platform")
PLAIN = replace(TINY_ENGINE, dtype="bfloat16", self_check=False)
KEPT, FAST = replace(PLAIN, quantization="packed"), replace(PLAIN, quantization="packed-int8")


def as_published(name: str) -> Kind:
    """As files of type Q4_K_M have it: the router is in float32."""
    return Kind.F32 if "gate_inp" in name else Kind.Q6_K if "down" in name or "output" in name else Kind.Q4_K


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"), 256)
    model = write_qwen3_moe(directory / "model", scale=0.3, head_dim=64, max_position_embeddings=512, **sizes)
    return write_gguf(model, directory / "experts.gguf", arch="qwen3moe", kind=as_published)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def weights_of(path: Path, config: EngineConfig) -> int:
    report = inspect_model(path, config)
    assert report.ok and report.memory is not None
    return int(report.memory["weights"])


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_experts_of_a_gguf_file_have_the_bits_of_the_dequantised_file(qwen: Path, isa: str) -> None:
    config = replace(KEPT, isa=isa)
    kept = results(qwen, config)
    assert kept == results(qwen, replace(config, quantization=None)) and len(set(kept.values())) == 10
    assert weights_of(qwen, config) < 0.4 * weights_of(qwen, replace(config, quantization=None))


@pytest.mark.full
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_experts_of_gpt_oss_have_the_bits_of_a_bfloat16_checkpoint(
    gpt_oss: tuple[Path, Path], isa: str
) -> None:
    """Of gpt-oss nothing but the experts is packed; gates and ups take turns in the file."""
    quantised, plain = gpt_oss
    kept = results(quantised, replace(KEPT, isa=isa))
    assert kept == results(plain, replace(PLAIN, isa=isa)) and len(set(kept.values())) == 10
    assert weights_of(quantised, replace(KEPT, isa=isa)) < 0.6 * weights_of(plain, PLAIN)


@pytest.mark.full
def test_a_gguf_file_of_gpt_oss_has_the_bits_of_its_checkpoint(
    gpt_oss: tuple[Path, Path], tmp_path: Path
) -> None:
    def kind(name: str) -> Kind:
        return Kind.F32 if name.endswith("bias") else Kind.MXFP4 if "_exps" in name else Kind.BF16

    file = write_gguf(gpt_oss[1], tmp_path / "oss.gguf", arch="gpt-oss", kind=kind)
    assert load_checkpoint(file).config == load_checkpoint(gpt_oss[1]).config
    assert results(file, KEPT) == results(gpt_oss[1], PLAIN)


@pytest.mark.full
def test_rows_in_eight_bits_have_the_same_bits_on_every_instruction_set(gpt_oss: tuple[Path, Path]) -> None:
    names = [isa for isa in NAMES if isa not in ("amx", "neon_bf16")]
    found = [results(gpt_oss[0], replace(FAST, isa=isa)) for isa in names]
    assert all(each == found[0] for each in found) and found[0] != results(gpt_oss[0], KEPT)


@pytest.mark.full
@pytest.mark.parametrize("file", ["gguf", "gpt-oss"])
def test_laws_hold_for_packed_experts(qwen: Path, gpt_oss: tuple[Path, Path], file: str) -> None:
    path, config = (qwen, FAST) if file == "gguf" else (gpt_oss[0], KEPT)
    with XlaBatchEngine.from_pretrained(path, config) as engine:
        report = verify(engine, requests=20, schedules=2, seed=1, lags=(0, 1))
    assert report.ok, "\n".join(report.lines())


@pytest.mark.full
def test_no_bit_of_packed_experts_depends_on_the_number_of_devices(gpt_oss: tuple[Path, Path]) -> None:
    kept, fast, plain = run_parallel(
        *(
            {"model": str(gpt_oss[0]), "engine": {"quantization": kind, "dtype": "bfloat16"}}
            for kind in ("packed", "packed-int8", None)
        ),
        sizes=(1, 2),
    )
    assert all(kept[size]["outputs"] == plain[1]["outputs"] for size in kept)
    assert fast[2]["outputs"] == fast[1]["outputs"] != plain[1]["outputs"]
    assert all(kept[size]["weights"] < 0.7 * plain[size]["weights"] for size in kept)


@pytest.mark.full
def test_mxfp4_rows_are_packed_without_a_second_copy(tmp_path: Path) -> None:
    """Gates and ups, which take turns in the file, go to their places in parts."""
    quantised, _ = write_gpt_oss(tmp_path, experts=2, width=2048)
    weights = load_checkpoint(quantised).weights
    assert isinstance(weights, StoredWeights)
    leaf = "layers.0.experts.gate_up"
    form = coded_form(weights.stored[leaf], 2048)
    assert form is not None
    tracemalloc.start()
    try:
        packed = np.empty(form.nbytes, np.uint8)
        weights.coded(leaf, form, packer(register(NAMES[0]), form.order), packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    values = 2 * 4096 * 2048
    assert packed.nbytes == form.nbytes < 0.54 * values
    assert peak < packed.nbytes + (24 << 20)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tensors: tensors.__setitem__(
            "scales", np.where(np.arange(2) == 0, np.uint8(255), tensors["scales"])
        ),
        lambda tensors: tensors.__setitem__("scales", np.full_like(tensors["scales"], 240)),
        lambda tensors: tensors.__setitem__("scales", np.ones_like(tensors["scales"])),
    ],
    ids=["NaN", "too large", "too small"],
)
def test_scales_that_cannot_be_packed_are_refused_by_name(
    gpt_oss: tuple[Path, Path], tmp_path: Path, edit: Callable[[dict[str, np.ndarray]], None]
) -> None:
    name, directory = "model.layers.1.mlp.experts.down_proj", gpt_oss[0]
    tensors = load_file(directory / "model.safetensors")
    changed = {"scales": tensors[f"{name}_scales"]}
    edit(changed)
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    save_file(tensors | {f"{name}_scales": changed["scales"]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name}_blocks holds scales outside of 2\^-125 to 2\^93"):
        XlaBatchEngine.from_pretrained(tmp_path, KEPT)
