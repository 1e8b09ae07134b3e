"""Libraries in the package are used if they fit; otherwise a log line says why."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from tests.support.models import TINY_ENGINE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.runner.backends import library_of
from xla_engine.runner.native_library import build, bundled, compiled, recipe
from xla_engine.runner.native_library.bundled import Manifest, file_name, read_manifest
from xla_engine.runner.native_library.instruction_sets import INSTRUCTION_SETS, available

BEST = available()[0]
NAMES = [variant.name for each in available() for variant in each.variants()]
VERSION = recipe.ffi_version(Path(jax.ffi.include_dir()))


def made(folder: Path, **changes: object) -> Path:
    """A folder of libraries for this machine that contain only words."""
    folder.mkdir(exist_ok=True)
    digests = {}
    for name in NAMES:
        (folder / file_name(name)).write_text(name)
        digests[name] = hashlib.sha256(name.encode()).hexdigest()
    manifest = Manifest(recipe.source_digest(build.SOURCES), VERSION, "0.0", "g++", digests)
    replace(manifest, **changes).write(folder)  # type: ignore[arg-type]
    return folder


@pytest.fixture
def bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The libraries that would be loaded, in order; none is loaded."""
    loaded: list[Path] = []
    monkeypatch.setattr(build, "BUNDLE", tmp_path / "libraries")
    monkeypatch.setattr(build, "_bind", lambda isa, parts, path: loaded.append(path))
    monkeypatch.setattr(build, "_choose", lambda isa, libraries: None)
    monkeypatch.setattr(build, "build", lambda isa, parts: {part: Path("compiled", part) for part in parts})
    for name in ("_origins", "_digests"):
        monkeypatch.setattr(build, name, {})
    monkeypatch.setattr(build, "_bound", set())
    build._register.cache_clear()
    yield loaded
    build._register.cache_clear()


