"""The record that describes a model. generation_config.json always gives eos ids, and sampling defaults if enabled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.gguf_files import rewrite_gguf, write_gguf
from xla_engine import LLM, SamplingParams, cli
from xla_engine.config import EngineConfig
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import CheckpointError, ConfigError
from xla_engine.model_loader.checkpoint import load_checkpoint, load_weights
from xla_engine.model_loader.config_json import read_config
from xla_engine.model_loader.describe import describe, sampling_defaults
from xla_engine.model_loader.model_files import open_model

GOLDEN = Path(__file__).parents[1] / "golden"
RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 5, "do_sample": True}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The embedded model with recommendations."""
    shutil.copytree(embedded_model_directory(), tmp_path / "model")
    write(tmp_path / "model", RECOMMENDED)
    return tmp_path / "model"


def write(model: Path, values: dict[str, Any]) -> None:
    (model / "generation_config.json").write_text(json.dumps(values))


def test_a_description_is_what_the_parts_give(model: Path) -> None:
    files = open_model(model)
    found = describe(files, EngineConfig(generation_config="model", dtype="float32"))
    assert found.config == read_config(model) and found.pooling is None and not found.headless
    assert found.chat_template == files.chat_template()
    assert found.sampling_defaults == sampling_defaults(model)
    weights = load_weights(found)
    assert weights.fingerprint == load_checkpoint(model, dtype="float32").fingerprint
    assert (weights.dtype, weights.eos_token_ids) == ("float32", found.special_tokens.eos_token_ids)


def test_a_description_needs_no_weights_and_weights_no_template(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{")
    assert load_checkpoint(model).config == read_config(model)
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        describe(open_model(model), EngineConfig())
    (model / "tokenizer_config.json").unlink()
    (model / "model.safetensors").unlink()
    assert describe(open_model(model), EngineConfig()).sampling_defaults == {}


def test_a_model_that_recommends_nothing_is_the_same_engine_either_way(model: Path) -> None:
    """So results of such models that were written when "engine" was the default can be resumed."""
    (model / "generation_config.json").unlink()
    wants = (
        describe(open_model(model), EngineConfig(generation_config=each)) for each in ("model", "engine")
    )
    assert {each.options.generation_config for each in wants} == {"engine"}


def test_a_gguf_file_recommends_too(tmp_path: Path) -> None:
    file = write_gguf(GOLDEN / "gqa_tied", tmp_path / "m.gguf")
    assert sampling_defaults(file) == {}
    rewrite_gguf(
        file, lambda fields: fields.update({"general.sampling.temp": 0.6, "general.sampling.top_k": 20})
    )
    assert sampling_defaults(file) == {"temperature": 0.6, "top_k": 20}


def test_recommendations_have_our_names(model: Path) -> None:
    assert sampling_defaults(model) == {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 5}
    write(model, {"temperature": 1e-6})  # as some write greedy
    assert sampling_defaults(model) == {"temperature": 0}
    (model / "generation_config.json").unlink()
    assert sampling_defaults(model) == {}


def test_a_recommendation_that_cannot_be_is_an_error_with_the_remedy(model: Path) -> None:
    write(model, {"top_p": 7})
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: top_p must be in .* leave its sampling"
    ):
        sampling_defaults(model)
    with pytest.raises(ConfigError, match="generation_config must be one of"):
        EngineConfig(generation_config="auto")


def test_they_apply_unless_they_are_refused(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = {"max_num_seqs": 8, "max_model_len": 128, "prefill_lanes": (2,), "self_check": False}
    with LLM(model, **asked) as llm:
        assert llm.engine.config.generation_config == "model"
        wanted = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=5)
        assert llm.get_default_sampling_params() == wanted
        (output,) = llm.generate("import", use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 5
        (own,) = llm.generate("import", SamplingParams(max_tokens=7, ignore_eos=True), use_tqdm=False)
        assert len(own.outputs[0].token_ids) == 7
        for _ in range(2):
            llm.generate("import", use_tqdm=False)
        assert [each.getMessage() for each in caplog.records] == [
            "1 of 1 texts ended at the default of 5 tokens; set SamplingParams(max_tokens=...)"
        ]
        llm.engine.default_params = SamplingParams(ignore_eos=True)  # type: ignore[misc]
        (turn,) = llm.chat(
            [{"role": "user", "content": "a"}], chat_template="{{ messages[0].content }}b", use_tqdm=False
        )
        assert len(turn.prompt_token_ids) + len(turn.outputs[0].token_ids) == 128
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "import"}\n')
    for option, tokens in (([], 5), (["--generation-config", "engine"], 16)):
        arguments = ["run", str(source), "--dry-run", "--model", str(model), *option]
        result = CliRunner().invoke(cli.main, arguments)
        assert result.exit_code == 0 and f"{tokens}" in result.output, result.output
