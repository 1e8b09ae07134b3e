"""Compiled programs on disk, which a start loads without tracing and lowering them.

JAX's own cache only spares XLA's compiler: its key is the lowered program. The key here (`program_key`) is known
before. A file is a pickle around machine code, so reading it runs code in this process, as loading a C++ library does:
it must lie in a directory of this user, belong to this user, and match its checksum. Anything else counts as missing,
and the program is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import uuid
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from xla_engine.environment import compile_cache_directory
from xla_engine.graphs.inventory import GraphReport, Program
from xla_engine.runner.compile_cache import count_compile
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own
from xla_engine.runner.program_key import NoKeyError, code_key, platform_key, program_key

_log = logging.getLogger("xla_engine")
_DIGEST = hashlib.sha256().digest_size
_MOST_BYTES = 512 << 20  # on disk; the files that were not read for longest are deleted


def program_store() -> ProgramStore | None:
    """The store in the user's cache directory; None if this backend's programs are not stored."""
    if jax.default_backend() != "cpu":
        return None
    return ProgramStore(compile_cache_directory() / "executables")


class ProgramStore:
    """Stored programs of an engine on one device.

    A file is found by the program's key, or by the digest of its lowered text if only the code has changed. Both are
    links to one file.

    token: keeps JAX's cache out: XLA cannot serialise a program that came from there.
    has_new: whether programs were stored since the last `tidy`.
    """

    def __init__(self, directory: Path) -> None:
        self.token = uuid.uuid4().hex
        self.has_new = False
        self._directory = private_directory(directory)
        self._platform = platform_key()
        try:
            self._code: str | None = code_key()
        except NoKeyError as why:
            _log.info("programs are traced again, because %s", why)
            self._code = None

    def load(self, program: Program) -> tuple[Any, GraphReport] | None:
        path = self._path(program)
        return None if path is None else self._read(path, program.name)

    def load_lowered(self, program: Program, lowered: Any, digest: str) -> tuple[Any, GraphReport] | None:
        path = self._lowered_path(program, digest)
        if (found := self._read(path, program.name)) is None:
            return None
        compiled, _ = found
        if (compiled.in_tree, compiled.out_tree) != (lowered.in_tree, lowered.out_tree):
            return None
        self._link(path, program)
        return found

    def save(self, program: Program, compiled: Any, report: GraphReport) -> None:
        report = replace(report, lower_seconds=0.0, compile_seconds=0.0)
        try:
            packed = zlib.compress(pickle.dumps((report, *serialize_executable.serialize(compiled))), 1)
        except Exception as error:  # a program with constants, or a backend that cannot serialise
            _log.info("%s: cannot be stored: %s", program.name, error)
            return
        path = self._lowered_path(program, report.digest)
        with contextlib.suppress(OSError):  # the next start compiles again
            write_own(path, hashlib.sha256(packed).digest() + packed)
            self._link(path, program)
            self.has_new = True

    def tidy(self, most_bytes: int = _MOST_BYTES) -> None:
        """Delete what JAX's cache keeps of new programs, and of ours the files that were not read for longest."""
        self.has_new = False
        with contextlib.suppress(OSError):
            for path in Path(jax.config.jax_compilation_cache_dir).glob(f"*{self.token}*"):
                path.unlink(missing_ok=True)
            found = [(path.stat(), path) for path in self._directory.glob("*.program")]
            total = 0
            for status, path in sorted(found, key=lambda item: -item[0].st_mtime):
                total += status.st_size // status.st_nlink
                if total > most_bytes:
                    path.unlink(missing_ok=True)

    def _read(self, path: Path, name: str) -> tuple[Any, GraphReport] | None:
        try:
            content = read_own(path)
            path.touch()
        except OSError:
            return None
        digest, packed = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(packed).digest() != digest:
            return None
        try:
            report, executable, given, returned = pickle.loads(zlib.decompress(packed))
            device = jax.devices()[0]
            compiled = serialize_executable.deserialize_and_load(
                executable, given, returned, backend=device.client, execution_devices=[device]
            )
        except Exception as error:  # whatever XLA and JAX raise for a file that does not suit them
            _log.info("%s: compiled again, as the stored program cannot be loaded: %s", name, error)
            return None
        count_compile(name)
        return compiled, report

    def _link(self, path: Path, program: Program) -> None:
        if (alias := self._path(program)) is not None:
            with contextlib.suppress(OSError):
                alias.unlink(missing_ok=True)
                os.link(path, alias)

    def _path(self, program: Program) -> Path | None:
        if self._code is None:
            return None
        try:
            return self._directory / f"{program_key(program, self._code, self._platform)[:40]}.program"
        except NoKeyError as why:
            _log.info("%s is traced again, because its key would depend on %s", program.name, why)
            return None

    def _lowered_path(self, program: Program, digest: str) -> Path:
        key = hashlib.sha256(f"{self._platform} {program.name} {digest}".encode()).hexdigest()
        return self._directory / f"{key[:40]}.program"
