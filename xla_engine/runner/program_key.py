"""A key for everything that a compiled program depends on, made without tracing the program.

The key has a digest of the package's code, the versions of its libraries, JAX's and XLA's options, the processor, and
a full description of the function that would be traced: a step with all that it closes over. A value of a kind that
is not known here, or code that was replaced in this process, gives no key, and the program is then compiled as usual.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib.metadata
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import jax
import numpy as np

from xla_engine.environment import xla_flags
from xla_engine.graphs.inventory import Program
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.runner.code_digest import package_digest
from xla_engine.runner.native_library.instruction_sets import processor
from xla_engine.utils.cores import cores

# Options of JAX that say where programs are kept, what is logged, and which transfers may be implicit.
_IRRELEVANT = ("cache", "log", "transfer_guard", "explain", "no_tracing")
_TRACED = ("xla_engine.graphs", "xla_engine.runner.programs", "xla_engine.runner.drafting")
_KNOWN_ROOTS = {"xla_engine", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"} | sys.stdlib_module_names - {
    "unittest"
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)


class NoKeyError(Exception):
    """The program's key cannot be told; the message says why."""


def platform_key() -> str:
    """A digest of all that a compiled program depends on besides code and function: versions, options, the machine."""
    options = {
        name: repr(getattr(jax.config, name, None))
        for name in jax.config.values
        if not any(word in name for word in _IRRELEVANT)
    }
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")]
    parts = (
        *versions,
        sys.version,
        *(f"{name}={options[name]}" for name in sorted(options)),
        *(f"{each.id} {each.device_kind}" for each in jax.devices()),
        xla_flags(),
        processor(),
        str(cores()),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def code_key() -> str:
    """A digest of the code that is traced. Raises NoKeyError if some of it was replaced in this process."""
    return hashlib.sha256("\0".join((package_digest(), *_module_state())).encode()).hexdigest()


def program_key(program: Program, *keys: str) -> str:
    """The key of a program. keys: `code_key` and `platform_key`. Raises NoKeyError."""
    digest = hashlib.sha256("\0".join(keys).encode())
    _Description(digest).add((program.name, program.function, program.arguments, program.donate))
    return digest.hexdigest()


def spec_key(spec: ModelSpec, code: str) -> str:
    """The key of a model's leaves. code: `code_key`. Raises NoKeyError."""
    versions = (importlib.metadata.version(name) for name in ("flax", "numpy"))
    parts = (code, sys.version, *versions, _spec_digest(spec))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _module_state() -> Iterable[str]:
    """The constants of modules whose code is traced. Raises NoKeyError for functions from outside of the package."""
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(_TRACED):
            continue
        for key, value in vars(module).items():
            if isinstance(value, _PLAIN) and not key.startswith("__"):
                yield f"{name}.{key}={value!r}"
            _check_origin(f"{name}.{key}", value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, method in vars(value).items():
                    _check_origin(f"{name}.{key}.{attribute}", method)


def _check_origin(name: str, value: Any) -> None:
    root = str(getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]
    if callable(value) and root not in _KNOWN_ROOTS:
        raise NoKeyError(f"{name} was replaced by code of {root}")


class _Description:
    """Feeds a digest with values, so that different values give different bytes."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest
        self._seen: dict[int, tuple[int, Any]] = {}  # the value is held, so that its id stays its own

    def add(self, value: Any) -> None:
        """Raises NoKeyError for a value of an unknown kind."""
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            self._word(type(value).__name__, repr(value))
            return
        if (seen := self._seen.get(id(value))) is not None:
            self._word("seen", str(seen[0]))
            return
        self._seen[id(value)] = (len(self._seen), value)
        self._compound(value)

    def _compound(self, value: Any) -> None:
        match value:
            case type():
                self._word("type", _name(value))
            case enum.Enum():
                self._word("enum", _name(type(value)), value.name)
            case np.dtype():
                self._word("dtype", str(value))
            case np.ndarray() | np.generic():
                if value.dtype.hasobject:
                    raise NoKeyError(f"an array of {value.dtype}")
                self._word("array", str(value.dtype), str(value.shape), np.asarray(value).tobytes().hex())
            case jax.ShapeDtypeStruct():
                self._parts("abstract", value.shape, value.dtype, value.sharding, value.weak_type)
            case functools.partial():
                self._parts("partial", value.func, value.args, value.keywords)
            case types.MethodType():
                self._parts("method", value.__func__, value.__self__)
            case types.FunctionType():
                self._function(value)
            case ModelSpec():
                self._word("spec", _spec_digest(value))
            case tuple() | list():
                self._parts(_name(type(value)), len(value), *value)
            case set() | frozenset():
                self._parts("set", *sorted(value))
            case Mapping():
                self._parts(_name(type(value)), *(part for item in value.items() for part in item))
            case _ if is_dataclass(value) and _is_ours(type(value)):
                self._parts(_name(type(value)), *(getattr(value, each.name) for each in fields(value)))
            case _ if type(value).__module__.startswith("xla_engine.") and hasattr(value, "__dict__"):
                self._parts(_name(type(value)), vars(value))
            case _:
                raise NoKeyError(f"a value of {_name(type(value))}")

    def _function(self, function: types.FunctionType) -> None:
        if not _is_ours(function):
            raise NoKeyError(f"a function of {function.__module__}")
        code = function.__code__
        self._word("function", _name(function), str(code.co_firstlineno), code.co_code.hex())
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        self._parts("closure", function.__defaults__, function.__kwdefaults__, *cells)

    def _parts(self, kind: str, *parts: Any) -> None:
        self._word(kind, str(len(parts)))
        for part in parts:
            self.add(part)

    def _word(self, *words: str) -> None:
        for word in words:
            self._digest.update(f"{len(word)}:{word}".encode())


@functools.lru_cache(4)
def _spec_digest(spec: ModelSpec) -> str:
    """Made once: all programs of a runner share their spec. Raises NoKeyError."""
    digest = hashlib.sha256()
    _Description(digest).add(spec.made_of)
    return digest.hexdigest()


def _is_ours(value: Any) -> bool:
    """Whether the code digest, or a library's version, covers the definition."""
    return str(value.__module__).partition(".")[0] in ("xla_engine", "jax")


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
