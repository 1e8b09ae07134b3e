"""`xla-engine run --prompt`: one completion in the shell."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest

from tests.support.command_line import assert_not_started, invoke, run_file
from tests.support.fake_engine import FakeEngine
from xla_engine import LLM, SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.utils import host_memory

MODEL = str(embedded_model_directory())
CUT = "(stopped at the token limit; use --max-tokens N for more)\n"


def test_a_prompt_is_completed_in_the_shell(
    embedded: XlaBatchEngine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text and nothing else is on standard output."""
    params = SamplingParams(temperature=0, max_tokens=3)
    [expected] = LLM.from_engine(embedded).generate("def size(self):", params, use_tqdm=False)
    monkeypatch.setattr(engine, "submit", embedded.submit)
    monkeypatch.setattr(engine, "step", embedded.step)
    result = invoke("run", "--prompt", "def size(self):", "--max-tokens", "3", "--temperature", "0")
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.outputs[0].text + "\n" and "--max-tokens" in result.stderr


def test_a_prompt_is_a_chat_message_where_there_is_a_template(engine: FakeEngine) -> None:
    # the embedded model completes code
    assert invoke("run", "--max-tokens", "9", "--prompt", "hi", "--temperature", "1").stderr == CUT
    engine.as_they_are.clear()
    short = ("run", "--max-tokens", "9", "--prompt", "hi", "--model", MODEL)
    said = invoke(*short)
    assert said.stdout == "<hi>\n" and "chat message; --raw completes" in said.stderr
    for options, shown, told in (
        (["--system", "be"], "<be|hi>", False),
        (["--raw"], "<hi>", False),
        (["--chat"], "<hi>", False),
    ):
        result = invoke(*short, *options)
        assert (result.stdout, "--raw" in result.stderr) == (shown + "\n", told)
    assert engine.as_they_are == [False, False, True, False]
    assert "exclude each other" in invoke(*short, "--raw", "--chat").stderr


def test_a_start_leaves_the_garbage_collector_on(engine: FakeEngine) -> None:
    assert invoke("run", "--prompt", "hi").exit_code == 0
    assert gc.isenabled()
    assert_not_started(invoke("run", "--prompt", "hi", "--max-tokens", "0"), "max_tokens")
    assert gc.isenabled()


def test_a_person_gets_readable_sampling_where_the_model_recommends_none(engine: FakeEngine) -> None:
    """A small model rambles at temperature 1 over the whole vocabulary, vLLM's default."""
    for command in (("run", "--prompt", "hi", "--model", MODEL), ("chat", "--model", MODEL)):
        told = "no sampling: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05; --temperature 0"
        assert invoke(*command, stdin=b"hi\n").stderr.count(told) == 1
        assert told not in invoke(*command, "--temperature", "0.7", stdin=b"hi\n").stderr
        assert told not in invoke(*command, "--generation-config", "engine", stdin=b"hi\n").stderr
    sampling = [(each.temperature, each.top_k, each.top_p, each.min_p) for each in engine.params]
    assert sampling == [(0.8, 40, 0.95, 0.05), (0.7, 40, 0.95, 0.05), (1.0, 0, 1.0, 0.0)] * 2


def test_a_file_keeps_the_defaults_of_the_api_and_says_so(engine: FakeEngine, tmp_path: Path) -> None:
    lines = b'{"prompt": "one"}\n{"prompt": "two", "temperature": 0}\n'
    said = "1 texts without a temperature were sampled at 1, as the model recommends no temperature"
    result, _ = run_file(tmp_path, lines, "--model", MODEL)
    assert said in result.stderr and [each.temperature for each in engine.params] == [1.0, 0.0]
    result, _ = run_file(tmp_path, lines, "--model", MODEL, "--overwrite", "--temperature", "0.5")
    assert "without a temperature" not in result.stderr


def test_prompts_of_files_become_chats_with_chat(engine: FakeEngine, tmp_path: Path) -> None:
    lines = b'{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n{"prompt": [1]}\n'
    options = ("--chat", "--max-tokens", "5", "--ordered", "--model", MODEL)
    result, records = run_file(tmp_path, lines, "--system", "be", *options)
    texts = [each["response"]["body"]["choices"][0]["message"]["content"] for each in records[:2]]
    assert texts == ["<be|one>", "<be|two>"] and "token ids" in records[2]["error"]["message"]
    assert "chat template" not in result.stderr
    result, records = run_file(tmp_path, lines[:18], "--overwrite", "--model", MODEL)
    assert records[0]["response"]["body"]["choices"][0]["text"] == "<one>"
    assert "use --chat to send each as a message" in result.stderr
    assert "1 texts without max_tokens ended at the default of 16" in result.stderr


def test_what_cannot_run_says_why(engine: FakeEngine, tmp_path: Path) -> None:
    assert_not_started(invoke("run", "--prompt", "no!"), "not this one")
    assert_not_started(invoke("run", "--prompt", "x", "--max-tokens", "0"), "max_tokens")
    for other in (["in.jsonl"], ["-o", "x"], ["--stream"], ["--dry-run"]):
        result = invoke("run", "--prompt", "x", *other)
        assert result.exit_code == 2 and "exclude each other" in result.stderr
    assert engine.submitted == []


@pytest.mark.full
def test_a_start_says_what_max_model_len_is_where_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model_directory(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    plain = ("run", "--prompt", "import", "--max-tokens", "1", "--max-num-seqs", "1", "--model", model)
    assert "max_model_len" not in invoke(*plain).stderr  # it fits
    monkeypatch.setattr(host_memory, "size", lambda: 150_000_000)
    assert "max_model_len is 2048; the model allows 4096" in invoke(*plain).stderr
    assert "max_model_len" not in invoke(*plain, "--max-model-len", "512").stderr
