"""Compiled programs on disk, which a start loads without tracing and lowering them.

JAX's own cache only spares XLA's compiler: its key is the lowered program. The key here (`program_key`) is known
before. A file is a pickle around machine code, so reading it runs code in this process, as loading a C++ library does:
it must lie in a directory of this user, belong to this user, and match its checksum. Anything else counts as missing,
and the program is compiled.
"""

from __future__ import annotations

import contextlib
import logging
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
from xla_engine.runner.native_library.cache import private_directory, read_sealed, write_sealed
from xla_engine.runner.program_key import NoKeyError, code_key, platform_key, program_key

_log = logging.getLogger("xla_engine")
_MOST_BYTES = 512 << 20  # on disk; the files that were not read for longest are deleted


def program_store(kind: str) -> ProgramStore | None:
    """The store in the user's cache directory; None if programs of this backend, or of this code, are not stored.

    kind: as of `ProgramStore`.
    """
    if jax.default_backend() != "cpu":
        return None
    try:
        return ProgramStore(compile_cache_directory() / "executables", kind)
    except NoKeyError as why:
        _log.info("programs are traced again, because %s", why)
        return None


class ProgramStore:
    """Stored programs of an engine on one device.

    token: keeps JAX's cache out: XLA cannot serialise a program that came from there.
    has_new: whether programs were stored since the last `tidy`.
    """

    def __init__(self, directory: Path, kind: str = "") -> None:
        """kind: programs of one kind are not loaded as those of another: audited ones have passed the audit.

        Raises NoKeyError if code was replaced in this process.
        """
        self.token = uuid.uuid4().hex
        self.has_new = False
        self._keys = code_key(), platform_key(), kind
        self._directory = private_directory(directory)

    def key(self, program: Program) -> str | None:
        try:
            return program_key(program, *self._keys)
        except NoKeyError as why:
            _log.info("%s is traced again, because its key would depend on %s", program.name, why)
            return None

    def load(self, key: str, name: str) -> tuple[Any, GraphReport] | None:
        if (packed := read_sealed(self._path(key))) is None:
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

    def save(self, key: str, compiled: Any, report: GraphReport) -> None:
        report = replace(report, lower_seconds=0.0, compile_seconds=0.0)
        try:
            packed = zlib.compress(pickle.dumps((report, *serialize_executable.serialize(compiled))), 1)
        except Exception as error:  # a program with constants, or a backend that cannot serialise
            _log.info("%s: cannot be stored: %s", report.name, error)
            return
        with contextlib.suppress(OSError):  # the next start compiles again
            write_sealed(self._path(key), packed)
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
                total += status.st_size
                if total > most_bytes:
                    path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key[:40]}.program"
