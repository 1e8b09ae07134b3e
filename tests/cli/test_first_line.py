"""A wrong file, name or model on the command line is one error that names the remedy, before anything runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.batch_lines import prompts
from tests.support.command_line import assert_not_started, invoke, run_file
from tests.support.fake_engine import FakeEngine
from xla_engine.environment import embedded_model_directory

CHAT = b'{"messages": [{"role": "user", "content": "Hello"}]}\n'


@pytest.mark.parametrize(
    "array", [b'[{"prompt": "a"},\n {"prompt": "b"}]', b'[{"prompt": "a"}]', b'[\n{"prompt": "a"}]']
)
def test_an_array_is_one_error_and_no_output(tmp_path: Path, engine: FakeEngine, array: bytes) -> None:
    result, records = run_file(tmp_path, array)
    assert_not_started(
        result, "in.jsonl is a JSON array; write each request on one line (for an array: `jq -c '.[]'"
    )
    assert not records and not (tmp_path / "out.jsonl").exists()
    assert_not_started(invoke("run", tmp_path / "in.jsonl", "--dry-run"), "is a JSON array")
    assert_not_started(run_file(tmp_path, b'{\n"prompt": "a"\n}')[0], "is JSON over several lines")


def test_the_array_of_rows_runs_as_the_error_says(tmp_path: Path, engine: FakeEngine) -> None:
    pytest.importorskip("pyarrow", reason="needs the extra `data`")
    result, records = run_file(
        tmp_path, b'[{"question": "a"},\n {"question": "b"}]', "--prompt-column", "question"
    )
    assert result.exit_code == 0 and len(records) == 2


def test_a_bad_first_line_is_still_an_error_of_its_own(tmp_path: Path, engine: FakeEngine) -> None:
    for line in (b"[1, 2]\n", b"17\n", b'{"prompt": 3}\n'):
        result, records = run_file(tmp_path, line + prompts(3), "--overwrite")
        assert result.exit_code == 1 and len(records) == 4


def test_a_row_is_told_how_rows_are_read(tmp_path: Path, engine: FakeEngine) -> None:
    result, _ = run_file(tmp_path, b'{"id": "7", "question": "What?", "max_tokens": 4}\n')
    assert result.exit_code == 1 and "--prompt-column question" in result.stderr
    result, _ = run_file(
        tmp_path, b'{"id": "7", "question": "What?"}\n', "--overwrite", "--prompt-column", "question"
    )
    assert result.exit_code == 0


def test_text_for_a_model_without_a_tokenizer_stops_before_it_is_loaded(
    tmp_path: Path, engine: FakeEngine
) -> None:
    model = tmp_path / "model"
    shutil.copytree(embedded_model_directory(), model)
    (model / "tokenizer.json").unlink()
    for data in (prompts(500), CHAT * 500):
        result, records = run_file(tmp_path, data, "--model", str(model))
        assert_not_started(
            result, "has no tokenizer.json, which text needs; put the model's tokenizer.json there"
        )
        assert not records and result.stderr.count("\n") == 1 and "lists of token ids" in result.stderr
    result, records = run_file(tmp_path, b'{"prompt": [5, 6]}\n', "--model", str(model))
    assert result.exit_code == 0 and len(records) == 1
    engine.submitted.clear()
    for command in (("run", "--prompt", "hi"), ("chat",)):
        result = invoke(*command, "--model", model, stdin=b"hi\n")
        assert_not_started(result, "put the model's tokenizer.json there")
        assert "token ids" not in result.stderr  # neither command takes them
    assert engine.submitted == []


def test_pictures_for_an_engine_that_reads_none_stop(tmp_path: Path, engine: FakeEngine) -> None:
    part = b'{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}'
    chat = b'{"messages": [{"role": "user", "content": [' + part + b"]}]}\n"
    for data in (b'{"prompt": "<image>", "images": ["a.png"]}\n' * 500, chat * 500):
        result, records = run_file(tmp_path, data)
        assert_not_started(
            result, "no_pictures: the first request has pictures, and this engine reads no pictures"
        )
        assert not records and result.stderr.count("\n") == 1
    table = tmp_path / "in.csv"
    table.write_text("file\na.png\nb.png\n")
    options = ("--prompt-template", "<image>What is this?", "--image-column", "file")
    assert_not_started(invoke("run", table, "-o", tmp_path / "out.csv", *options), "no_pictures: ")


def test_chats_for_a_model_without_a_template_stop(tmp_path: Path, engine: FakeEngine) -> None:
    engine.chat_template = None
    result, records = run_file(tmp_path, CHAT * 500)
    assert_not_started(result, "give one with --chat-template FILE")
    assert not records
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    assert run_file(tmp_path, CHAT, "--chat-template", str(tmp_path / "mine.jinja"))[0].exit_code == 0


def test_a_misspelt_file_is_answered_with_the_one_that_is_there(tmp_path: Path, engine: FakeEngine) -> None:
    (tmp_path / "chat.jsonl").write_bytes(CHAT)
    result = invoke("run", tmp_path / "chatt.jsonl", "-o", tmp_path / "out.jsonl")
    assert_not_started(result, "chatt.jsonl: No such file or directory; did you mean 'chat.jsonl'?")


def test_help_of_lm_eval_needs_no_extra() -> None:
    """In a process that cannot import the harness, installed or not."""
    code = (
        "import sys; sys.modules['lm_eval'] = None; from xla_engine.cli import main; "
        "main(['lm-eval', *sys.argv[1:]])"
    )
    done = [
        subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        for words in (["--help"], ["run", "--tasks", "mine"])
    ]
    assert done[0].returncode == 0 and "Run lm-evaluation-harness" in done[0].stdout
    assert "lm-evaluation-harness is missing" in done[0].stdout
    assert done[1].returncode == 1 and done[1].stderr.startswith("Error: lm-evaluation-harness is missing")
