"""How the C++ operations are compiled: by one recipe at a first start and into a wheel. Needs no device and no jax."""

import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC")
_SECONDS = 600  # a compiler gets this long for a file, on a machine that may be busy with ten times its cores


class NativeBuildError(Exception):
    """The C++ kernels cannot be built here; the text says why and what to do."""


def compile_library(
    compiler: str, flags: Sequence[str], sources: Sequence[Path], headers: Path, made: Path
) -> None:
    """Compile sources to the shared library `made`. headers: XLA's, of foreign functions. Raises NativeBuildError."""
    names = [str(source) for source in sources]
    run([compiler, *FLAGS, *flags, f"-isystem{headers}", "-shared", *names, "-o", str(made)])


def source_text(directory: Path) -> str:
    """All that is compiled, in one order."""
    return "".join(path.read_text() for path in sorted(directory.iterdir()) if path.suffix in (".cc", ".h"))


def source_digest(directory: Path) -> str:
    """Of the sources and of the flags that every library has."""
    return hashlib.sha256("\0".join((*FLAGS, source_text(directory))).encode()).hexdigest()


def ffi_version(headers: Path) -> tuple[int, int]:
    """Major and minor version of XLA's foreign-function interface, from the headers that come with jaxlib."""
    text = (headers / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (re.search(rf"define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if major is None or minor is None:
        raise NativeBuildError(f"{headers} does not tell the version of XLA's foreign-function interface")
    return int(major[1]), int(minor[1])


def run(words: Sequence[str]) -> str:
    """What a command prints. Raises NativeBuildError where it fails, with the first error."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"{words[0]} did not run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), done.stderr.strip()[:200])
        raise NativeBuildError(f"{words[0]} failed: {first}")
    return done.stdout
