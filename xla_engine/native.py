"""Builds and registers the C++ attention (`graphs/attention.cc`) with the machine's own compiler.

The library is compiled on first use for this CPU (seconds), kept beside the compiled programs and found there next
time. Without a compiler the pure-JAX backend serves.
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

import graphs
from graphs.attention_native import TARGET
from xla_engine.config import compiler, native_cache_directory

_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
_SYMBOL = "XlaEngineAttend"
_SECONDS = 120  # a compiler gets this long


class NativeBuildError(Exception):
    """The C++ attention cannot be built here; the text says why and what would help."""


@functools.cache
def register() -> None:
    """Make the target known to XLA:CPU, once per process. Raises NativeBuildError."""
    library = ctypes.CDLL(str(build()))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(getattr(library, _SYMBOL)), platform="cpu")


def build(*flags: str) -> Path:
    """The library for this machine, compiled if it is not there yet. `flags` are added. Raises NativeBuildError."""
    program = shutil.which(compiler())
    if program is None:
        raise NativeBuildError(f"no C++ compiler {compiler()!r} (install one, for example g++, or set CXX)")
    source = Path(graphs.__file__).with_name("attention.cc")
    command = [program, *_FLAGS, *flags, f"-isystem{jax.ffi.include_dir()}", str(source)]
    version = _run([program, "--version"])
    identity = "\0".join((version, *_FLAGS, *flags, source.read_text(), _headers(), _processor()))
    library = native_cache_directory() / f"attention-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
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
