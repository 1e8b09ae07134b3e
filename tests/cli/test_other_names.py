"""Options of llama.cpp and vLLM get advice, and every option that the advice names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.command_line import assert_not_started, invoke
from xla_engine.cli import _other_names
from xla_engine.cli.run import run
from xla_engine.cli.serve import serve
from xla_engine.vllm_options import VLLM_OPTIONS

OWN = {
    name for command in (run, serve) for each in command.params for name in (*each.opts, *each.secondary_opts)
}


@pytest.mark.parametrize("table", [_other_names._LLAMA_CPP, _other_names._VLLM])
def test_advice_names_options_that_exist(table: dict[str, str]) -> None:
    for flag, advice in table.items():
        assert flag not in OWN, flag
        assert set(re.findall(r"(?<!\w)--[a-z-]+", advice)) <= OWN, advice


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-ngl", "99"], "-ngl; there is nothing to set"),
        (["--n-gpu-layers=99"], "--n-gpu-layers; there is nothing to set"),
        (["-c", "4096"], "-c; use --max-model-len N"),
        (["--ctx-size", "4096"], "use --max-model-len N"),
        (["-t", "8"], "all cores of the process are used"),
        (["-b", "8"], "use --max-num-batched-tokens N"),
        (["--tensor-parallel", "2"], "use --tensor-parallel-size N"),
        (["--gpu-memory-utilization", "0.5"], "use --memory-utilization"),
        (["--enforce-eager"], "XLA compiles every program"),
        (["--max-num-seq", "3"], "did you mean '--max-num-seqs'?"),
        (["--no-such-thing"], "No such option"),
    ],
)
@pytest.mark.parametrize("command", [["run", "in.jsonl", "-o", "out"], ["serve", "model"]])
def test_another_programs_option_says_what_to_write(
    command: list[str], arguments: list[str], words: str
) -> None:
    assert_not_started(invoke(*command, *arguments), words)


def test_every_option_of_vllm_gets_advice() -> None:
    for name in VLLM_OPTIONS:
        flag = f"--{name.replace('_', '-')}"
        assert flag in OWN or _other_names.other_name([flag], OWN) is not None, flag


def test_a_missing_file_of_keys_names_its_option(tmp_path: Path) -> None:
    result = invoke("serve", "--api-key-file", tmp_path / "keys")
    assert_not_started(
        result, f"--api-key-file {tmp_path / 'keys'}: No such file or directory. Write the keys into it"
    )
