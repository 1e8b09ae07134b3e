"""`examples/engine_in_150_lines.py` is an engine: its samples have the bits of `LLM.generate`."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from xla_engine import LLM, SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples" / "engine_in_150_lines.py"
# Of several lengths, so that prompts have one chunk and more; more prompts than slots.
PROMPTS = [
    "def add(a, b):",
    "import os",
    '"""' + "A longer prompt that takes several chunks. " * 9,
    "x =",
    "class Stack:",
    "for",
    "    return self",
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("engine_in_150_lines", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_has_150_lines_and_imports_no_engine() -> None:
    text = EXAMPLE.read_text("utf-8")
    assert len(text.splitlines()) <= 150
    imported = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    of_engines = (
        "xla_engine.engine",
        "xla_engine.llm",
        "xla_engine.open_engine",
        "xla_engine.scheduler.pipeline",
    )
    assert not [name for name in imported if name == "xla_engine" or name.startswith(of_engines)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_its_samples_have_the_bits_of_llm_generate(example: ModuleType, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=20, logprobs=0)
    engine = example.Engine(example.embedded_model_directory(), slots=3)
    samples = example.generate(engine, PROMPTS, params)
    with LLM() as llm:
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    for own, output in zip(samples, outputs, strict=True):
        assert [sample.token_id for sample in own] == list(output.token_ids)
        assert [sample.logprob for sample in own] == list(output.logprobs or ())


def test_a_slot_is_given_to_the_next_request_while_others_decode(example: ModuleType) -> None:
    """With two slots, the third prompt begins before the longest of the first two has ended."""
    engine = example.Engine(example.embedded_model_directory(), slots=2)
    for name, tokens in (("long", 40), ("short", 4), ("next", 4)):
        engine.submit(name, "def f(", SamplingParams(temperature=0, max_tokens=tokens))
    assert [name for name, _ in engine.run()] == ["short", "next", "long"]


@pytest.mark.full
def test_the_command_prints_a_list_for_each_prompt() -> None:
    command = [sys.executable, str(EXAMPLE), "def add(a, b):", "class Stack:", "--max-tokens", "5"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [len(json.loads(line)) for line in lines] == [5, 5]
