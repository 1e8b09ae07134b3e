"""The examples of the command line are good, and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import ROOT
from xla_engine.batch.lines import read_lines
from xla_engine.batch.requests import LineRequest, parse_line
from xla_engine.config import embedded_model_directory
from xla_engine.text.tokenizer import Tokenizer


def test_the_examples_are_good_lines_that_fit_the_embedded_model() -> None:
    """Sixty-four requests and more than there are slots, of many lengths, caps and settings."""

    tokenizer = Tokenizer.from_pretrained(embedded_model_directory())
    for name, least in (("requests.jsonl", 72), ("openai_batch.jsonl", 5)):
        with open(ROOT / "examples" / name, "rb") as source:
            requests = [parse_line(line.raw or b"", line.number) for line in read_lines(source)]
        assert all(isinstance(request, LineRequest) for request in requests) and len(requests) >= least
        lengths = [len(tokenizer.encode(p) if isinstance(p, str) else p) for r in requests for p in r.prompts]
        assert max(n + r.params.max_tokens for n, r in zip(lengths, requests, strict=True)) < 512
        assert len({r.custom_id for r in requests}) == len(requests)
        assert len(set(lengths)) > least // 4 and len({r.params.max_tokens for r in requests}) > least // 4


@pytest.mark.slow
def test_the_example_of_more_requests_than_memory_runs(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "xla-engine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xla_engine "$@"\n')
    command.chmod(0o755)
    paths = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths}
    example = ["bash", ROOT / "examples" / "more_requests_than_memory.sh", tmp_path / "results"]
    done = subprocess.run(example, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("same") == 5, "a run differs from the first"
    assert "tokens found" in done.stdout and "preemptions" in done.stdout
    assert (tmp_path / "results" / "steps.html").stat().st_size > 10_000
