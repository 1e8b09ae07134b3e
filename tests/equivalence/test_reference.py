"""The reference for users: transformers' tokens for every family, from any files, by no code of the engine's."""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.checkpoints import tensors_of
from tests.support.command_line import assert_not_started, invoke
from tests.support.gguf_files import GEMMA3N, GEMMA4, Kind, write_gguf, write_qwen3_moe
from tests.support.quantised import CONFIG, FORMS, write_gpt_oss, write_plain, write_quantised
from tests.support.tiers import default, in_ci
from xla_engine.equivalence import against_reference
from xla_engine.equivalence.against_reference import ReferenceResult, as_json, compare_with, lines
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.equivalence.reference import Reference
from xla_engine.equivalence.reference_files import ReferenceFiles, open_files
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.outputs import CompletionOutput

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
LENGTH = 160  # of the golden files' sequences
QUICK = ("qwen3_next", "gemma3_pattern", "gpt_oss_mxfp4")
FAMILIES = sorted((path.name for path in GOLDEN.iterdir()), key=lambda name: (name not in QUICK, name))


@pytest.mark.parametrize("name", default(FAMILIES, len(QUICK)))
def test_it_has_transformers_tokens_and_logits(name: str) -> None:
    with np.load(GOLDEN / name / "golden.npz") as file:
        golden = dict(file)
    prompts = [row[row >= 0].tolist() for row in golden["prompts"]]
    whole = [
        [*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, golden["tokens"].tolist(), strict=True)
    ]
    reference = Reference(open_files(GOLDEN / name), LENGTH)
    found = list(reference.logits(whole, [len(prompt) - 1 for prompt in prompts]))
    for logits, tokens, first in zip(found, golden["tokens"], golden["logits"], strict=True):
        np.testing.assert_array_equal(logits.argmax(axis=1), tokens)
        np.testing.assert_allclose(logits[0], first, rtol=0, atol=3e-4)


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    tokens, found = np.random.default_rng(0).integers(0, 190, 20).tolist(), []
    for kind in ("deepseek_v3", "kimi_k2"):
        folder = shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / kind)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        (logits,) = Reference(open_files(folder), LENGTH).logits([tokens], [0])
        engine = ForwardPass(load_checkpoint(folder, dtype="float32"), LENGTH).logits(tokens)
        np.testing.assert_allclose(logits, engine, rtol=0, atol=1e-3)
        found.append(logits)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("form", default(FORMS, 3))
def test_packed_weights_are_the_numbers_that_they_stand_for(form: str, tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain", tensors_of(CONFIG))
    quantised, dequantised = write_quantised(plain, tmp_path, form)
    files = open_files(quantised)
    for name, expected in load_file(dequantised / "model.safetensors").items():
        found = files.read(name.removeprefix("model.").removesuffix(".weight"))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found.astype(ml_dtypes.bfloat16), expected, err_msg=name)


def test_mxfp4_experts_are_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    quantised, plain = write_gpt_oss(tmp_path)
    name = "layers.0.mlp.experts.gate_up_proj"
    np.testing.assert_array_equal(open_files(quantised).read(name), open_files(plain).read(name))


ARCHITECTURES = {"llama_yarn": "llama", "mixtral": "llama", "cohere": "command-r", "gpt_oss": "gpt-oss"}
ARCHITECTURES |= {"granite_bias": "granite", "llama_linear": "llama", "phi3_long": "phi3"}
ARCHITECTURES |= {name: name for name in ("qwen2", "qwen3", "olmo2", "gemma", "gemma2", "gemma3", "smollm3")}
TIERS = [(), *[(pytest.mark.full,)] * 3, *[(pytest.mark.release,)] * (len(ARCHITECTURES) - 4)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, marks in zip(ARCHITECTURES, TIERS, strict=True)]
)
def test_gguf_files_say_what_the_engine_reads_in_them(name: str, tmp_path: Path) -> None:
    assert_same_logits(write_gguf(GOLDEN / name, tmp_path / "m.gguf", arch=ARCHITECTURES[name]))


@pytest.mark.full
def test_gguf_files_of_gemma3n_too(tmp_path: Path) -> None:
    assert_same_logits(write_gguf(GOLDEN / "gemma3n", tmp_path / "m.gguf", arch="gemma3n", extra=GEMMA3N))


@pytest.mark.full
def test_gguf_files_of_gemma4_too(tmp_path: Path) -> None:
    assert_same_logits(write_gguf(GOLDEN / "gemma4", tmp_path / "m.gguf", arch="gemma4", extra=GEMMA4))


@pytest.mark.release
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.BF16, Kind.F16], ids=lambda kind: kind.name)
def test_experts_in_gguf_files_are_taken_out_of_their_stack(kind: Kind, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    model = write_qwen3_moe(tmp_path / "model", scale=0.1, **sizes)
    assert_same_logits(write_gguf(model, tmp_path / "m.gguf", arch="qwen3moe", kind=kind))


def assert_same_logits(path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 190, 40).tolist()
    (found,) = Reference(open_files(path), LENGTH).logits([tokens], [0])
    expected = ForwardPass(load_checkpoint(path, dtype="float32"), LENGTH).logits(tokens)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * np.abs(expected).max())


