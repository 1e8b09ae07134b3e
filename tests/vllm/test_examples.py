"""vLLM's own example scripts, from its source archive, with imports changed and small models in place of theirs."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import xla_engine
from tests.support.adapters import write_adapter
from tests.support.pooling_models import qwen3_tensors, write_model
from tests.support.source_archives import unpack_archive
from tests.support.tokenizers import byte_level
from xla_engine.config import EngineConfig, own_options
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.vllm_options import VLLM_OPTIONS

pytestmark = pytest.mark.full

EMBEDDED = Path(xla_engine.__file__).parent / "embedded"

# Scripts by the model that stands for theirs: the embedded one, the same with a longer context, random ones. A script
# runs in `full` for each class of vLLM's that these scripts use, and the others before a release.
SCRIPTS = {
    "embedded": """
        basic/offline_inference/basic basic/offline_inference/chat
        deployment/async_llm_streaming deployment/llm_engine_example
        features/structured_outputs/structured_outputs_offline observability/metrics/offline
        rl/pause_resume/pause_resume_offline""",
    "lora": "features/lora/multilora_offline",
    "embedder": "pooling/embed/embed_matryoshka_fy_offline",
    "classifier": "basic/offline_inference/classify",
    "reranker": "pooling/score/qwen3_reranker_offline",
}
MORE = {
    "embedded": """
        basic/offline_inference/generate features/automatic_prefix_caching/prefix_caching_offline
        features/profiling/simple_profiling_offline rl/batch_invariance/reproducibility_offline""",
    "long": """
        features/automatic_prefix_caching/automatic_prefix_caching_offline features/profiling/run_one_batch_offline
        features/reset_kv/reset_kv_offline""",
    "qwen3": "features/context_extension/context_extension_offline",
    "embedder": "basic/offline_inference/embed pooling/embed/embed_jina_embeddings_v3_offline",
    "scorer": """
        basic/offline_inference/score pooling/reward/sequence_reward_offline pooling/score/using_template_offline""",
}
CASES = [
    pytest.param(model, script, id=script.rpartition("/")[2], marks=marks)
    for kept, marks in ((SCRIPTS, ()), (MORE, pytest.mark.release))
    for model, scripts in kept.items()
    for script in scripts.split()
]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's unpacked source archive."""
    try:
        return unpack_archive("vllm", tmp_path_factory.mktemp("sources"))
    except LookupError as error:
        pytest.skip(str(error))


def test_every_engine_argument_has_an_answer(source: Path) -> None:
    tree = ast.parse((source / "vllm/engine/arg_utils.py").read_text("utf-8"))
    classes = [
        each for each in tree.body if isinstance(each, ast.ClassDef) and each.name.endswith("EngineArgs")
    ]
    names = {
        each.target.id
        for found in classes
        for each in found.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert len(names) > 250
    of_llm = {"model", "data_parallel_size"}
    for name in names - of_llm:
        own_options({name: None}, VLLM_OPTIONS)  # raises for one that is unknown
    assert names - of_llm <= VLLM_OPTIONS.keys() | set(EngineConfig.__dataclass_fields__)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each kind of model."""
    home = tmp_path_factory.mktemp("models")
    long, template = home / "long", Path("tests/golden/chat/chatml.jinja").read_text()
    shutil.copytree(EMBEDDED, long)
    config = (long / "config.json").read_text()
    (long / "config.json").write_text(re.sub(r'("max_position_embeddings": )\d+', r"\g<1>8192", config))
    found = {"embedded": EMBEDDED, "long": long, "lora": EMBEDDED}
    found["qwen3"] = write_model(home / "qwen3", qwen3_tensors(), "Qwen3ForCausalLM")
    (found["qwen3"] / "chat_template.jinja").write_text(template)
    classifier = "Qwen3ForSequenceClassification"
    for labels, name in ((1, "scorer"), (3, "classifier")):
        tensors = qwen3_tensors(labels=labels)
        found[name] = write_model(home / name, tensors, classifier, max_position_embeddings=1024)
    found["reranker"] = write_model(
        home / "reranker", qwen3_tensors(), "Qwen3ForCausalLM", max_position_embeddings=1024
    )
    byte_level(("no", "yes")).save(str(found["reranker"] / "tokenizer.json"))  # the tokens that it scores by
    found["embedder"] = write_model(home / "embedder", qwen3_tensors(""), "Qwen3Model", is_matryoshka=True)
    return found


@pytest.mark.parametrize(("model", "script"), CASES)
def test_script_runs(model: str, script: str, source: Path, models: dict[str, Path], tmp_path: Path) -> None:
    text = (source / f"examples/{script}.py").read_text("utf-8")
    text = re.sub(r"^(\s*)from vllm[a-z0-9_.]* import", r"\1from xla_engine.vllm import", text, flags=re.M)
    for name in set(re.findall(r'\bmodel(?:_name)? ?= ?("[\w-]+/[\w.-]+")', text)):
        text = text.replace(name, f'"{models[model]}"')
    if model == "lora":
        adapter = write_adapter(tmp_path / "adapter", load_checkpoint(EMBEDDED))
        text = re.sub(r"snapshot_download\(.*?\)", f'"{adapter}"', text)
    (tmp_path / "script.py").write_text(text)
    if (templates := (source / f"examples/{script}.py").with_name("template")).is_dir():
        shutil.copytree(templates, tmp_path / "template")
    options = ["--model", str(models[model])] if "add_cli_args" in text else []
    ran = subprocess.run(
        [sys.executable, "script.py", *options], cwd=tmp_path, capture_output=True, text=True, timeout=1800
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    assert ran.stdout.strip()
