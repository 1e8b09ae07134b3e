"""Quantised safetensors checkpoints: weights have the bits of a plain dequantisation, and bad files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import assert_refused, tensors_of
from tests.support.coded_blocks import dequantised_rows
from tests.support.instruction_sets import NAMES
from tests.support.models import TINY_ENGINE
from tests.support.quantised import CONFIG, FORMS, packed_words, write_plain, write_quantised
from tests.support.tiers import default
from xla_engine.batch.dry_run import DryRun
from xla_engine.config import GGUF_INT8, STORED_AS, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.engine.inspection_report import report_lines
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.llm import LLM
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.describe import describe_decoder
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.quantised.methods import METHODS, MXFP4
from xla_engine.model_loader.weights import StoredWeights
from xla_engine.sampling_params import SamplingParams

FAMILIES = Path(__file__).parents[1] / "golden" / "families"
GATE = "model.layers.0.mlp.gate_proj"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_plain(tmp_path / "plain", tensors_of(CONFIG))


def assert_same_bits(quantised: Path, dequantised: Path, dtype: str = "bfloat16") -> None:
    found, expected = (load_checkpoint(path, dtype=dtype) for path in (quantised, dequantised))
    assert found.config == expected.config and found.dtype == dtype
    for leaf in expected.weights:
        one, other = found.weights[leaf], expected.weights[leaf]
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8), err_msg=leaf)
        if one.ndim == 2:
            index = np.array([min(3, len(one) - 1), -1, 0, 1])
            rows = [each.weights.rows(leaf, index) for each in (found, expected)]
            np.testing.assert_array_equal(*(each.view(np.uint8) for each in rows), err_msg=leaf)


@pytest.mark.parametrize("form", default(FORMS, 6))
def test_weights_have_the_bits_of_the_plain_rule(form: str, plain: Path, tmp_path: Path) -> None:
    quantised, dequantised = write_quantised(plain, tmp_path, form)
    assert_same_bits(quantised, dequantised)
    report = inspect_model(quantised, EngineConfig(max_num_seqs=1))
    name = FORMS[form][2]
    # three leaves of queries, keys and values, gates and ups, in each of two layers, and the head
    assert report.ok and report.quantised == {name: 15}
    assert any(line.startswith("quantised") and name in line for line in report_lines(report))


@pytest.mark.parametrize("family", default(sorted(path.name for path in FAMILIES.iterdir()), 10))
def test_every_family_takes_quantised_weights(family: str, tmp_path: Path) -> None:
    if family == "gpt_oss_mxfp4":
        pytest.skip("is quantised")
    if family == "gpt_oss":
        quantised, _ = write_quantised(FAMILIES / family, tmp_path, "int8")
        return assert_refused(quantised, "quant_method", "compressed-tensors")
    assert_same_bits(*write_quantised(FAMILIES / family, tmp_path, "int8"))


def test_modules_that_are_ignored_stay_plain(plain: Path, tmp_path: Path) -> None:
    left = ("lm_head.weight", "layers.1.mlp.down_proj.weight")
    quantised, dequantised = write_quantised(plain, tmp_path, "compressed_4", keep=left, ignore=["lm_head"])
    assert_same_bits(quantised, dequantised)
    assert inspect_model(quantised, EngineConfig(max_num_seqs=1)).quantised == {
        "compressed-tensors 4-bit g32": 13
    }


# The kinds of packed weights; others are dequantised.
KINDS = {
    "awq": "A4",
    **dict.fromkeys(("gptq", "gptq_one_group", "gptq_v2_zeros"), "Q4_0"),
    **dict.fromkeys(("gptq_asymmetric", "gptq_v2_asymmetric"), "A4"),
    "gptq_8": "Q8_0",
    **dict.fromkeys(("gptq_8_asymmetric", "int8_groups"), "A8"),
    "compressed_4": "Q4_0",
    "compressed_4_asymmetric": "A4",
    **dict.fromkeys(("compressed_8", "int8"), "Q8_0"),
}


@pytest.mark.parametrize("form", default(FORMS, 6))
def test_packed_blocks_mean_the_same_numbers(form: str, plain: Path, tmp_path: Path) -> None:
    weights = load_checkpoint(write_quantised(plain, tmp_path, form)[0]).weights
    assert isinstance(weights, StoredWeights)
    for leaf in ("layers.0.qkv", "layers.1.down"):
        kinds = {kind for kind, _ in weights.stored[leaf]}
        assert kinds == {KINDS.get(form, FORMS[form][2])}
    if form in KINDS:
        (source,) = weights._sources["layers.1.down"]
        index = np.array([5, 0, 63])
        blocks = weights._files.raw_rows(source.name, index)
        values = dequantised_rows(KINDS[form], blocks)
        expected = weights.rows("layers.1.down", index)
        np.testing.assert_array_equal(values.astype(expected.dtype).view(np.uint16), expected.view(np.uint16))


def test_scales_that_float16_does_not_hold_cannot_stay_packed(plain: Path, tmp_path: Path) -> None:
    if not NAMES:
        pytest.skip("no C++ products on this platform")
    quantised, dequantised = write_quantised(
        plain, tmp_path, "compressed_4", edit=setting("weight_scale", 1.17e-6)
    )
    assert load_checkpoint(quantised).config == load_checkpoint(dequantised).config
    with pytest.raises(
        CheckpointError, match=r"gate_proj.weight_scale holds scales that float16 does not.*'none'"
    ):
        XlaBatchEngine.from_pretrained(quantised, replace(TINY_ENGINE, quantization="packed"))
    with XlaBatchEngine.from_pretrained(quantised, replace(TINY_ENGINE, self_check=False)) as engine:
        assert engine.config.quantization is None  # the default form gives way
        note = engine.runner.form_note
    assert note is not None and "dequantised to bfloat16" in note and "float16 does not" in note


def results(path: Path, **options: Any) -> list[tuple[Any, ...]]:
    config = replace(TINY_ENGINE, self_check=False, dtype="bfloat16", max_model_len=32, **options)
    with XlaBatchEngine.from_pretrained(path, config) as engine:
        for number, count in enumerate((4, 11, 1, 7)):
            params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
            engine.submit(list(range(3, 3 + count)), params, request_id=str(number))
        found = {each.request_id: each.outputs[0] for each in engine.drain()}
    return [(found[str(i)].token_ids, found[str(i)].cumulative_logprob) for i in range(4)]


@pytest.mark.parametrize(
    "form",
    [
        "gptq",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("awq", "gptq_8_asymmetric", "compressed_8", "gptq_order")
        ),
    ],
)
def test_tokens_are_those_of_the_dequantised_checkpoint(form: str, plain: Path, tmp_path: Path) -> None:
    quantised, dequantised = write_quantised(plain, tmp_path, form)
    expected = results(dequantised)
    assert len({each for _, each in expected}) == 4
    if not NAMES or form not in KINDS:
        assert results(quantised) == expected
    else:
        assert results(quantised, quantization="packed") == expected
        packed, whole = (
            inspect_model(quantised, replace(TINY_ENGINE, max_model_len=32, quantization=kind)).memory
            for kind in ("packed", None)
        )
        assert packed is not None and whole is not None and packed["weights"] < 0.7 * whole["weights"]


def test_inspect_counts_experts_in_mxfp4() -> None:
    report = inspect_model(FAMILIES / "gpt_oss_mxfp4", EngineConfig(max_num_seqs=1))
    assert report.quantised == {"MXFP4": 6}  # of three layers


def test_what_cannot_stay_packed_is_refused(plain: Path, tmp_path: Path) -> None:
    if not NAMES:
        pytest.skip("no C++ products on this platform")
    quantised, _ = write_quantised(plain, tmp_path, "fp8_by_tensor")
    with pytest.raises(ConfigError, match=r"AWQ, GPTQ and compressed-tensors.*Leave quantization out"):
        XlaBatchEngine.from_pretrained(quantised, replace(TINY_ENGINE, quantization="packed"))


def test_a_dry_run_names_the_method(plain: Path, tmp_path: Path) -> None:
    quantised, _ = write_quantised(plain, tmp_path, "awq")
    report = DryRun(quantised, EngineConfig()).run([], on_error=lambda _: None)
    assert report.quantised == "awq" and "quantised by awq" in "\n".join(report.lines())
    assert DryRun(plain, EngineConfig()).run([], on_error=lambda _: None).quantised is None


def test_vllms_name_of_a_method_is_checked_and_changes_nothing(plain: Path, tmp_path: Path) -> None:
    """As vLLM's users write it: `LLM(model, quantization="awq")`."""
    assert {*METHODS, MXFP4} == set(STORED_AS)
    quantised = {
        form: write_quantised(plain, tmp_path, form)[0] for form in ("awq", "gptq", "int8", "fp8_blocks")
    }
    quantised["mxfp4"] = FAMILIES / "gpt_oss_mxfp4"
    stored = dict(zip(quantised, ("awq", "gptq", "compressed-tensors", "fp8", "mxfp4"), strict=True))
    for form, path in quantised.items():
        for name in STORED_AS:
            options = EngineConfig(quantization=name, bits="portable" if form != "mxfp4" else "machine")
            if name == stored[form]:
                resolved = describe_decoder(open_model(path), options).options
                assert resolved == replace(options, quantization="auto")
                assert inspect_model(path, EngineConfig(max_num_seqs=1, quantization=name)).ok
            else:
                with pytest.raises(ConfigError, match=f"'{name}' does not match.*is '{stored[form]}'.*Leave"):
                    describe_decoder(open_model(path), options)
    with pytest.raises(
        ConfigError, match=r"'awq' does not match the checkpoint, which names no quant_method"
    ):
        describe_decoder(open_model(plain), EngineConfig(quantization="awq"))
    report = inspect_model(quantised["awq"], EngineConfig(max_num_seqs=1, quantization="gptq"))
    (problem,) = report.problems
    assert not report.ok and "'gptq' does not match" in problem
    with pytest.raises(ConfigError, match=r"the checkpoint's own awq, .*not 'bitsandbytes'"):
        EngineConfig(quantization="bitsandbytes")
    with LLM(quantised["awq"], quantization="awq", max_num_seqs=2, max_model_len=32, self_check=False) as llm:
        assert llm.engine.config.quantization == (GGUF_INT8 if NAMES else None)