def test_it_shares_no_code_with_the_engine() -> None:
    """It is NumPy and seven modules, so it cannot repeat a fault of kernels, graphs or the loader."""
    folder = Path(against_reference.__file__).parent
    parts = ("alternating", "arrays", "delta", "files", "mamba", "rotary")
    for file in ("reference.py", *(f"reference_{part}.py" for part in parts)):
        modules = {
            name
            for node in ast.walk(ast.parse((folder / file).read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        }
        ours = {name for name in modules if name and name.startswith("xla_engine")}
        assert ours <= {f"xla_engine.equivalence.reference_{part}" for part in parts}
        assert not {"jax", "flax"} & {str(name).partition(".")[0] for name in modules}


def answer(tokens: list[int], logprobs: list[float]) -> CompletionOutput:
    return CompletionOutput(
        index=0, text="", token_ids=tuple(tokens), logprobs=tuple(logprobs), finish_reason="length"
    )


@pytest.mark.parametrize(
    ("tokens", "moved", "ok", "differing", "ties"),
    [
        ([2, 1], 0.0, True, 0, 0),
        ([2, 1], 4e-4, True, 0, 0),
        ([2, 1], 2e-3, False, 0, 0),
        ([2, 1], float("nan"), False, 0, 0),
        ([2, 2], 0.0, True, 1, 1),  # a tie: within the tolerance of the likeliest
        ([2, 0], 0.0, False, 1, 0),
        ([0, 1], 0.0, False, 1, 0),
    ],
)
def test_tokens_and_log_probabilities_are_judged_by_the_tolerance(
    tokens: list[int], moved: float, ok: bool, differing: int, ties: int
) -> None:
    logits = np.array([[0.0, 1.0, 3.0], [1.0, 2.0, 2.0 - 5e-4]], np.float32)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    result = ReferenceResult(name="float32", measure="largest", tolerance=1e-3, requests=1)
    compare_with(
        result,
        "case",
        answer(tokens, [float(exact[at, token]) + moved for at, token in enumerate(tokens)]),
        logits,
    )
    assert (result.ok, result.differing_tokens, result.ties) == (ok, differing, ties)
    assert lines([result])[-1] == ("agrees" if ok else "does NOT agree") + " with the reference"
    assert json.loads(json.dumps(as_json([result]), allow_nan=False))["ok"] is ok


def test_rounded_activations_are_judged_by_the_mean() -> None:
    """Three nats at one token of ten are no fault; half a nat more at each is one."""
    logits = np.zeros((10, 3), np.float32)
    exact = -float(np.log(3))
    for moved, ok in ((0.0, True), (0.5, False)):
        result = ReferenceResult(name="bfloat16", measure="mean", tolerance=0.5, requests=1)
        answered = answer([0] * 10, [exact + 3, *[exact + moved] * 9])
        compare_with(result, "case", answered, logits)
        assert result.ok is ok and result.tokens == 10


@pytest.mark.full
@pytest.mark.parametrize("form", in_ci(["embedded", "gguf", "gpt_oss_mxfp4"], ["gguf", "gpt_oss_mxfp4"]))
def test_verify_compares_a_users_model(form: str, tmp_path: Path) -> None:
    """In float32 and as configured, in whatever files; one JSON document on standard output."""
    model: list[Any] = []
    if form == "gguf":
        write_plain(tmp_path / "plain", tensors_of(CONFIG))
        model = ["--model", write_gguf(tmp_path / "plain", tmp_path / "m.gguf", kind=Kind.Q8_0)]
    elif form != "embedded":
        model = ["--model", GOLDEN / form]
    small = ["--max-model-len", "128", "--requests", "3"]
    result = invoke("verify", *model, *small, "--against", "reference", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] and result.stdout.count("\n") == 1
    exact, configured = report["results"]
    assert exact["name"] == "float32" and exact["tolerance"] == 1e-3 and exact["tokens"] == 3 * 32
    assert exact["differing_tokens"] == exact["ties"] and exact["largest"] < 1e-3
    assert configured["name"].startswith("bfloat16") and configured["measure"] == "mean"
    assert 0 < configured["mean"] < configured["tolerance"]


@pytest.mark.full
def test_verify_sees_a_model_that_was_read_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary base that the engine took for another one."""

    def wrong(path: Path) -> ReferenceFiles:
        files = open_files(path)
        files.config.pop("rope_parameters", None)
        files.config["rope_theta"] = 300.0
        return files

    monkeypatch.setattr(against_reference, "open_files", wrong)
    small = ["--max-model-len", "128", "--requests", "2"]
    result = invoke("verify", *small, "--against", "reference")
    assert result.exit_code == 1, result.output
    assert "does NOT agree with the reference" in result.stdout and "request case-0, token" in result.stdout


def test_only_servers_have_a_report_for_issue_trackers() -> None:
    assert_not_started(invoke("verify", "--markdown"), "--markdown needs --url")
