"""Which entry of JAX's compile cache a program is, so that another process need not trace and lower it to know.

The engine's own store does not serve: a program that JAX's cache holds cannot be serialised again, so after each
change of the code the store would have all of them compiled again, which JAX's cache spares.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compilation_cache
from jax.experimental import serialize_executable

from xla_engine.environment import compile_cache_directory
from xla_engine.graphs.inventory import GraphReport
from xla_engine.runner.native_library.cache import private_directory, read_own, write_own

_OLDEST = 86400  # seconds; what older code has written is deleted then


class _Compiled(threading.local):
    """The executable that a thread compiled or read last, and the key of its entry."""

    def __init__(self) -> None:
        self.key, self.executable = "", None


_last = _Compiled()


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Sees which entries JAX reads and writes."""
    get, put = compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time

    def read(cache_key: str, *rest: Any, **named: Any) -> Any:
        found = get(cache_key, *rest, **named)
        _last.key, _last.executable = cache_key, found[0]
        return found

    def write(cache_key: str, module_name: str, executable: Any, *rest: Any) -> None:
        put(cache_key, module_name, executable, *rest)
        _last.key, _last.executable = cache_key, executable

    _delete_old()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compilation_cache, "get_executable_and_time", read)
        patch.setattr(compilation_cache, "put_executable_and_time", write)
        yield


def save(key: str, compiled: Any, report: GraphReport) -> None:
    """Write which entry the program is that this thread has just compiled, if JAX keeps it."""
    entry, executable, _last.executable = _last.key, _last.executable, None
    unloaded = getattr(compiled._executable, "_unloaded_executable", None)
    if unloaded is None or executable is not unloaded.xla_executable or compiled._params.const_args:
        return
    given, structure = jax.tree.flatten(compiled.args_info)
    file = io.BytesIO()
    _Pickler(file).dump((unloaded, given, compiled._no_kwargs))
    report = replace(report, lower_seconds=0.0, compile_seconds=0.0)
    content = pickle.dumps((entry, report, file.getvalue(), structure, compiled.out_tree))
    with contextlib.suppress(OSError):
        write_own(_path(key), content)


def load(key: str) -> tuple[Any, GraphReport] | None:
    """The program and its report; None if there is none, or JAX's cache has lost it."""
    device = jax.devices()[0]
    try:
        entry, report, packed, structure, returned = pickle.loads(read_own(_path(key)))
        found = compilation_cache.decompress_executable(
            compilation_cache._get_cache(device.client).get(entry)
        )
        reader = _Unpickler(io.BytesIO(packed), device.client, [device])
        reader.executable, _ = compilation_cache.extract_executable_and_time(found)
        unloaded, given, no_kwargs = reader.load()
        loaded = unloaded.load()
    except Exception:  # whatever JAX raises where it has no cache or no such entry, or a damaged one
        return None
    info = structure.unflatten(given)
    return jax.stages.Compiled(loaded, [], info, returned, no_kwargs=no_kwargs), report


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Leaves the machine code out."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, serialize_executable.xc.LoadedExecutable | serialize_executable._jax.Executable):
            return ("exec", b"")
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Reads `executable` where the machine code was left out."""

    executable = b""

    def persistent_load(self, pid: Any) -> Any:
        return super().persistent_load(("exec", self.executable) if pid[0] == "exec" else pid)


def _folder() -> Path:
    return private_directory(compile_cache_directory() / "traced_in_tests")


def _path(key: str) -> Path:
    return _folder() / key[:40]


def _delete_old() -> None:
    for path in _folder().iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _OLDEST:
                path.unlink()
