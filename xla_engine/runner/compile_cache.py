"""Counts XLA compilations, and sets up JAX's persistent compile cache."""

import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import jax

from xla_engine.runner.native_library.cache import is_full, private_directory

_log = logging.getLogger(__name__)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_total = 0
_listening = False


class _OfThread(threading.local):
    """The names of the programs that a thread has compiled."""

    def __init__(self) -> None:
        self.names: list[str] = []


_of_thread = _OfThread()


def _count(event: str, duration_secs: float, **details: Any) -> None:
    if event == _COMPILE_EVENT:
        count_compile(str(details.get("fun_name", "?")))


def count_compile(name: str) -> None:
    """Count a program that the calling thread has compiled or loaded."""
    global _total
    _total += 1
    _of_thread.names.append(name)


def compiled_by_this_thread() -> list[str]:
    """The names of the programs that the calling thread has compiled since the first `CompileCounter`, in order."""
    return list(_of_thread.names)


def compiles_of_this_thread() -> int:
    """How many programs the calling thread has compiled since the first `CompileCounter`.

    This distinguishes compilations of an engine driven by one thread from those of other engines in the process.
    """
    return len(_of_thread.names)


class CompileCounter:
    """Backend compilations of this process since construction, split at `mark_warm`.

    Programs loaded from a cache count, too.
    """

    def __init__(self) -> None:
        global _listening
        if not _listening:
            jax.monitoring.register_event_duration_secs_listener(_count)
            _listening = True
        self._start = _total
        self._warm: int | None = None

    def mark_warm(self) -> None:
        """Mark the end of warm-up; any later compilation is a defect."""
        self._warm = _total

    @property
    def before(self) -> int:
        """Compilations up to `mark_warm`."""
        return (_total if self._warm is None else self._warm) - self._start

    @property
    def after(self) -> int:
        """Compilations since `mark_warm`."""
        return 0 if self._warm is None else _total - self._warm


def use_compile_cache(directory: Path) -> None:
    """Keep compiled programs in `directory` if this user owns it, unless the process has set a cache already.

    JAX keys entries by program, jaxlib version, flags and device kind.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    directory = private_directory(directory)
    if is_full(directory):  # entries that are there are used; JAX would warn once for each that it cannot add
        _log.warning("compiled programs are not cached: the disk of %s is full; make room there", directory)
        warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry", UserWarning)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
