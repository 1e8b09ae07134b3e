"""Compiles parts of the C++ kernels and caches them. Does not import jax, so that a first start can begin before."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from xla_engine import graphs
from xla_engine.config import AUTO
from xla_engine.environment import compiler, has_accelerator, native_cache_directory, requested_isa
from xla_engine.runner.native_library import bundled, recipe
from xla_engine.runner.native_library import cache as library_cache
from xla_engine.runner.native_library.instruction_sets import InstructionSet, available, processor

SOURCES = Path(graphs.__file__).parent / "native"
BUNDLE = Path(bundled.__file__).parent / bundled.FOLDER
_EVERY_MODEL = ("sampler",)  # parts that every model on a CPU needs
_LARGE = ("attention", "linear", "lora", "experts")  # parts that take longer to compile than others


def build(isa: InstructionSet, parts: Collection[str]) -> dict[str, Path]:
    """The libraries of parts for an instruction set, compiled if necessary. Raises NativeBuildError."""
    directory = library_cache.private_directory(native_cache_directory())
    try:
        try:
            return _build_in(directory, isa, parts)
        except (OSError, recipe.NativeBuildError):
            if not library_cache.is_full(directory):
                raise
            return _build_in(library_cache.temporary_directory(f"{directory}: the disk is full"), isa, parts)
    except OSError as error:
        raise recipe.NativeBuildError(f"the library cannot be cached: {error}") from error


def _build_in(directory: Path, isa: InstructionSet, parts: Collection[str]) -> dict[str, Path]:
    """Raises NativeBuildError and OSError."""
    version, include = identity(isa), headers()

    def made(part: str) -> Path:
        return library_cache.library(
            directory,
            f"native-{isa.name}-{part}-{version[:16]}.so",
            lambda path: recipe.compile_library(
                _compiler(), isa.compiler_flags(), [SOURCES / f"{part}.cc"], include, path
            ),
        )

    largest_first = sorted(
        parts,
        key=lambda part: (part.endswith(("coded", "fours")), part.startswith(_LARGE)),
        reverse=True,
    )
    # One more than cores, so that most models' three parts share two cores and no core waits for the last part.
    with ThreadPoolExecutor((os.cpu_count() or 1) + 1) as pool:
        return dict(zip(largest_first, pool.map(made, largest_first), strict=True))


def begin_compiling(isa: str, parts: Collection[str] = _EVERY_MODEL) -> None:
    """Compile parts in a background thread, by default what every model on a CPU needs, unless a library came with
    the package.

    A later `build` waits for it, and reports its errors. isa: as in `EngineConfig.isa`.
    """
    asked = requested_isa(isa)
    chosen = next((each for each in available() if asked in (AUTO, each.name)), None)
    if chosen is None or BUNDLE.exists() or has_accelerator():
        return

    def run() -> None:
        with contextlib.suppress(recipe.NativeBuildError, OSError):
            build(chosen, parts)

    threading.Thread(target=run, name=begin_compiling.__name__).start()


def identity(isa: InstructionSet) -> str:
    """A digest of all that a compiled library depends on."""
    version = recipe.run([_compiler(), "--version"])
    jaxlib = importlib.metadata.version("jaxlib")  # its headers are compiled in
    text = recipe.source_text(SOURCES)
    parts = (version, *recipe.FLAGS, *isa.compiler_flags(), text, jaxlib, processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def headers() -> Path:
    """Where `jax.ffi.include_dir` is, without importing jax."""
    found = importlib.util.find_spec("jaxlib")
    if found is None or not found.submodule_search_locations:
        raise recipe.NativeBuildError("jaxlib is not installed")
    return Path(found.submodule_search_locations[0]) / "include"


def _compiler() -> str:
    program = shutil.which(compiler())
    if program is None:
        raise recipe.NativeBuildError(
            f"no C++ compiler {compiler()!r} (install one, for example g++, or set CXX)"
        )
    return program
