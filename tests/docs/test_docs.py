"""README and docs are correct: their blocks run, their paths exist, and the public names have docstrings.

The blocks of a page run in order, as a reader would run them. The title of a block says what is special about it:
"not run in the tests: WHY", "takes a minute" (marked `full` here), "exit status N", or a file name, under which a
JSON block is written for the commands that follow. Transcripts (`console`) have their commands run, and what they
print is compared, as is a block that is "printed" by the commands before it (`Block.shows`).
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import xla_engine
from tests.support.doc_blocks import Block, blocks
from xla_engine import cli
from xla_engine.tools.bench.__main__ import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELL = ("sh", "console")
TITLES = re.compile(
    r"not run in the tests: \w.*|run by \.ci/run|takes a minute(?:; other figures .*)?|exit status \d+|"
    r"[\w.]+\.jsonl?|printed.*|other figures .*|"
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
    """The README's Python runs by default; other pages start engines of their own, and are `full`, as is any shell."""
    return [
        pytest.param(page, id=name_of(page), marks=() if page == PAGES[0] else pytest.mark.full)
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


@pytest.mark.full
@pytest.mark.parametrize("page", pages_with(*SHELL), ids=name_of)
def test_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    run_shell_blocks(page, tmp_path, slow=False)


@pytest.mark.full
@pytest.mark.parametrize("page", pages_with(*SHELL, slow=True), ids=name_of)
def test_slow_shell_blocks_run(page: Path, tmp_path: Path) -> None:
    run_shell_blocks(page, tmp_path, slow=True)


def on_a_free_port(commands: str) -> str:
    """The commands of a page that serves on port 8000, which another program may have."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return re.sub(r"(--port |localhost:)8000\b", rf"\g<1>{probe.getsockname()[1]}", commands)


def run_shell_blocks(page: Path, folder: Path, *, slow: bool) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    command = folder / "bin" / "xla-engine"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m xla_engine "$@"\n')
    command.chmod(0o755)
    paths = f"{command.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": paths}
    done = None
    for block in blocks(page):
        if block.title.startswith("printed") and done is not None and not slow:
            assert block.shows(done.stdout), f"{name_of(page)}:{block.line}\n{done.stdout}"
        elif block.language == "json" and block.title:
            (folder / block.title).write_text(block.text)
        if block.language in SHELL and block.why_not is None and block.slow is slow:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", on_a_free_port(block.commands)],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=1800,
            )
            assert done.returncode == block.exit_status, (
                f"{name_of(page)}:{block.line}\n{done.stdout}{done.stderr}"
            )
            if block.prints:
                assert block.shows(done.stdout) or block.shows(done.stdout + done.stderr), (
                    f"{name_of(page)}:{block.line} says\n{block.prints}and prints\n{done.stdout}{done.stderr}"
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
    """Links, and paths in backquotes; an archived finding may name what was there when it was written."""
    quoted = [] if page.parent.name == "archive" else re.findall(r"`([\w./-]+/[\w.-]*)`", page.read_text())
    linked = re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", page.read_text())
    beside = {(page.parent / link).resolve() for link in linked}
    tops = {path.name for path in ROOT.iterdir()}
    return {str(path) for path in beside} | {
        str(ROOT / path) for path in quoted if path.split("/")[0] in tops
    }


FINDINGS = sorted((ROOT / "findings").rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *FINDINGS, ROOT / "spikes" / "README.md"], ids=name_of)
def test_every_path_that_is_mentioned_exists(page: Path) -> None:
    missing = {path for path in mentioned_paths(page) if not Path(path).exists()}
    assert not missing


@pytest.mark.parametrize("page", ["architecture.md", "CONTRIBUTING.md"])
def test_pages_for_developers_name_files_that_exist(page: str) -> None:
    """By the end of their path, as `engine/loop.py`."""
    folders = ("graphs", "scheduler", "xla_engine", "tests", "spikes", "examples", ".ci")
    known = {f"/{path.relative_to(ROOT)}" for name in folders for path in (ROOT / name).rglob("*.*")}
    named = set(re.findall(r"`([\w./-]*\w\.(?:py|h|cc))`", (ROOT / "docs" / page).read_text())) - {
        "NNN_name.py"
    }
    assert len(named) > 9 and not [
        name for name in named if not any(path.endswith(f"/{name}") for path in known)
    ]


def test_the_architecture_page_shows_the_tree_and_the_layers_as_they_are() -> None:
    tree, layers = re.findall(r"```text\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)[:2]
    shown, path = set(), list[str]()
    for line in tree.splitlines():
        name = line.split()[0]
        path[(len(line) - len(line.lstrip())) // 2 :] = [name]
        shown.add("".join(path))
    assert not [name for name in shown if not (ROOT / name).exists()]
    packages = {
        f"{top}/{folder.parent.name}/"
        for top in ("graphs", "scheduler", "xla_engine")
        for folder in (ROOT / top).glob("*/__init__.py")
        if not folder.parent.is_symlink()
    }
    assert packages <= shown
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    contract = next(each["layers"] for each in contracts if each["name"] == "floors of xla_engine")
    assert layers.splitlines() == [line.replace("xla_engine.", "") for line in contract]


# Options of other programs, and of scripts in this repository, that pages for users name.
FOREIGN = re.compile(
    "--(no-deps|kl-divergence|kl-divergence-base|profile|batch_size|max_batch_size|model_args|tasks|api-key|"
    "gpu-memory-utilization|scheduling-policy|enable-auto-tool-choice|tool-call-parser|allowed-origins|enforce-eager|"
    "trust-remote-code|enable-prompt-tokens-details|xla_force_host_platform_device_count|one-tile|decode|sources|"
    "control|steps|http2)"
)


def test_pages_name_options_that_exist() -> None:
    commands: list[click.Command] = []
    for name in cli.main.list_commands(None):  # type: ignore[arg-type]
        command = cli.main.get_command(None, name)  # type: ignore[arg-type]
        commands += command.commands.values() if isinstance(command, click.Group) else [command]
    known = {name for each in commands for one in each.params for name in (*one.opts, *one.secondary_opts)}
    known |= {name for action in parser()._actions for name in action.option_strings}
    for page in PAGES:
        if page.name not in ("CONTRIBUTING.md", "CHANGELOG.md"):
            named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", page.read_text())) - known
            assert not [name for name in named if not FOREIGN.fullmatch(name)], page


def test_every_finding_is_in_an_index_and_in_a_record_and_says_when_and_where_it_was_measured() -> None:
    records = {path for path in (ROOT / "findings").glob("*.md") if path.name != "README.md"}
    index, archive = ((ROOT / "findings" / page).read_text() for page in ("README.md", "archive/README.md"))
    assert all(f"({path.name})" in index for path in records)
    text = {path.name: path.read_text() for path in records}
    for name, page in text.items():
        assert "**Question.**" in page and "**Decision.**" in page and "\n## Measured\n" in page, name
        rows = re.findall(
            r"^\| (?:\[\d{3}\]\(archive/\S+\)|013) \| `.+` \| (.+) \| (.+) \|$", page, re.MULTILINE
        )
        assert rows and all(
            re.fullmatch(r"[0-9a-f]{7,}|not run", commit) and machine for commit, machine in rows
        )
    for path in (ROOT / "findings" / "archive").glob("0*.md"):
        status = path.read_text().split("\n")[2]
        told = re.match(
            r"Status: last measured at [0-9a-f]{7} \(\S+\) on .+?\. .*Record: \[.*\]\(\.\./(\S+)\)\.$", status
        )
        assert told and f"(archive/{path.name})" in text[told[1]], path
        assert f"[{path.name[:3]}]({path.name})" in archive, path


def test_comments_name_findings_that_exist() -> None:
    """In code a finding is named by the path of its record."""
    files = [
        path for name in ("graphs", "scheduler", "xla_engine", "tests") for path in (ROOT / name).rglob("*.*")
    ]
    named = {
        (path, name)
        for path in files
        if path.suffix in (".py", ".h", ".cc", ".md") and "embedded" not in path.parts
        for name in re.findall(r"\bfindings?[/ ](\d{3}\w*|[a-z_]+\.md)", path.read_text())
    }
    assert len(named) >= 20
    assert not [(path, name) for path, name in named if not (ROOT / "findings" / name).is_file()]


def test_the_version_is_one_and_the_changelog_begins_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    latest = re.search(
        r"^## (\S+) - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "docs/CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert latest and latest[1] == project["version"] == xla_engine.__version__


def test_workflows_run_what_a_checkout_has() -> None:
    """Each parses, and what their steps run from the tree is there: the one command of CI among it."""
    yaml = pytest.importorskip("yaml", reason="comes with huggingface_hub")
    run = []
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        loaded = yaml.safe_load(path.read_text())
        run += [
            step["run"] for job in loaded.get("jobs", {}).values() for step in job["steps"] if "run" in step
        ]
    assert "bash .ci/run" in run
    named = {path for line in run for path in re.findall(r"(?:^| )((?:\.ci|tests)/[\w./]+)", line)}
    assert named and all((ROOT / path).exists() for path in named)


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
    """What is left out is listed in the output of `pytest -s`, and each has a reason; or `.ci/run` has its lines."""
    ci = (ROOT / ".ci" / "run").read_text()
    left_out: list[tuple[Path, Block]] = [
        (page, block)
        for page in PAGES
        for block in blocks(page)
        if block.language in (*SHELL, "python")
        and block.why_not is not None
        and not (block.title == "run by .ci/run" and block.text.strip() in ci)
    ]
    with capsys.disabled():
        for page, block in left_out:
            print(f"\n{name_of(page)}:{block.line}: {block.why_not}", end="")
    assert len(left_out) <= 30
