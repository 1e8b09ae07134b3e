"""The house rules: who may import whom, where the environment is read, where devices are touched."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("graphs", "scheduler", "xla_engine")
OWN = ("xla_engine.graphs", "xla_engine.scheduler")
RUNNER = "xla_engine/runner"


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@dataclass(frozen=True, slots=True)
class Named:
    """Modules that a file imports, also inside functions and for types; names that it imports, with their modules; and
    functions that it calls by name."""

    modules: tuple[str, ...]
    names: tuple[str, ...]
    called: frozenset[str]


@functools.cache
def named(path: Path) -> Named:
    """A file is parsed once for all tests."""
    modules, names, called = [], [], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            modules.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
    return Named(tuple(modules), tuple(names), frozenset(called))


def imports(path: Path) -> tuple[str, ...]:
    return named(path).modules


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


COMPARISON = "xla_engine.utils.comparison"


@pytest.mark.parametrize(
    "path", [*modules("xla_engine/same_bits"), ROOT / f"{COMPARISON.replace('.', '/')}.py"], ids=str
)
def test_the_checks_of_servers_need_the_standard_library_only(path: Path) -> None:
    found = {
        name for name in imports(path) if not name.startswith("xla_engine.same_bits.") and name != COMPARISON
    }
    allowed = {*sys.stdlib_module_names, *(["pytest"] if path.name == "pytest_plugin.py" else [])}
    assert {name.split(".")[0] for name in found} <= allowed


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
        "decimal",
        "functools",
        "math",
        "types",
    }
    # The inventory compiles in threads, measures its own seconds and knows programs by their digests. Specs take their
    # leaves from where the process keeps them.
    more = {"inventory.py": {"time", "concurrent", "hashlib"}, "spec.py": {"contextvars"}}
    allowed |= {"typing"} | more.get(path.name, set())
    assert roots(path) <= allowed


def test_only_the_runner_touches_devices() -> None:
    """jax is imported by the runner's folder, by the reference, which is a forward pass of its own, and by training,
    which is a part of its users' own JAX programs.

    The benchmark's workers are processes of their own, and measure devices.
    """
    touching = {place(path) for path in host_modules() if "jax" in roots(path)}
    elsewhere = {name for name in touching if not name.startswith((f"{RUNNER}/", "xla_engine/training/"))}
    assert elsewhere <= {"xla_engine/equivalence/forward_pass.py"}


def host_modules() -> list[Path]:
    return [path for path in modules("xla_engine") if "workers" not in path.parts]


def test_only_the_engine_holds_scheduler_and_runner() -> None:
    both = {
        place(path)
        for path in modules("xla_engine")
        if "class Scheduler" not in path.read_text()
        and {"Scheduler(", "Runner("} <= {f"{name}(" for name in named(path).called}
    }
    assert both == {"xla_engine/engine/batch_engine.py"}


def test_environment_is_read_in_one_place() -> None:
    readers = {
        place(path)
        for package in PACKAGES
        for path in modules(package)
        if "os.environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"xla_engine/environment.py"}


def test_nothing_unpickles() -> None:
    """The exception is stored compiled programs: they are code anyway, and only files of this user are loaded."""
    forbidden = {"pickle", "dill", "cloudpickle", "shelve", "marshal", "torch", "transformers"}
    for package in PACKAGES:
        for path in modules(package):
            if path.name != "oracle_worker.py" and "workers" not in path.parts:  # processes of their own
                allowed = {"pickle"} if place(path) == "xla_engine/runner/program_store.py" else set()
                assert not roots(path) & forbidden - allowed, path
            loaded = set(imports(path))
            assert "xla_engine.equivalence.oracle_worker" not in loaded, path
            if "workers" not in path.parts:
                assert not any(name.startswith("xla_engine.tools.bench.workers") for name in loaded), path


def test_nothing_that_results_depend_on_asks_libm_or_numpy_for_a_transcendental() -> None:
    """Bits of libm and numpy depend on the processor's maker and generation (findings/same_bits.md). XLA's
    and our own functions do not."""
    names = "exp|exp2|expm1|log|log1p|log2|log10|pow|power|float_power|sin|cos|tan|tanh|erf"
    asked = re.compile(rf"\b(?:np|numpy|math)\.(?:{names})\b|std::(?:{names})\b")
    files = [
        path for folder in ("graphs", "xla_engine/model_loader") for path in (ROOT / folder).rglob("*.*")
    ]
    found = [
        f"{place(path)}: {line.strip()}"
        for path in files
        if path.suffix in (".py", ".h", ".cc")
        for line in path.read_text().splitlines()
        if asked.search(line) and "return std::log(x);  // NaN and infinities are exact" not in line
    ]
    assert found == []


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
        ".github",
        ".gitignore",
        ".pre-commit-config.yaml",
        ".python-version",
        "docs",
    }


def test_one_package_in_one_tree() -> None:
    """`graphs` and `scheduler` are at the top level and linked into the package, so that every tool sees one tree."""
    for name in ("graphs", "scheduler"):
        link = ROOT / "xla_engine" / name
        assert link.is_symlink() and link.readlink() == Path("..") / name
        assert (ROOT / name).is_dir() and not (ROOT / name).is_symlink()
    folders = {path.parent for package in PACKAGES for path in modules(package)}
    lacking = [place(folder) for folder in folders if not (folder / "__init__.py").is_file()]
    assert lacking == [], "wheels leave out a folder without an __init__.py"


def test_packages_extend_no_path() -> None:
    """A package whose `__path__` changes at run time is invisible to type checkers."""
    changed = re.compile(r"__path__\s*(\+?=[^=]|\.(append|extend|insert))")
    assert [place(path) for path in host_modules() if changed.search(path.read_text())] == []


@pytest.mark.full
def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    """In a checkout's root `import graphs` would succeed and load every module a second time."""
    everywhere = [*(path for name in (*PACKAGES, "tests", "examples") for path in modules(name))]
    for path in everywhere:
        found = {name.split(".")[0] for name in imports(path)}
        assert not found & {"graphs", "scheduler"}, (
            f"{path}: import xla_engine.graphs or xla_engine.scheduler"
        )


@pytest.mark.parametrize("package", PACKAGES)
def test_long_files_are_few(package: str) -> None:
    """A file of more than 600 lines needs a reason, which is listed here next to its name."""
    reasons = {
        "xla_engine/config.py": "a field for each option, with its documentation and its check",
        "xla_engine/engine/batch_engine.py": "a method for each thing a caller may ask, mostly its documentation",
    }
    lines = {place(path): len(path.read_text().splitlines()) for path in modules(package)}
    assert {name for name, count in lines.items() if count > 600} <= set(reasons)


def test_no_module_imports_itself_in_a_circle() -> None:
    """Imports for types count too: two files that need each other's names are one file, or three."""
    files = {".".join(inside(path)): path for package in PACKAGES for path in modules(package)}
    needed = {
        name: {
            found for each in named(path).names for found in (each, each.rpartition(".")[0]) if found in files
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
    """The parts of a module's import name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return parts if parts[0] == "xla_engine" else ("xla_engine", *parts)


@pytest.mark.full
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
        timeout=1800,
        check=False,
    )
    assert done.stdout == "xla_engine.llm\n", done.stderr
