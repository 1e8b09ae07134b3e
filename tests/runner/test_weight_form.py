"""A quantised file stays packed without an option, in one form that fingerprints, records and resumed runs name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.support.checkpoints import tensors_of
from tests.support.gguf_files import Kind, write_gguf
from tests.support.instruction_sets import NATIVE_ISAS
from tests.support.models import TINY, TINY_ENGINE
from tests.support.quantised import CONFIG, write_plain, write_quantised
from xla_engine.batch import earlier_runs
from xla_engine.cli import main
from xla_engine.config import GGUF, GGUF_INT8, EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.engine.inspection_report import report_lines
from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.model_loader.checkpoint import load_weights, random_weights
from xla_engine.model_loader.describe import describe_decoder
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.weights import stored_kinds
from xla_engine.runner import backends, memory
from xla_engine.runner.native_library import build
from xla_engine.runner.native_library.needed import PLAIN, expected_parts, packed_form
from xla_engine.runner.weight_form import note_of, resolve_form
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.bench.models import write_checkpoint

pytestmark = pytest.mark.skipif(not NATIVE_ISAS, reason="no C++ products on this platform")
ENGINE = replace(TINY_ENGINE, self_check=False)
MODEL = replace(
    TINY, hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32
)
FORMS = (None, "int8", GGUF, GGUF_INT8)


def write(folder: Path, kind: Kind = Kind.Q4_0, **shape: Any) -> Path:
    model = replace(MODEL, **shape)
    write_checkpoint(model, random_weights(model, dtype="bfloat16", seed=1, scale=0.3), folder / "plain")
    return write_gguf(folder / "plain", folder / "model.gguf", kind=kind)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("form"))


def found(path: Path, config: EngineConfig) -> tuple[str | None, str | None, str, Any]:
    """The form, the note, the fingerprint and one answer of an engine."""
    with XlaBatchEngine.from_pretrained(path, config) as engine:
        engine.submit([5, 9, 2], SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True))
        (output,) = engine.drain()
        answer = output.outputs[0].token_ids, output.outputs[0].cumulative_logprob
        return engine.config.quantization, engine.runner.form_note, engine.identity().digest(), answer


@pytest.mark.full
def test_the_default_is_the_packed_form_by_its_own_name(path: Path, tmp_path: Path) -> None:
    form, note, digest, answer = found(path, ENGINE)
    assert form == GGUF_INT8 and note == note_of(GGUF_INT8)
    assert note is not None and "quantization gguf (packed" in note and "none (bfloat16)" in note
    asked = replace(ENGINE, quantization=GGUF_INT8)
    assert found(path, asked) == (GGUF_INT8, None, digest, answer)
    others = [found(path, replace(ENGINE, quantization=each)) for each in (GGUF, "none")]
    assert others[0][3] == others[1][3] != answer
    assert len({digest, *(each[2] for each in others)}) == 3  # fingerprints tell the forms apart
    quantised, _ = write_quantised(write_plain(tmp_path / "plain", tensors_of(CONFIG)), tmp_path, "awq")
    assert (
        found(quantised, ENGINE)[0] == found(quantised, replace(ENGINE, quantization="awq"))[0] == GGUF_INT8
    )


def test_a_plain_file_has_nothing_to_choose(path: Path, tmp_path: Path) -> None:
    plain = write_gguf(path.with_name("plain"), tmp_path / "plain.gguf", kind=Kind.BF16)
    form, note, digest, answer = found(plain, ENGINE)
    assert (form, note) == (None, None)
    assert found(plain, replace(ENGINE, quantization="none")) == (None, None, digest, answer)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        pytest.param({"isa": "none"}, "need the C", marks=pytest.mark.release),
        ({"linear_backend": "xla"}, "need the C"),
        ({"dtype": "float32"}, "to float32"),
        ({"bits": "portable"}, "portable"),
    ],
    ids=["isa", "xla", "float32", "portable"],
)
def test_what_cannot_stay_packed_is_dequantised_and_says_so(
    path: Path, more: dict[str, Any], why: str
) -> None:
    config = replace(ENGINE, **more)
    form, note, digest, answer = found(path, config)
    assert form is None and note is not None and note.startswith("weights are dequantised") and why in note
    assert found(path, replace(config, quantization="none"))[2:] == (digest, answer)


def test_types_without_a_packed_layout_are_dequantised(path: Path, tmp_path: Path) -> None:
    model = replace(MODEL, hidden_size=256, intermediate_size=256, head_dim=128)
    write_checkpoint(model, random_weights(model, dtype="bfloat16", seed=1, scale=0.3), tmp_path / "wide")
    two_bits = write_gguf(tmp_path / "wide", tmp_path / "two.gguf", kind=Kind.Q2_K)
    form, note, *_ = found(two_bits, ENGINE)
    assert form is None and note == "weights are dequantised to bfloat16: Q2_K cannot stay packed"


def test_activations_keep_their_bits_where_the_loss_was_not_measured() -> None:
    experts = RoutedExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    assert packed_form(ENGINE, MODEL) == GGUF_INT8
    assert packed_form(ENGINE, replace(MODEL, experts=experts)) == GGUF
    assert packed_form(replace(ENGINE, runner="pooling"), MODEL) == GGUF


def test_a_first_start_compiles_the_parts_that_the_form_needs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its header lets expect; and products in bf16 are among them only if some weight needs them."""
    parts: set[str] = set()

    def register(isa: str | None, more: Collection[str]) -> str:
        parts.update(more)
        return isa or NATIVE_ISAS[0]

    monkeypatch.setattr(backends, "register", register)
    files = open_model(path)
    model = describe_decoder(files, ENGINE)
    stored = stored_kinds(load_weights(model).weights)
    resolve_form(ENGINE, model.config, "bfloat16", stored).spec_of(model.config)
    plain_too = resolve_form(ENGINE, model.config, "bfloat16", {})
    assert parts == expected_parts(ENGINE, model.config, files.tensors().tensors.values())
    assert parts == {"sampler", "attention_bf16", "linear_fours", "pack_fours"}
    plain_too.spec_of(model.config)
    assert expected_parts(ENGINE, model.config, ()) == {"sampler", "attention_bf16", PLAIN} <= parts
    parts.clear()
    partly = dict(list(stored.items())[1:])
    resolve_form(ENGINE, model.config, "bfloat16", partly).spec_of(model.config)
    assert parts == {"sampler", "attention_bf16", "linear_fours", "pack_fours", PLAIN}


