"""`xla-engine cache` lists, checks and deletes the blocks of a directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from xla_engine.cli import main
from xla_engine.runner.prefix_files.files import BlockFiles, StoredContent

ABOUT = {
    "model": "m" * 64,
    "options": {"quantization": None, "dtype": "auto", "block_size": 64},
    "isa": "avx2",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number, isa in enumerate(("avx2", "avx512"), 1):
        files = BlockFiles(tmp_path, ABOUT | {"isa": isa}, 1 << 20)
        for key in range(number):
            files.write(
                StoredContent(key=bytes([key] * 32), parent=b"p" * 32, tokens=(1,), content=b"x" * 900)
            )
    return tmp_path


def test_list_and_clear(directory: Path) -> None:
    run = CliRunner().invoke
    listed = run(main, ["cache", "list", str(directory)])
    assert listed.exit_code == 0 and listed.output.count("of 64 tokens") == 2
    kinds = [
        json.loads(line)
        for line in run(main, ["cache", "list", "--json", str(directory)]).output.splitlines()
    ]
    assert sorted((kind["isa"], kind["blocks"]) for kind in kinds) == [("avx2", 1), ("avx512", 2)]
    assert all(kind["bytes"] > 900 * kind["blocks"] for kind in kinds)
    one = next(kind["kind"] for kind in kinds if kind["isa"] == "avx512")
    assert run(main, ["cache", "clear", str(directory), "--kind", one[:8]]).output == "deleted 2 blocks\n"
    assert run(main, ["cache", "clear", str(directory)]).output == "deleted 1 blocks\n"
    assert "holds no blocks" in run(main, ["cache", "list", str(directory)]).output


def test_what_is_not_there_is_named(directory: Path) -> None:
    run = CliRunner().invoke
    wrong = run(main, ["cache", "clear", str(directory), "--kind", "zz"])
    assert wrong.exit_code == 2 and "cache list" in wrong.output
    assert run(main, ["cache", "list", str(directory / "none")]).exit_code == 2
