"""Spikes start with the current code, and name a commit that contains them as they were measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiers import default

ROOT = Path(__file__).parents[2]
SPIKES = sorted(path.stem for path in (ROOT / "spikes").glob("[0-9]*.py"))
FIRST = re.compile(r"# Measured at commit ([0-9a-f]{7,40}); (?:rewritten since, )?runs at HEAD\.")


def git(*arguments: str) -> bool:
    return not subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True).returncode


@pytest.mark.parametrize("name", default(SPIKES))
def test_a_spike_prints_its_help(name: str) -> None:
    command = [sys.executable, "-m", f"spikes.{name}", "--help"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not found.returncode, found.stderr
    assert found.stdout.startswith("usage:")


@pytest.mark.skipif(not git("rev-parse", "--verify", "d81a915^{commit}"), reason="needs the whole history")
@pytest.mark.parametrize("name", SPIKES)
def test_a_spike_names_a_commit_that_contains_it(name: str) -> None:
    first = (ROOT / "spikes" / f"{name}.py").read_text("utf-8").splitlines()[0]
    found = FIRST.fullmatch(first)
    assert found is not None, f"{name} begins with {first!r}"
    assert git("cat-file", "-e", f"{found[1]}:spikes/{name}.py")
    assert git("merge-base", "--is-ancestor", found[1], "HEAD")


@pytest.mark.skipif(not git("rev-parse", "--verify", "d81a915^{commit}"), reason="needs the whole history")
def test_the_index_has_every_spike_and_names_commits_that_contain_the_others() -> None:
    index = (ROOT / "spikes" / "README.md").read_text("utf-8")
    assert set(re.findall(r"\| `(\d{3}_\w+)\.py` \|", index)) == set(SPIKES)
    others = re.findall(r"\| (\d{3}_\w+\.\w+), in (\w+) \|", index)
    assert len(others) > 50
    for name, commit in others:
        assert git("cat-file", "-e", f"{commit}:spikes/{name}"), name
    subjects = [line.split("|")[1].strip() for line in index.splitlines() if line.startswith("| ")][1:]
    assert subjects == sorted(subjects)
