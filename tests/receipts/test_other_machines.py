"""Answers of one instruction set are audited with another, with one thread, other chunks and other slots."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.instruction_sets import NAMES

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        "avx2" not in NAMES or not hasattr(os, "sched_setaffinity"),
        reason="a Linux machine with x86-64 is needed",
    ),
]

# The command line in a process with as many processors as the first argument says: the engine makes a thread for each.
COMMAND = """
import os, sys
count = int(sys.argv.pop(1))
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])
from xla_engine.cli import main
main()
"""
AUDITORS = ("--isa", "avx2", "--max-num-seqs", "3", "--chunk-size", "64")


def command(processors: int, *words: str | Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(processors), *map(str, words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("form", [(), ("--quantization", "int8"), ("--bits", "portable")])
def test_answers_are_audited_with_another_instruction_set_and_one_thread(
    form: tuple[str, ...], tmp_path: Path
) -> None:
    """By the best instruction set of this machine; "amx" sums in another order, so it is left to --bits portable."""
    made = next(name for name in NAMES if name != "amx" or "portable" in form)
    lines = [
        {
            "custom_id": f"c{n}",
            "prompt": text,
            "max_tokens": 24,
            "temperature": n % 3 / 2,
            "seed": n,
            "logprobs": n % 4,
        }
        | ({"n": 2, "top_p": 0.9, "presence_penalty": 0.5, "stop": ["\n\n"]} if n % 3 else {})
        for n, text in enumerate(
            ["def area(", "import ", "class Queue:\n    ", "for i in", "return x", "try:"] * 2
        )
    ]
    source, out, receipts = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "out.receipts.jsonl"))
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("-o", out, "--receipts", receipts, "--no-progress")
    command(2, "run", source, *files, "--isa", made, "--max-num-seqs", "8", *form)
    bits = form if "portable" in form else ()
    report = json.loads(
        command(1, "audit", out, "--receipts", receipts, "--input", source, *AUDITORS, *bits, "--json")
    )
    assert (report["verdict"], report["checked"], report["method"]) == ("accepted", len(lines), "prefill")
