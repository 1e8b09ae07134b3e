"""The house rules: who may import whom, where the environment is read, where devices are touched."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("graphs", "scheduler", "xla_engine")
OWN = ("xla_engine.graphs", "xla_engine.scheduler")
RUNNER = "xla_engine/runner"


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def roots(path: Path) -> set[str]:
    """Top-level packages that a module imports; our own by their folders."""
    return {
        name.removeprefix("xla_engine.").split(".")[0] if name.startswith(OWN) else name.split(".")[0]
        for name in imports(path)
    }


def place(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", modules("scheduler"), ids=str)
def test_scheduler_imports_only_the_standard_library(path: Path) -> None:
    assert roots(path) <= {*sys.stdlib_module_names, "scheduler"}


@pytest.mark.parametrize("path", modules("graphs"), ids=str)
def test_graphs_know_neither_host_nor_files(path: Path) -> None:
    allowed = {
        "jax",
        "flax",
        "numpy",
        "graphs",
        "__future__",
        "collections",
        "dataclasses",
        "functools",
        "math",
    }
    # The inventory compiles in threads, measures its own seconds and knows programs by their digests.
    allowed |= {"typing", "time", "concurrent", "hashlib"} if path.name == "inventory.py" else {"typing"}
    assert roots(path) <= allowed


def test_only_the_runner_touches_devices() -> None:
    """jax is imported by the runner's folder and by the reference, which is a forward pass of its own.

    The benchmark's workers are processes of their own, and measure devices.
    """
    touching = {place(path) for path in host_modules() if "jax" in roots(path)}
    elsewhere = {name for name in touching if not name.startswith(f"{RUNNER}/")}
    assert elsewhere <= {"xla_engine/equivalence/reference.py"}


def host_modules() -> list[Path]:
    return [path for path in modules("xla_engine") if path.parent.name != "workers"]


def test_only_the_engine_holds_scheduler_and_runner() -> None:
    both = {
        place(path)
        for path in modules("xla_engine")
        if "class Scheduler" not in path.read_text()
        and {"Scheduler(", "Runner("} <= {f"{name}(" for name in called(path)}
    }
    assert both == {"xla_engine/engine/batch_engine.py"}


def called(path: Path) -> set[str]:
    return {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def test_environment_is_read_in_one_place() -> None:
    readers = {
        place(path)
        for package in PACKAGES
        for path in modules(package)
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"xla_engine/environment.py"}


def test_nothing_unpickles() -> None:
    forbidden = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "torch", "transformers"}
    for package in PACKAGES:
        for path in modules(package):
            if path.name != "oracle_worker.py" and path.parent.name != "workers":  # processes of their own
                assert not roots(path) & forbidden, path
            loaded = set(imports(path))
            assert "xla_engine.equivalence.oracle_worker" not in loaded, path
            assert not any(name.startswith("xla_engine.bench.workers") for name in loaded), path


def test_top_level_is_what_was_promised() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    if not tracked:
        pytest.skip("not a git checkout")
    top = {name.split("/")[0] for name in tracked}
    wanted = {"pyproject.toml", "xla_engine", "graphs", "scheduler", "spikes", "findings", "tests"}
    assert wanted <= top
    assert top - wanted <= {
        "README.md",
        "LICENSE",
        "examples",
        ".ci",
        ".gitignore",
        ".pre-commit-config.yaml",
        ".python-version",
        "docs",
    }


def test_every_package_is_installed() -> None:
    """`pyproject.toml` lists packages one by one, since two folders are imported from another place than they lie."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        place(path.parent).replace("/", ".")
        for package in PACKAGES
        for path in modules(package)
        if path.name == "__init__.py"
    }
    inside = {name if name.startswith("xla_engine") else f"xla_engine.{name}" for name in there}
    assert set(listed) == inside and len(listed) == len(inside)


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_and_files_stay_small(package: str) -> None:
    """A folder of more than fifteen modules or a file of more than 350 lines holds more than one idea."""
    paths = modules(package)
    folders = Counter(place(path.parent) for path in paths if path.name != "__init__.py")
    assert {name: count for name, count in folders.items() if count > 15} == {}
    lines = {place(path): len(path.read_text().splitlines()) for path in paths}
    assert {name: count for name, count in lines.items() if count > 350} == {}


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports for types count too: two files that need each other's names are one file, or three."""
    files = {".".join(inside(path)): path for package in PACKAGES for path in modules(package)}
    needed = {
        name: {
            found
            for each in imported_names(path)
            for found in (each, each.rpartition(".")[0])
            if found in files
        }
        for name, path in files.items()
    }
    for name, found in needed.items():  # a package's own names come from its modules
        needed[name] = {each for each in found if not name.startswith(f"{each}.") and each != name}
    try:
        TopologicalSorter(needed).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def inside(path: Path) -> tuple[str, ...]:
    """The name by which a module is imported, in parts."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return parts if parts[0] == "xla_engine" else ("xla_engine", *parts)


def imported_names(path: Path) -> Iterator[str]:
    """Modules, and names in modules, that a file imports, also inside functions and for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_files_of_a_user_with_these_names_do_no_harm(tmp_path: Path) -> None:
    """`graphs` and `scheduler` are everyday names; ours are imported from `xla_engine`."""
    (tmp_path / "scheduler.py").write_text("raise SystemExit('the scheduler of the user')\n")
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs" / "__init__.py").write_text("raise SystemExit('the graphs of the user')\n")
    (tmp_path / "script.py").write_text("from xla_engine import LLM, XlaBatchEngine\nprint(LLM.__module__)\n")
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "xla_engine.llm\n", done.stderr