@pytest.mark.parametrize("total", [10**7, 10**8, 10**9])
def test_the_context_length_does_not_depend_on_the_form(
    tmp_path: Path, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_to_each", lambda device, devices: total)
    file = write(tmp_path, num_hidden_layers=1, max_position_embeddings=1 << 17)
    config = replace(ENGINE, max_model_len=None)
    reports = [inspect_model(file, replace(config, quantization=each)).memory for each in FORMS]
    assert len({report["max_model_len"] for report in reports if report is not None}) == 1


def test_inspect_lists_the_forms_with_the_one_that_would_run_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without compiling the kernels, which is most of a first start."""
    monkeypatch.setattr(build, "build", None)  # a call fails
    for asked, first in (("auto", GGUF_INT8), ("none", "none"), (GGUF, GGUF)):
        report = inspect_model(path, replace(ENGINE, quantization=asked))
        names = [each["quantization"] for each in report.forms]
        assert names[0] == first and sorted(names) == [GGUF, GGUF_INT8, "int8", "none"]
        sizes = {each["quantization"]: each["weights"] for each in report.forms}
        assert sizes[GGUF_INT8] == sizes[GGUF] < sizes["int8"] < sizes["none"]
        assert report.memory is not None and sizes[first] == report.memory["weights"]
        assert all(each["tokens_per_s"] > 0 for each in report.forms)
        lines = [line for line in report_lines(report) if "tokens/s for one request" in line]
        assert len(lines) == 4 and lines[0].endswith("(these options)") and first in lines[0]


def test_weights_of_a_packed_file_are_not_updated_and_the_remedy_works(path: Path) -> None:
    leaf = {"model.norm.weight": np.ones(MODEL.hidden_size, np.float32)}
    with (
        XlaBatchEngine.from_pretrained(path, ENGINE) as engine,
        pytest.raises(InvalidRequestError, match="with quantization 'none'"),
    ):
        engine.update_weights(leaf)
    with XlaBatchEngine.from_pretrained(path, replace(ENGINE, quantization="none")) as engine:
        engine.update_weights(leaf)


@pytest.mark.full
def test_a_draft_model_has_a_form_of_its_own(path: Path, tmp_path: Path) -> None:
    plain = write_gguf(path.with_name("plain"), tmp_path / "plain.gguf", kind=Kind.BF16)
    for target, draft in ((path, plain), (plain, path)):
        options = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
        config = replace(ENGINE, self_check=True)
        assert found(target, replace(config, speculative_config=options))[3] == found(target, config)[3]


def test_a_run_resumes_in_the_form_that_it_began_with(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files from before packed weights were the default have the bits of "none"."""
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text('{"prompt": [5, 9], "max_tokens": 4, "temperature": 0}\n' * 2)
    words = ["run", str(lines), "-o", str(out), "--model", str(path), "--max-model-len", "64", "--ordered"]
    runner = CliRunner()

    def run(*more: str) -> str:
        ran = runner.invoke(main, [*words, "--created", "1", *more])
        return ran.output if ran.exit_code else ""

    assert not run("--quantization", "none")
    whole = out.read_bytes()
    out.write_bytes(whole.partition(b"\n")[0] + b"\n")
    assert not run("--resume") and out.read_bytes() == whole  # this machine knows the run
    out.write_bytes(whole.partition(b"\n")[0] + b"\n")
    monkeypatch.setattr("xla_engine.cli._run.recall", lambda digest: None)  # another machine
    assert "add --quantization none" in run("--resume")
    assert not run("--resume", "--quantization", "none") and out.read_bytes() == whole
    assert earlier_runs.recall("none of this machine") is None
