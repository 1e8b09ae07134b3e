"""The build backend: setuptools', with a step that compiles the C++ operations into wheels.

An editable install compiles nothing: a checkout does so at its first start. A wheel that is built where there is no
C++ compiler contains no libraries, and works on every platform.
"""

import hashlib
import importlib.metadata
import logging
import os
import platform
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, build_meta
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

_ROOT = Path(__file__).parents[4]
_FOLDER = "xla_engine/runner/native_library"
_log = logging.getLogger(__name__)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """jax besides: its headers are compiled in. An editable install does without."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), "jax>=0.10.2"]


class Build(build):  # type: ignore[misc]
    """setuptools' `build`, and the libraries."""

    sub_commands = [*build.sub_commands, ("build_libraries", None)]  # noqa: RUF012


class BuildLibraries(Command):  # type: ignore[misc]
    """Compile one library for each variant of each instruction set of this platform, beside a manifest."""

    description = "compile the C++ operations"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False  # set by setuptools

    def initialize_options(self) -> None:
        self.build_lib: str | None = None
        self.built: list[str] = []

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if self.editable_mode:
            return
        assert self.build_lib is not None
        folder = Path(self.build_lib) / _FOLDER / "libraries"
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier build
        self.built = compile_libraries(_ROOT / "xla_engine" / "graphs" / "native", folder)

    def get_source_files(self) -> list[str]:
        return []  # they are package data

    def get_outputs(self) -> list[str]:
        return self.built

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Wheel(bdist_wheel):  # type: ignore[misc]
    """A wheel with libraries is for one platform, and for every Python: the libraries do not know it."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.get_finalized_command("build_libraries").get_outputs()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


def compile_libraries(sources: Path, folder: Path) -> list[str]:
    """Fill a folder with libraries and their manifest; returns the paths of the libraries.

    An instruction set that the compiler does not know is left out with a warning, and without a compiler all are.
    """
    sys.path.insert(0, str(_ROOT))
    try:
        import jax

        from xla_engine.environment import compiler
        from xla_engine.runner.native_library import recipe
        from xla_engine.runner.native_library.bundled import Manifest, file_name
        from xla_engine.runner.native_library.instruction_sets import INSTRUCTION_SETS
    except ImportError as error:
        _log.warning(
            "the wheel will contain no libraries: the headers of jaxlib are needed to compile them (%s)",
            error,
        )
        return []
    finally:
        sys.path.remove(str(_ROOT))
    program = shutil.which(compiler())
    if program is None:
        _log.warning("the wheel will contain no libraries: no C++ compiler %r", compiler())
        return []
    headers = Path(jax.ffi.include_dir())
    sets = (each for each in INSTRUCTION_SETS if platform.machine().lower() in each.machines)
    variants = [variant for each in sets for variant in each.variants()]
    folder.mkdir(parents=True)

    def compiled(variant: Any) -> Path | None:
        path = folder / file_name(variant.name)
        try:
            recipe.compile_library(program, variant.flags, sorted(sources.glob("*.cc")), headers, path)
        except recipe.NativeBuildError as error:
            _log.warning("no library for %s: %s", variant.name, error)
            return None
        return path

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = list(pool.map(compiled, variants))
    found = {variant.name: path for variant, path in zip(variants, paths, strict=True) if path is not None}
    if found:
        Manifest(
            sources=recipe.source_digest(sources),
            ffi=recipe.ffi_version(headers),
            jaxlib=importlib.metadata.version("jaxlib"),
            compiler=recipe.run([program, "--version"]).splitlines()[0],
            libraries={name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in found.items()},
        ).write(folder)
    return [str(path) for path in found.values()]
