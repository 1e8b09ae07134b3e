"""The examples of the command line are good, and run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import ROOT
from xla_engine.batch.lines import read_lines
from xla_engine.environment import embedded_model_directory
from xla_engine.openai.requests import LineRequest, parse_line
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


@pytest.mark.full
def test_the_example_of_more_requests_than_memory_runs(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "xla-engine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xla_engine "$@"\n')
    command.chmod(0o755)
    paths = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths}
    example = ["bash", ROOT / "examples" / "more_requests_than_memory.sh", tmp_path / "results"]
    done = subprocess.run(example, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("same") == 5, "a run differs from the first"
    assert "tokens found" in done.stdout and "preemptions" in done.stdout
    assert (tmp_path / "results" / "steps.html").stat().st_size > 10_000


@pytest.mark.full
def test_the_examples_for_job_schedulers_run(tmp_path: Path) -> None:
    """Each task's own script, with the variables that its scheduler sets, then the merge. A task may run again."""
    command = tmp_path / "bin" / "xla-engine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xla_engine "$@"\n')
    command.chmod(0o755)
    paths = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths, "CREATED": "1767225600"}
    source = tmp_path / "in.jsonl"
    lines = (ROOT / "examples" / "requests.jsonl").read_bytes().splitlines()[:6]
    source.write_bytes(b"\n".join([*lines, b'{"prompt": ""}']) + b"\n")
    examples = ROOT / "examples" / "many_machines"
    _, _, rest = (examples / "kubernetes.yaml").read_text().partition("            - |\n")
    kubernetes = "".join(
        line[14:] + "\n" for line in rest.splitlines() if line.startswith(" " * 14)
    ).partition("volumeMounts")[0]
    kubernetes = kubernetes.replace("/data/model", str(embedded_model_directory())).replace(
        "/data", str(tmp_path)
    )
    tasks = {
        "JOB_COMPLETION_INDEX": (["bash", "-c", kubernetes.replace("/8", "/2")], {}),
        "SLURM_ARRAY_TASK_ID": (
            ["bash", str(examples / "slurm.sh")],
            {"SLURM_ARRAY_TASK_COUNT": "2", "INPUT": str(source)},
        ),
    }
    merged = []
    for variable, (script, settings) in tasks.items():
        for index in (0, 1, 0):
            done = subprocess.run(
                script,
                env=environment | settings | {variable: str(index)},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=1800,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        parts = sorted(tmp_path.glob("part-*.jsonl"))
        merge = [str(command), "merge", *map(str, parts), "-o", str(tmp_path / f"{variable}.jsonl")]
        assert subprocess.run(merge, env=environment, timeout=1800).returncode == 0
        merged.append((tmp_path / f"{variable}.jsonl").read_bytes())
        for path in tmp_path.glob("part-*"):
            path.unlink()
    assert merged[0] == merged[1]
    assert merged[0].count(b"\n") == 7
