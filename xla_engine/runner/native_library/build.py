"""Builds and registers the C++ operations (`graphs/native/`) with the machine's own compiler.

The library is compiled on first use for one instruction set of this CPU (seconds), kept beside the compiled programs
and found there next time. Without a compiler pure JAX serves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import jax

from xla_engine import graphs
from xla_engine.config import compiler, native_cache_directory
from xla_engine.graphs.attention.native import TARGET
from xla_engine.graphs.delta_net.native import DELTA_RULE
from xla_engine.graphs.experts.native import EXPERTS
from xla_engine.graphs.linear.native import GATED_LINEAR, HEAD, LINEAR
from xla_engine.runner.native_library import cache as library_cache
from xla_engine.runner.native_library.instruction_sets import InstructionSet, available, processor

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared")
_OPERATIONS = {
    TARGET: "XlaEngineAttend",
    DELTA_RULE: "XlaEngineDeltaRule",
    LINEAR: "XlaEngineLinear",
    HEAD: "XlaEngineHead",
    GATED_LINEAR: "XlaEngineGatedLinear",
    EXPERTS: "XlaEngineExperts",
}
_SECONDS = 120  # a compiler gets this long


class NativeBuildError(Exception):
    """The C++ operations cannot be built here; the text says why and what would help."""


def register(isa: str | None = None) -> str:
    """Make the operations known to XLA:CPU, once per process and instruction set, and return its name.

    None takes the best that serves here. Raises NativeBuildError, also where this machine lacks `isa`.
    """
    candidates = [each for each in available() if isa in (None, each.name)]
    for each in candidates:
        if _register(each):
            return each.name
    here = ", ".join(each.name for each in available()) or "none"
    raise NativeBuildError(f"this machine does not serve {isa or 'any instruction set'} (it has: {here})")


@functools.cache
def _register(isa: InstructionSet) -> bool:
    """Whether the operating system lets us have it."""
    library = ctypes.CDLL(str(build(isa)))
    library.XlaEngineReady.restype = ctypes.c_bool
    if not library.XlaEngineReady():
        return False
    for target, symbol in _OPERATIONS.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(f"{target}_{isa.name}", capsule, platform="cpu")
    return True


def build(isa: InstructionSet, *flags: str) -> Path:
    """The library for an instruction set, compiled if it is not there. `flags` are added. Raises NativeBuildError."""
    program = shutil.which(compiler())
    if program is None:
        raise NativeBuildError(f"no C++ compiler {compiler()!r} (install one, for example g++, or set CXX)")
    directory = Path(graphs.__file__).parent / "native"
    sources = [str(path) for path in sorted(directory.glob("*.cc"))]
    options = (*_FLAGS, *isa.compiler_flags(), *flags)
    command = [program, *options, f"-isystem{jax.ffi.include_dir()}", *sources]
    text = "".join(path.read_text() for path in sorted(directory.iterdir()) if path.suffix in (".cc", ".h"))
    version = _run([program, "--version"])
    identity = "\0".join((version, *options, text, _headers(), processor()))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    try:
        name = f"native-{isa.name}-{digest}.so"
        return library_cache.library(
            native_cache_directory(), name, lambda made: _run([*command, "-o", str(made)])
        )
    except OSError as error:
        raise NativeBuildError(f"the library cannot be kept: {error}") from error


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        first = next(
            (line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200]
        )
        raise NativeBuildError(f"{command[0]} failed: {first}")
    return done.stdout


def _headers() -> str:
    """The foreign-function headers' version: the library is built against them."""
    return importlib.metadata.version("jaxlib")
