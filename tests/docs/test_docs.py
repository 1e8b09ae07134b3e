"""README and docs say what is so: their blocks run, their paths exist, the public names have docstrings.

The blocks of a page run in order, as a reader would run them. The title of a block says what is special about it:
"not run in the tests: WHY", "takes a minute" (marked `slow` here), "exit status N", or a file name, under which a
JSON block is written for the commands that follow. Transcripts (`console`) have their commands run; what they print
may differ in times.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import xla_engine
from tests.support.doc_blocks import Block, blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "console")
TITLES = re.compile(
    r"not run in the tests: \w.*|run by \.ci/run|takes a minute|exit status \d+|[\w.]+\.jsonl?|"
)


def pages_with(*languages: str, slow: bool = False) -> list[Path]:
    return [
        page
        for page in PAGES
        if any(
            block.language in languages and block.why_not is None and block.slow is slow
            for block in blocks(page)
        )
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_marks(pages: list[Path]) -> list[object]:
    """The README's blocks run by default; each page of docs/ starts engines of its own, and is `slow`."""
    return [
        pytest.param(page, id=name_of(page), marks=() if page == PAGES[0] else pytest.mark.slow)
        for page in pages
    ]


@pytest.mark.parametrize("page", with_marks(pages_with("python")))
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One namespace for a page. The blocks assert nothing, so an exception is what fails them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.why_not is None:
            exec(compile("\n" * block.line + block.text, page, "exec"), namespace)


@pytest.mark.parametrize("page", with_marks(pages_with(*SHELL)))
def test_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    run_shell_blocks(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(*SHELL, slow=True), ids=name_of)
def test_slow_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    run_shell_blocks(page, tmp_path, slow=True)


def run_shell_blocks(page: Path, folder: Path, *, slow: bool) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    command = folder / "bin" / "xla-engine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xla_engine "$@"\n')
    command.chmod(0o755)
    paths = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths}
    for block in blocks(page):
        if block.language == "json" and block.title:
            (folder / block.title).write_text(block.text)
        if block.language in SHELL and block.why_not is None and block.slow is slow:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.commands],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=280,
            )
            assert done.returncode == block.exit_status, (
                f"{name_of(page)}:{block.line}\n{done.stdout}{done.stderr}"
            )


def test_every_block_says_in_known_words_how_it_is_run() -> None:
    for page in PAGES:
        assert page.read_text().count("\n```") % 2 == 0, f"{page}: a fence is open"
        for block in blocks(page):
            assert TITLES.fullmatch(block.title), f"{name_of(page)}:{block.line}: {block.title!r}"


def test_the_quick_start_is_what_continuous_integration_runs() -> None:
    """`.ci/run` takes the lines that begin with `pip install` from the section of this name."""
    section = (ROOT / "README.md").read_text().split("\n## Quick start\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("pip install")]
    assert lines == [
        "pip install -e . && xla-engine run examples/requests.jsonl -o out.jsonl",
        "pip install -e '.[test]' && pytest",
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def mentioned_paths(page: Path) -> set[str]:
    quoted = re.findall(r"`([\w./-]+/[\w.-]*)`", page.read_text())
    linked = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text())
    beside = {(page.parent / link).resolve() for link in linked}
    tops = {path.name for path in ROOT.iterdir()}
    return {str(path) for path in beside} | {
        str(ROOT / path) for path in quoted if path.split("/")[0] in tops
    }


INDEXES = [ROOT / "findings" / "README.md", ROOT / "spikes" / "README.md"]


@pytest.mark.parametrize("page", [*PAGES, *INDEXES], ids=name_of)
def test_every_path_that_is_mentioned_exists(page: Path) -> None:
    missing = {path for path in mentioned_paths(page) if not Path(path).exists()}
    assert not missing


def test_the_index_has_every_finding_with_its_status() -> None:
    rows = dict(re.findall(r"^\| \[(\d+)\]\(\S+ .* \| ([^|]+) \|$", INDEXES[0].read_text(), re.MULTILINE))
    findings = {path.name[:3]: path for path in (ROOT / "findings").glob("0*.md")}
    stated = {number: path.read_text().split("\n")[2] for number, path in findings.items()}
    assert stated == {number: f"Status: {status}." for number, status in rows.items()}


@pytest.mark.parametrize("name", sorted(xla_engine.__all__))
def test_public_names_have_docstrings(name: str) -> None:
    """Classes, and the methods that they define."""
    public = getattr(xla_engine, name)
    assert inspect.getdoc(public)
    methods = inspect.getmembers(public, inspect.isroutine)
    assert not [
        method for method, value in methods if not method.startswith("_") and not inspect.getdoc(value)
    ]


def test_blocks_that_do_not_run_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left out is listed in the output of `pytest -s`, and each has a reason."""
    left_out: list[tuple[Path, Block]] = [
        (page, block)
        for page in PAGES
        for block in blocks(page)
        if block.language in (*SHELL, "python") and block.why_not is not None
    ]
    with capsys.disabled():
        for page, block in left_out:
            print(f"\n{name_of(page)}:{block.line}: {block.why_not}", end="")
    assert len(left_out) < 20
