"""How much a reader has to open, and how many ideas there are: numbers that may only fall.

`python -m tests.laws.test_house` prints them. If a change makes one smaller, lower its ceiling; if it makes one
larger, look for what the change makes superfluous.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from xla_engine.scheduler import Plan

ROOT = Path(__file__).parents[2]
PRODUCT = ("xla_engine", "graphs", "scheduler")
INSTRUMENTS = (
    "xla_engine/tools/",
    "xla_engine/equivalence/",
    "xla_engine/same_bits/",
    "xla_engine/perplexity/",
)

READ_SETS = {  # what a reader wants to do: the page and section that names the files to open
    "add a sampling parameter": ("docs/CONTRIBUTING.md", "Add a sampling parameter"),
    "add an output to a step": ("docs/CONTRIBUTING.md", "Add an output to a step"),
    "change what a norm computes": ("docs/CONTRIBUTING.md", "Change what a norm computes"),
    "find a bug in stop strings": ("docs/CONTRIBUTING.md", "Find a bug in stop strings"),
    "see how a step works": ("docs/architecture.md", "How a step works"),
}
CEILINGS = {
    "lines to add a sampling parameter": 1111,
    "lines to add an output to a step": 1440,
    "lines to change what a norm computes": 1102,
    "lines to find a bug in stop strings": 613,
    "lines to see how a step works": 1498,
    "files to see how a step works": 8,
    "class names used twice": 8,
    "fields of a plan": 13,
    "public methods of XlaBatchEngine": 70,
    "lines of instruments, per thousand": 143,
    "names that tests patch, per 10,000 lines": 49,
    "private names that tests use, per 10,000 lines": 22,
}


def sources() -> Iterator[Path]:
    """Every Python file of the program, once: two of its folders are links."""
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not path.is_relative_to(ROOT / folder) or "__pycache__" in path.parts:
                continue
            if folder == "xla_engine" and path.relative_to(ROOT / folder).parts[0] in PRODUCT:
                continue
            yield path


def section(page: str, title: str) -> str:
    found = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (ROOT / page).read_text("utf-8"), re.M | re.S
    )
    assert found is not None, f"{page} has no section {title!r}"
    return found[1]


def read_set(page: str, title: str) -> list[Path]:
    """The files that a section names in backquotes, tests excepted."""
    names = re.findall(r"`([\w./]+\.(?:py|h|cc|md))`", section(page, title))
    return [ROOT / name for name in dict.fromkeys(names) if not name.startswith("tests/") and "/" in name]


def lines(path: Path) -> int:
    return len(path.read_text("utf-8").splitlines())


def classes() -> Iterator[tuple[Path, ast.ClassDef]]:
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield path, node


def is_patch(node: ast.AST) -> bool:
    """Whether a test puts something in the place of a name of the program."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"


def is_private(node: ast.AST) -> bool:
    """Whether a test reads a private name of something else; the methods of named tuples are none."""
    if isinstance(node, ast.ImportFrom):
        return any(alias.name[0] == "_" for alias in node.names)
    if not isinstance(node, ast.Attribute) or node.attr in ("_replace", "_repr_html_"):
        return False
    own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return node.attr[0] == "_" and not node.attr.startswith("__") and not own


@functools.cache
def measured() -> dict[str, int]:
    found: dict[str, int] = {}
    for what, place in READ_SETS.items():
        files = read_set(*place)
        found[f"lines to {what}"] = sum(map(lines, files))
    found["files to see how a step works"] = len(read_set(*READ_SETS["see how a step works"]))
    names = Counter(node.name for _, node in classes() if not node.name.startswith("_"))
    found["class names used twice"] = sum(count > 1 for count in names.values())
    found["fields of a plan"] = len(Plan.__dataclass_fields__)
    engine = next(node for _, node in classes() if node.name == "XlaBatchEngine")
    methods = [node for node in engine.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    found["public methods of XlaBatchEngine"] = len(methods)
    total = {path.relative_to(ROOT).as_posix(): lines(path) for path in sources()}
    instruments = sum(count for name, count in total.items() if name.startswith(INSTRUMENTS))
    found["lines of instruments, per thousand"] = 1000 * instruments // sum(total.values())
    tests = sorted((ROOT / "tests").rglob("*.py"))
    nodes = [node for path in tests for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    parts = sum(map(lines, tests)) / 10_000
    found["names that tests patch, per 10,000 lines"] = int(sum(map(is_patch, nodes)) / parts)
    found["private names that tests use, per 10,000 lines"] = int(sum(map(is_private, nodes)) / parts)
    return found


@pytest.mark.parametrize("what", CEILINGS)
def test_a_measure_only_falls(what: str) -> None:
    assert measured()[what] <= CEILINGS[what]


def test_every_read_set_names_files_that_exist() -> None:
    for place in READ_SETS.values():
        files = read_set(*place)
        assert len(files) > 1
        assert not [path for path in files if not path.is_file()]


def test_the_product_imports_no_instrument() -> None:
    """Only commands do, and instruments each other."""
    importers = {}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith((*INSTRUMENTS, "xla_engine/cli/")):
            continue
        imported = {
            node.module or ""
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.ImportFrom)
        }
        if found := [each for each in imported if f"{each.replace('.', '/')}/".startswith(INSTRUMENTS)]:
            importers[name] = found
    assert not importers


if __name__ == "__main__":
    for name, value in measured().items():
        print(f"{name:40} {value:6,}")
