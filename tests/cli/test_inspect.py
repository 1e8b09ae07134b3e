"""`xla-engine inspect` predicts, without loading weights, what an engine then allocates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import xla_engine.runner.memory as memory
from tests.support.gguf_files import Kind, write_gguf
from tests.support.tiers import default
from xla_engine.cli import main
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.inspection import inspect_model
from xla_engine.engine.inspection_report import report_lines
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.weights import DTYPES

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_figures_are_those_of_the_engine(embedded: XlaBatchEngine) -> None:
    report = inspect_model(embedded_model_directory(), embedded.config)
    runner = embedded.runner
    assert report.ok and report.memory is not None and report.backends is not None
    assert report.memory["weights"] == runner.weights.nbytes
    assert report.memory["max_model_len"] == runner.context_length
    assert report.memory["kv_bytes_per_token"] * runner.context_length * 16 == runner.cache_bytes
    assert (
        report.dtype == embedded.checkpoint.dtype
        and report.eos_token_ids == embedded.checkpoint.eos_token_ids
    )
    assert (
        report.parameters == 4_689_152 and report.tokenizer == 4096 and report.layers == {"full_attention": 6}
    )
    assert report.stored == {"BF16": {"tensors": 56, "parameters": 4_689_152, "bytes": 9_378_304}}
    assert {report.backends["attention"], report.backends["linear"]} == {
        runner.platform["attention"],
        runner.platform["linear"],
    }


@pytest.mark.parametrize(
    "model", default(sorted((GOLDEN / "families").iterdir()), 12), ids=lambda path: path.name
)
def test_every_family_is_told_from_its_files_alone(model: Path) -> None:
    report = inspect_model(model, EngineConfig(max_num_seqs=8))
    checkpoint = load_checkpoint(model)
    assert report.ok, report.problems
    assert report.memory is not None and report.layers is not None
    assert report.memory["weights"] == checkpoint.weights.nbytes  # type: ignore[attr-defined]
    assert sum(report.layers.values()) == checkpoint.config.num_hidden_layers
    config, least = checkpoint.config, 0
    for index in range(
        config.num_hidden_layers
    ):  # windows, recurrent states and layers with others' keys do not grow
        if (
            config.attends(index)
            and config.keys_of(index) == index
            and config.attention(index).window is None
        ):
            sizes = config.layer(index)
            least += config.attention(index).stored_parts * sizes.num_key_value_heads * sizes.head_dim
    least *= np.dtype(DTYPES[str(report.dtype)]).itemsize
    assert least <= report.memory["kv_bytes_per_token"] <= 8 * least  # layouts may pad heads


def test_a_gguf_file_is_told_with_its_quantised_tensors(tmp_path: Path) -> None:
    path = write_gguf(embedded_model_directory(), tmp_path / "m.gguf", kind=Kind.Q8_0)
    report = inspect_model(path, EngineConfig(max_num_seqs=8))
    assert report.ok and report.dtype == "bfloat16" and report.tokenizer is None
    assert report.stored.keys() == {"Q8_0", "F32"}
    matrices = report.stored["Q8_0"]
    assert matrices["bytes"] * 32 == matrices["parameters"] * 34  # a scale for each 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["EvilForCausalLM"], "auto_map": {}}, ["EvilForCausalLM", "auto_map"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"hidden_size": 64}, ["shape", "64"]),
        ({"num_hidden_layers": 3}, ["layers.2", "missing"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"bos_token_id": 10**400}, ["bos_token_id"]),
    ],
)
def test_what_is_not_supported_is_told_with_the_rest(
    change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "gqa_tied", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    report = inspect_model(model, EngineConfig())
    assert len(report.problems) == 1 and all(word in report.problems[0] for word in words)
    assert report.stored["F32"]["tensors"] == 20
    assert report_lines(report)[-1] == f"cannot run: {report.problems[0]}"


def test_pickles_and_missing_weights_leave_the_rest_of_the_report(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(GOLDEN / "gqa_tied", model)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    report = inspect_model(model, EngineConfig())
    assert ["pickle" in problem for problem in report.problems] == [True]
    assert report.memory is not None and report.memory["weights"] > 0 and not report.stored


def test_never_fit_is_told_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: 30_000_000)
    report = inspect_model(embedded_model_directory(), EngineConfig(memory_utilization=1.0, max_num_seqs=64))
    (problem,) = report.problems
    assert report.memory is not None and report.memory["arithmetic"] in problem
    (row,) = report.fits
    most = row["most_slots"]
    assert f"max_num_seqs {most} at most" in problem
    assert row["needed"][8] <= 30_000_000 < row["needed"][64]
    table = report_lines(report)[-3]
    assert "(" not in table.split(" MB")[0] and table.count("(") == sum(
        n > 3e7 for n in row["needed"].values()
    )
    assert inspect_model(
        embedded_model_directory(), EngineConfig(memory_utilization=1.0, max_num_seqs=most)
    ).ok
    assert not inspect_model(
        embedded_model_directory(), EngineConfig(memory_utilization=1.0, max_num_seqs=most + 1)
    ).ok


def test_no_model_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        inspect_model(tmp_path / "absent", EngineConfig())


def test_the_command_prints_for_people_and_for_scripts(tmp_path: Path) -> None:
    runner = CliRunner()
    told = runner.invoke(main, ["inspect", str(embedded_model_directory())])
    without = runner.invoke(main, ["inspect"])  # the same model; the memory that is free may have changed
    assert without.exit_code == 0 and without.output.splitlines()[:10] == told.output.splitlines()[:10]
    assert told.exit_code == 0 and "KV per token" in told.output and "max_model_len" in told.output
    line = runner.invoke(main, ["inspect", "--json", "--max-num-seqs", "8", str(GOLDEN / "gqa_tied")])
    report = json.loads(line.output)
    assert line.exit_code == 0 and line.output.count("\n") == 1 and report["memory"]["slots"] == 8
    (tmp_path / "config.json").write_text("{}")
    assert runner.invoke(main, ["inspect", str(tmp_path)]).exit_code == 1
    assert runner.invoke(main, ["inspect", str(tmp_path / "absent")]).exit_code == 2
