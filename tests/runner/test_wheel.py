"""The wheel: built as by `python -m build`, installed and run without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from xla_engine.runner.native_library.instruction_sets import available

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
CHECK = ROOT / ".ci" / "installed.py"


def run(words: Sequence[str | Path], *, path: str, cwd: Path, cxx: str = "") -> str:
    """The output of a command, with this PATH and without our other settings."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=kept | {"PATH": path} | ({"CXX": cxx} if cxx else {}),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def checkout(folder: Path) -> Path:
    """A copy of the sources, without the remains of earlier builds."""
    for name in ("xla_engine", "graphs", "scheduler"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__", "libraries"),
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def quick_compiler(folder: Path) -> str:
    """The system's compiler without optimizations and inlining, which take minutes; the tests need only complete
    wheels."""
    program = folder / "c++"
    program.write_text('#!/bin/sh\nexec c++ "$@" -O0 -Dalways_inline=unused\n')
    program.chmod(0o755)
    return str(program)


def built(source: Path, out: Path, *options: str, path: str, cxx: str = "") -> Path:
    run(
        [sys.executable, "-m", "build", "--no-isolation", *options, "-o", out, source],
        path=path,
        cwd=out.parent,
        cxx=cxx,
    )
    (wheel,) = out.glob("*.whl")
    return wheel


def environment(folder: Path, *packages: str | Path) -> Path:
    """The interpreter of a new environment that has these packages, and neither pip nor what they need."""
    run([sys.executable, "-m", "venv", "--without-pip", folder], path=os.environ["PATH"], cwd=folder.parent)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps"]
    run([*install, *packages], path=os.environ["PATH"], cwd=folder.parent)
    return python


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built without a compiler."""
    folder = tmp_path_factory.mktemp("plain")
    source = checkout(folder / "source")
    return built(source, folder / "dist", "--wheel", path=os.environ["PATH"], cxx="no-such-compiler")


def test_an_installed_wheel_needs_no_compiler(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler to build with")
    source = checkout(tmp_path / "source")
    cxx = quick_compiler(tmp_path)
    wheel = built(source, tmp_path / "dist", path=os.environ["PATH"], cxx=cxx)  # by way of the source archive
    assert "-py3-none-" in wheel.name and "none-any" not in wheel.name
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    assert archive.name.startswith("xla_engine-")

    clean = tmp_path / "clean"
    python = environment(clean, "--no-index", wheel)
    site = run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], path="", cwd=tmp_path
    )
    # The packages that ours needs; a line of a .pth file follows no other .pth file, so none of our checkouts.
    Path(site.strip(), "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    printed = run([python, CHECK], path=str(clean / "bin"), cwd=tmp_path)
    assert f"{available()[0].name}: " in printed
    shown = run(
        [clean / "bin" / "xla-engine", "inspect", ROOT / "xla_engine" / "embedded"],
        path=str(clean / "bin"),
        cwd=tmp_path,
    )
    assert f"({available()[0].name}; C++ came with the package)" in shown
    for words in (["soak", "--lives", "1"], ["bench", "--peer", "transformers=python"]):
        done = subprocess.run(
            [clean / "bin" / "xla-engine", *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and "from a checkout" in done.stderr and "Traceback" not in done.stderr


def test_without_a_compiler_a_wheel_for_every_platform_is_built(plain: Path) -> None:
    assert plain.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(plain).namelist()
    assert "xla_engine/graphs/native/linear_bf16.cc" in names and not any(
        name.endswith(".so") for name in names
    )
    assert not any(
        name.startswith(("xla_engine/tools/soak/", "xla_engine/tools/bench/workers/peers/")) for name in names
    )


def test_an_editable_install_compiles_nothing(tmp_path: Path) -> None:
    source = checkout(tmp_path / "source")
    code = (
        "import sys; sys.path.insert(0, 'xla_engine/runner/native_library/wheel'); import backend; "
        "print(backend.get_requires_for_build_editable()); print(backend.build_editable(sys.argv[1]))"
    )
    said = run([sys.executable, "-c", code, tmp_path], path=os.environ["PATH"], cwd=source)
    assert "jax" not in said.split("]")[0]
    assert "none-any.whl" in said and not list(source.rglob("*.so"))


USER = """from xla_engine import LLM, SamplingParams

with LLM() as llm:
    outputs = llm.generate(["def add(a, b):"], SamplingParams(temperature=0.0, max_tokens=8))
    text: str = outputs[0].outputs[0].text
    reveal_type(outputs)
"""


@pytest.mark.parametrize("form", ["editable", "wheel"])
def test_type_checkers_find_the_installed_package(
    tmp_path: Path, form: str, request: pytest.FixtureRequest
) -> None:
    """mypy and pyright check a user's file against the types of the installed package."""
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("needs pyright: pip install 'pyright[nodejs]'")
    if form == "editable":
        python = environment(tmp_path / "clean", "--editable", checkout(tmp_path / "source"))
    else:
        python = environment(tmp_path / "clean", request.getfixturevalue("plain"))
    user = tmp_path / "user"
    user.mkdir()
    (user / "script.py").write_text(USER)
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--python-executable",
        python,
        "--strict",
        "--ignore-missing-imports",
    ]
    assert 'Revealed type is "xla_engine.outputs.RequestOutputs"' in run(
        [*mypy, "script.py"], path=os.environ["PATH"], cwd=user
    )
    assert 'Type of "outputs" is "RequestOutputs"' in run(
        [pyright, "--pythonpath", python, "script.py"], path=os.environ["PATH"], cwd=user
    )
