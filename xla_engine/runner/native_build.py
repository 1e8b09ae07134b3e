"""Builds and registers the C++ operations (`graphs/native/`) with the machine's own compiler.

The library is compiled on first use for this CPU (seconds), kept beside the compiled programs and found there next
time. Without a compiler pure JAX serves.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

from xla_engine import graphs
from xla_engine.config import compiler, native_cache_directory
from xla_engine.graphs.attention.native import TARGET
from xla_engine.graphs.delta_net.native import DELTA_RULE
from xla_engine.graphs.experts.native import EXPERTS
from xla_engine.graphs.linear.native import GATED_LINEAR, HEAD, LINEAR

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
_STATE = {TARGET: "XlaEngineAttend", DELTA_RULE: "XlaEngineDeltaRule"}
_PRODUCTS = {
    LINEAR: "XlaEngineLinear",
    HEAD: "XlaEngineHead",
    GATED_LINEAR: "XlaEngineGatedLinear",
    EXPERTS: "XlaEngineExperts",
}
_SECONDS = 120  # a compiler gets this long


class NativeBuildError(Exception):
    """The C++ attention cannot be built here; the text says why and what would help."""


@functools.cache
def register() -> bool:
    """Make the operations known to XLA:CPU, once per process. Raises NativeBuildError.

    Returns whether this machine has the matrix tiles that products need; attention and delta rule do without.
    """
    library = ctypes.CDLL(str(build()))
    library.XlaEngineTiles.restype = ctypes.c_bool
    tiles = bool(library.XlaEngineTiles())
    for target, symbol in {**_STATE, **(_PRODUCTS if tiles else {})}.items():
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    return tiles


def build(*flags: str) -> Path:
    """The library for this machine, compiled if it is not there yet. `flags` are added. Raises NativeBuildError."""
    program = shutil.which(compiler())
    if program is None:
        raise NativeBuildError(f"no C++ compiler {compiler()!r} (install one, for example g++, or set CXX)")
    directory = Path(graphs.__file__).parent / "native"
    sources = [str(path) for path in sorted(directory.glob("*.cc"))]
    command = [program, *_FLAGS, *flags, f"-isystem{jax.ffi.include_dir()}", *sources]
    text = "".join(path.read_text() for path in sorted(directory.iterdir()))
    version = _run([program, "--version"])
    identity = "\0".join((version, *_FLAGS, *flags, text, _headers(), _processor()))
    library = native_cache_directory() / f"native-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            made = Path(scratch) / library.name
            _run([*command, "-o", str(made)])
            os.replace(made, library)  # whole or not at all, also when two processes build
    return library


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


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