def test_a_library_that_fits_serves_without_a_compiler(
    tmp_path: Path, bound: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    folder = made(tmp_path / "libraries")
    assert build.register() == BEST.name and build.origin(BEST.name) == build.BUNDLED
    assert bound == [folder / file_name(BEST.here().name)] and not caplog.records


def test_a_processor_gets_the_variant_of_its_extras(tmp_path: Path, bound: list[Path]) -> None:
    folder = made(tmp_path / "libraries")
    for each in available():
        build.register(each.name)
    assert bound == [folder / file_name(each.here().name) for each in available()]
    plain = {each.name: "" for each in available()}
    bound.clear()
    build._origins.clear()
    build._bound.clear()
    build._register.cache_clear()
    made(folder, libraries={name: hashlib.sha256(name.encode()).hexdigest() for name in plain})
    for each in available():  # an older compiler knew no extras
        build.register(each.name)
    assert bound == [folder / file_name(each.name) for each in available()]


def damage(folder: Path) -> None:
    (folder / file_name(BEST.here().name)).write_text("something else")


def lose(folder: Path) -> None:
    (folder / file_name(BEST.here().name)).unlink()


def garble(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def empty(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"ffi": [0, 1]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": "0" * 64}, "built from other sources"),
        ({"ffi": (VERSION[0], VERSION[1] + 1)}, "with jaxlib 0.0 for version"),
        ({"ffi": (VERSION[0] + 1, 0)}, "with jaxlib 0.0 for version"),
        (damage, "it is damaged"),
        (lose, "it cannot be read"),
        (garble, "its manifest cannot be read"),
        (empty, "its manifest cannot be read"),
    ],
)
def test_a_library_that_does_not_fit_is_left_alone_with_one_line(
    tmp_path: Path,
    bound: list[Path],
    caplog: pytest.LogCaptureFixture,
    change: dict[str, object] | Callable[[Path], None],
    words: str,
) -> None:
    if isinstance(change, dict):
        made(tmp_path / "libraries", **change)
    else:
        change(made(tmp_path / "libraries"))
    assert build.register() == build.register() == BEST.name and build.origin(BEST.name) == build.COMPILED
    assert bound == [Path("compiled", part) for part in sorted(build.PARTS)]
    (record,) = caplog.records
    assert words in record.getMessage() and record.levelno == logging.WARNING


def test_a_process_compiles_the_parts_that_are_asked_for(bound: list[Path]) -> None:
    for parts in ({"attention_bf16", "sampler"}, {"sampler"}, {"recurrent", "sampler"}):
        assert build.register(None, parts) == BEST.name
    assert [path.name for path in bound] == ["attention_bf16", "sampler", "recurrent"]
    assert build.origin(BEST.name) == build.COMPILED


def test_a_description_of_an_engine_compiles_nothing(
    tmp_path: Path, bound: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only needs a compiler, unless a library came with the package; and a start afterwards compiles."""
    with build.building_nothing():
        assert build.register(None, {"sampler"}) == BEST.name and build.origin(BEST.name) == build.LATER
    assert not bound
    assert build.register(None, {"sampler"}) == BEST.name and build.origin(BEST.name) == build.COMPILED
    assert [path.name for path in bound] == ["sampler"]
    for registered in (build._origins, build._bound):
        registered.clear()
    build._register.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with build.building_nothing(), pytest.raises(build.NativeBuildError, match=r"no C\+\+ compiler"):
        build.register(None, {"sampler"})
    build._register.cache_clear()
    made(tmp_path / "libraries")
    with build.building_nothing():
        assert build.register(None, {"sampler"}) == BEST.name and build.origin(BEST.name) == build.BUNDLED


def test_every_source_file_is_a_part_and_defines_its_handlers() -> None:
    assert {path.stem for path in build.SOURCES.glob("*.cc")} == build.PARTS


def test_an_older_interface_of_the_same_major_version_serves(tmp_path: Path, bound: list[Path]) -> None:
    made(tmp_path / "libraries", ffi=(VERSION[0], VERSION[1] - 1))
    build.register()
    assert build.origin(BEST.name) == build.BUNDLED and len(bound) == 1


def test_a_library_that_cannot_be_loaded_gives_way_to_the_compiler(
    tmp_path: Path, bound: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A text file is no shared library, and a library of a newer system cannot be loaded."""
    made(tmp_path / "libraries")
    really = build.ctypes.CDLL

    def bind(isa: object, parts: object, path: Path) -> None:
        if path.parent.name != "compiled":
            really(str(path))

    monkeypatch.setattr(build, "_bind", bind)
    assert build.register() == BEST.name and build.origin(BEST.name) == build.COMPILED
    (record,) = caplog.records
    assert "library in the package is not used" in record.getMessage()


def test_without_a_compiler_a_lesser_library_of_the_package_serves(
    tmp_path: Path, bound: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if len(available()) < 2:
        pytest.skip("needs a machine with two instruction sets")
    lesser = available()[1]
    digests = {each.name: hashlib.sha256(each.name.encode()).hexdigest() for each in lesser.variants()}

    def fails(isa: object, parts: object) -> Path:
        raise build.NativeBuildError("no C++ compiler")

    monkeypatch.setattr(build, "build", fails)
    made(tmp_path / "libraries", libraries=digests)
    assert build.register() == lesser.name
    assert f"for {lesser.name} only: no C++ compiler" in caplog.records[-1].getMessage()
    with pytest.raises(build.NativeBuildError, match="no C\\+\\+ compiler"):
        build.register(BEST.name)


def test_a_first_start_compiles_the_sampler_before_it_imports_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a background thread, where a CPU will need it and no library came with the package."""
    begun: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(compiled, "build", lambda isa, parts: begun.append((isa.name, tuple(parts))))
    monkeypatch.setattr(compiled, "has_accelerator", lambda: False)
    monkeypatch.delenv("XLA_ENGINE_ISA", raising=False)

    def begin(isa: str) -> list[tuple[str, tuple[str, ...]]]:
        begun.clear()
        compiled.begin_compiling(isa)
        for thread in threading.enumerate():
            if thread.name == compiled.begin_compiling.__name__:
                thread.join()
        return list(begun)

    assert begin("auto") == begin(BEST.name) == [(BEST.name, ("sampler",))]
    assert begin("none") == []
    with monkeypatch.context() as patched:
        patched.setattr(compiled, "has_accelerator", lambda: True)
        assert begin("auto") == []
    monkeypatch.setattr(compiled, "BUNDLE", tmp_path)
    assert begin("auto") == []
    code = "import sys, xla_engine.runner.native_library.compiled; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert compiled.headers() == Path(jax.ffi.include_dir())


def test_a_checkout_has_no_libraries() -> None:
    assert read_manifest(Path(bundled.__file__).parent / bundled.FOLDER) is None


def test_the_start_says_where_the_library_came_from(make_engine: Callable[..., XlaBatchEngine]) -> None:
    engine = make_engine(TINY_ENGINE)
    assert library_of(engine.runner.spec) == build.COMPILED and engine.self_check is not None
    isa = engine.self_check.isa  # not the best on a machine with AMX, which models this narrow do not use
    assert isa in NAMES and f"by C++ that was compiled on this machine ({isa})" in engine.self_check.promise


def test_variants_have_a_name_and_flags_of_their_own() -> None:
    variants = [variant for each in INSTRUCTION_SETS for variant in each.variants()]
    assert len({each.name for each in variants}) == len({each.flags for each in variants}) == len(variants)
    assert not any("native" in flag for each in variants for flag in each.flags)
