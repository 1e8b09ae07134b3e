"""What a command does not need, it does not import: help and errors appear at once, and a dry run needs no jax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_engine.environment import embedded_model_directory

ROOT = Path(__file__).parents[2]
DEVICE = {"jax", "jaxlib", "flax", "optax"}
MODELS = DEVICE | {"tokenizers", "huggingface_hub", "llguidance", "safetensors", "gguf", "jinja2"}
OTHERS = {
    "pyarrow",
    "pandas",
    "PIL",
    "starlette",
    "uvicorn",
    "msgspec",
    "ray",
    "torch",
    "transformers",
    "opentelemetry",
}
RUN = """
import json, sys
from xla_engine.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(json.dumps([code, sorted({name.partition(".")[0] for name in sys.modules})]))
"""


HELP = """
import json, sys
from click.testing import CliRunner
from xla_engine.cli import main

found = {}
for name in main.list_commands(None):
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, (name, result.output)
    found[name] = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:]))
print(json.dumps(found))
"""


def imported(*words: str) -> tuple[int, set[str], str]:
    """The exit status of a command, the packages that it imported, and what it wrote to standard error."""
    found = subprocess.run(
        [sys.executable, "-c", RUN, *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    code, names = json.loads(found.stdout.splitlines()[-1])
    return code or 0, set(names), found.stderr


@pytest.mark.parametrize(
    ("words", "status", "without"),
    [
        (("--help",), 0, MODELS | OTHERS | {"numpy"}),
        (("run", "--help"), 0, MODELS | OTHERS),
        (("serve", "--help"), 0, MODELS | OTHERS),
        (("inspect", "--help"), 0, MODELS | OTHERS),
        (("inspect", "--modle"), 2, MODELS | OTHERS),
        (("run", "--modle", "x"), 2, MODELS | OTHERS),
        (("inspect", "missing.gguf"), 2, DEVICE | OTHERS),
        (("inspect", "missing"), 2, DEVICE | OTHERS),
        (("run", "missing.jsonl", "-o", os.devnull), 2, DEVICE | OTHERS),
        (("run", "--prompt", "a", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("chat", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("serve", "--model", "missing.gguf"), 2, DEVICE),
        (("sweep", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("graphs", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("verify", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("replay", "missing.json"), 2, DEVICE | OTHERS),
        (("shrink", "missing.json", "-o", "smaller.json"), 2, DEVICE | OTHERS),
        (("soak", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("bench", "--model", "missing.gguf"), 2, DEVICE | OTHERS),
        (("bench", "--help"), 0, DEVICE | OTHERS),
        (("run", "--prompt", "a", "--max-model-len", "9999"), 2, DEVICE | OTHERS),
        (("chat", "--max-model-len", "9999"), 2, DEVICE | OTHERS),
        (("serve", "--max-model-len", "9999"), 2, DEVICE),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_commands_import_what_they_need(words: tuple[str, ...], status: int, without: set[str]) -> None:
    code, names, told = imported(*words)
    assert code == status, told
    assert names & without == set()
    assert status == 0 or any(
        why in told for why in ("missing", "Did you mean", "did you mean", "use at most")
    )


def test_no_command_needs_a_device_for_its_help() -> None:
    """All commands in one process: what one imports is there for those after it, so none may import it."""
    found = subprocess.run(
        [sys.executable, "-c", HELP, *sorted(DEVICE | OTHERS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {name: names for name, names in json.loads(found.stdout).items() if names} == {}


@pytest.mark.parametrize("words", ["inspect", "run --prompt a --model", "chat --model", "serve --model"])
def test_a_model_that_is_not_supported_is_refused_without_jax(words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    code, names, told = imported(*words.split(), str(tmp_path))
    assert code == (1 if words == "inspect" else 2)
    assert words == "inspect" or "not supported" in told
    assert names & DEVICE == set()


def test_a_model_that_was_inspected_before_needs_no_jax() -> None:
    for _ in range(2):
        code, names, told = imported("inspect")
        assert code == 0, told
    assert names & (DEVICE | OTHERS) == set()


def test_a_dry_run_needs_no_jax(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    lines.write_text(
        json.dumps({"prompt": "def f(", "max_tokens": 8})
        + "\n"
        + json.dumps({"prompt": "x", "max_tokens": 8, "structured_outputs": {"json": schema}})
    )
    code, names, told = imported("run", str(lines), "--dry-run", "--model", str(embedded_model_directory()))
    assert code == 0, told
    assert names & (DEVICE | OTHERS) == set()


def test_a_free_threaded_build_of_python_is_refused_with_one_sentence() -> None:
    code = "import sys; sys.abiflags = 't'; import xla_engine"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    last = found.stderr.splitlines()[-1]
    assert found.returncode == 1 and last.startswith(
        "ImportError: xla-engine does not run on a free-threaded build"
    )
    assert last.endswith(f"use the ordinary build, python3.{sys.version_info.minor}")