def test_the_fingerprint_depends_on_the_configuration(plain: Path, tmp_path: Path) -> None:
    """With other zero points, the same bytes are other weights."""
    quantised, _ = write_quantised(plain, tmp_path, "gptq_asymmetric")
    before = load_checkpoint(quantised)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (quantised / "config.json").write_text(json.dumps(config))
    after = load_checkpoint(quantised)
    assert before.fingerprint != after.fingerprint
    assert (before.weights["head"] != after.weights["head"]).mean() > 0.5


@pytest.mark.parametrize(
    ("form", "options", "words"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, ["quant_method", "bitsandbytes", "awq", "gptq"]),
        ("awq", {"quant_method": None}, ["quant_method", "null"]),
        ("awq", {"quant_method": "mxfp4"}, ["quant_method", "mxfp4"]),
        ("awq", {"bits": 3}, ["bits = 3"]),
        ("awq", {"version": "gemv"}, ["version", "gemv"]),
        ("awq", {"zero_point": False}, ["zero_point"]),
        ("awq", {"group_size": 48}, ["qweight", "groups of 48", "64 columns"]),
        ("awq", {"group_size": 0}, ["group_size"]),
        ("awq", {"group_size": 64}, ["qzeros", "shape"]),
        ("gptq", {"bits": 3}, ["bits = 3"]),
        ("gptq", {"bits": 8}, ["shape"]),
        ("gptq", {"checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        ("gptq", {"dynamic": {"+:.*": {"bits": 8}}}, ["dynamic"]),
        ("gptq_asymmetric", {"sym": True}, ["qzeros", "zero points", "sym"]),
        ("compressed_4", {"format": "nvfp4-pack-quantized"}, ["format", "nvfp4"]),
        ("compressed_4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config.format"]),
        ("compressed_4", {"transform_config": {"config_groups": {"a": {}}}}, ["transform_config"]),
        (
            "compressed_4",
            {"config_groups": {"group_0": {"weights": {"num_bits": 3, "type": "int"}}}},
            ["config_groups.group_0.weights.num_bits = 3"],
        ),
        ("fp8_blocks", {"weight_block_size": [64, 64]}, ["weight_scale_inv", "shape"]),
        ("fp8_blocks", {"weight_block_size": 64}, ["weight_block_size"]),
        ("fp8_by_tensor", {"fmt": "e5m2"}, ["fmt", "e5m2"]),
    ],
)
def test_configurations_that_cannot_be_read_are_refused_by_name(
    form: str, options: dict[str, Any], words: list[str], plain: Path, tmp_path: Path
) -> None:
    quantised, _ = write_quantised(plain, tmp_path, form, **options)
    assert_refused(quantised, *words)


def setting(name: str, value: float, place: tuple[int, ...] = (0, 0)) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{GATE}.{name}"][place] = value

    return edit


def without(name: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        del tensors[f"{GATE}.{name}"]

    return edit


def cut(name: str, axis: int = 0) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        found = tensors[f"{GATE}.{name}"]
        tensors[f"{GATE}.{name}"] = np.ascontiguousarray(np.delete(found, 0, axis))

    return edit


def typed(name: str, dtype: Any) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{GATE}.{name}"] = tensors[f"{GATE}.{name}"].astype(dtype)

    return edit


@pytest.mark.parametrize(
    ("form", "edit", "words"),
    [
        ("awq", setting("scales", np.nan), ["gate_proj.scales", "NaN"]),
        ("awq", setting("scales", 0), ["gate_proj.scales", "zero"]),
        ("awq", setting("scales", -1), ["gate_proj.scales", "negative"]),
        ("awq", without("qzeros"), ["gate_proj.qzeros", "missing"]),
        ("awq", cut("scales"), ["gate_proj.scales", "shape"]),
        ("awq", cut("qweight", 1), ["qzeros", "shape"]),
        ("awq", typed("qweight", np.int16), ["gate_proj.qweight", "I16", "I32"]),
        ("gptq", setting("scales", np.inf), ["gate_proj.scales", "infinite"]),
        ("gptq", setting("g_idx", 7, (3,)), ["gate_proj.g_idx", "0 to 1"]),
        ("gptq", setting("g_idx", -1, (3,)), ["gate_proj.g_idx"]),
        ("gptq", cut("g_idx"), ["gate_proj.g_idx", "shape"]),
        ("gptq", setting("qzeros", 0), ["gate_proj.qzeros", "sym"]),
        ("gptq", setting("bias", 1, (0,)), ["gate_proj.bias", "not part"]),
        ("compressed_4", setting("weight_scale", 0), ["gate_proj.weight_scale", "zero"]),
        ("compressed_4", setting("weight_shape", 40, (1,)), ["weight_packed", "[128, 40]"]),
        ("compressed_4", without("weight_shape"), ["weight_shape", "missing"]),
        ("compressed_4", without("weight_scale"), ["weight_scale", "missing"]),
        ("compressed_4", cut("weight_scale"), ["weight_scale", "shape"]),
        ("compressed_4_asymmetric", cut("weight_zero_point"), ["weight_zero_point", "shape"]),
        ("int8", without("weight_scale"), ["gate_proj.weight", "I8", "no"]),
        ("int8", cut("weight_scale"), ["weight_scale", "fit"]),
        ("float8_by_row", setting("weight", np.nan), ["gate_proj.weight", "NaN"]),
        ("float8_by_row", without("weight_scale"), ["gate_proj.weight", "weight_scale"]),
        ("fp8_by_tensor", without("weight_scale"), ["gate_proj.weight", "no scale"]),
        ("fp8_by_tensor", setting("weight_scale", np.nan, ()), ["weight_scale", "NaN"]),
        ("fp8_blocks", cut("weight_scale_inv"), ["weight_scale_inv", "shape"]),
        ("fp8_blocks", cut("weight"), ["gate_proj.weight", "shape"]),
    ],
)
def test_broken_tensors_are_refused_by_name(
    form: str, edit: Callable[[Tensors], None], words: list[str], plain: Path, tmp_path: Path
) -> None:
    quantised, _ = write_quantised(plain, tmp_path, form, edit=edit)
    assert_refused(quantised, *words)


def test_a_truncated_file_is_refused(plain: Path, tmp_path: Path) -> None:
    quantised, _ = write_quantised(plain, tmp_path, "awq")
    file = quantised / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert_refused(quantised, "model.safetensors", "header")


@pytest.mark.parametrize(
    ("form", "part", "fault"),
    [
        ("awq", "qweight", lambda words: words[:, ::-1]),
        ("gptq", "qweight", lambda words: words[::-1]),
        ("gptq_v2_asymmetric", "qzeros", lambda words: words - 1),
        ("compressed_4", "weight_packed", lambda words: np.roll(words.view(np.uint8), 1, -1).view(np.int32)),
    ],
)
def test_planted_faults_show(
    form: str, part: str, fault: Callable[[np.ndarray], np.ndarray], plain: Path, tmp_path: Path
) -> None:
    def edit(tensors: Tensors) -> None:
        name = f"{GATE}.{part}"
        tensors[name] = np.ascontiguousarray(fault(tensors[name]))

    quantised, dequantised = write_quantised(plain, tmp_path, form, edit=edit)
    with pytest.raises(AssertionError, match="gate_up"):
        assert_same_bits(quantised, dequantised)


def test_the_words_of_the_tests_are_right() -> None:
    assert packed_words(np.array([[1, 2, 3, 4, 5, 6, 7, 8, 15]]), 4).view(np.uint32).tolist() == [
        [0x87654321, 0xF]
    ]
