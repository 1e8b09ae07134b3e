"""Finds or builds the library of C++ kernels (`graphs/native/`) and registers it.

A library bundled with the package is used if it fits. Otherwise it is compiled at first use for one instruction set of
this CPU (seconds), and kept with the compiled programs. Without a compiler the engine falls back to pure JAX.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import shutil
from pathlib import Path

import jax

from xla_engine import graphs
from xla_engine.environment import compiler, native_cache_directory
from xla_engine.graphs.attention.native import TARGET, ZEROS
from xla_engine.graphs.delta_net.native import DELTA_OUTPUTS, DELTA_RULE
from xla_engine.graphs.experts.native import DOWN_EXPERTS, EXPERTS, GATED_EXPERTS
from xla_engine.graphs.linear.native import GATED_LINEAR, HEAD, LINEAR, ROWS
from xla_engine.graphs.lora.products import GATED_LORA, LINEAR_LORA, LORA
from xla_engine.graphs.sampling.native import LOGPROBS, SAMPLE
from xla_engine.runner.native_library import bundled, recipe
from xla_engine.runner.native_library import cache as library_cache
from xla_engine.runner.native_library.instruction_sets import InstructionSet, available, processor
from xla_engine.runner.native_library.recipe import NativeBuildError as NativeBuildError

_log = logging.getLogger("xla_engine")
_OPERATIONS = {
    TARGET: "XlaEngineAttend",
    ZEROS: "XlaEngineZeros",
    DELTA_RULE: "XlaEngineDeltaRule",
    DELTA_OUTPUTS: "XlaEngineDeltaOutputs",
    LINEAR: "XlaEngineLinear",
    HEAD: "XlaEngineHead",
    ROWS: "XlaEngineRows",
    GATED_LINEAR: "XlaEngineGatedLinear",
    LORA: "XlaEngineLora",
    LINEAR_LORA: "XlaEngineLinearLora",
    GATED_LORA: "XlaEngineGatedLora",
    EXPERTS: "XlaEngineExperts",
    GATED_EXPERTS: "XlaEngineGatedExperts",
    DOWN_EXPERTS: "XlaEngineDownExperts",
    SAMPLE: "XlaEngineSample",
    LOGPROBS: "XlaEngineLogprobs",
}
_SOURCES = Path(graphs.__file__).parent / "native"
_BUNDLE = Path(bundled.__file__).parent / bundled.FOLDER
_digests: dict[str, str] = {}  # digests of the libraries in use, by instruction set
BUNDLED, COMPILED = "came with the package", "was compiled on this machine"


def register(isa: str | None = None) -> str:
    """Register the kernels with XLA:CPU, once per process and instruction set; returns the instruction set's name.

    None takes the best one that works here. Raises NativeBuildError, also if this machine lacks `isa`.
    """
    failed = None
    for each in available():
        if isa in (None, each.name):
            try:
                if _register(each) is not None:
                    if failed is not None:
                        _log.warning("the C++ operations are for %s only: %s", each.name, failed)
                    return each.name
            except NativeBuildError as error:  # a lesser instruction set may still work
                failed = failed or error
    if failed is not None:
        raise failed
    here = ", ".join(each.name for each in available()) or "none"
    raise NativeBuildError(f"this machine does not support {isa or 'any instruction set'} (it has: {here})")


def library_digest(isa: str) -> str:
    """The digest of the library of a registered instruction set."""
    return _digests[isa]


def origin(isa: str) -> str:
    """Where the library of a registered instruction set came from: BUNDLED or COMPILED."""
    found = _register(next(each for each in available() if each.name == isa))
    assert found is not None, f"{isa} is not registered"
    return found


@functools.cache
def _register(isa: InstructionSet) -> str | None:
    """Where the library came from; None if the operating system does not permit the instruction set."""
    try:
        headers = Path(jax.ffi.include_dir())
        sources, ffi = recipe.source_digest(_SOURCES), recipe.ffi_version(headers)
        if (found := bundled.library(_BUNDLE, isa, sources, ffi)) is not None:
            return BUNDLED if _bind(isa, found) else None
    except (bundled.Unfit, OSError, AttributeError, RuntimeError) as error:
        _log.warning("the C++ library that came with the package is not used: %s", error)
    return COMPILED if _bind(isa, build(isa)) else None


def _bind(isa: InstructionSet, path: Path) -> bool:
    """Load a library and register its kernels; False if the operating system does not permit the instruction set.

    Raises OSError if it cannot be loaded, AttributeError if a kernel is missing, and RuntimeError if XLA refuses it.
    """
    library = ctypes.CDLL(str(path))
    library.XlaEngineReady.restype = ctypes.c_bool
    if not library.XlaEngineReady():
        return False
    for target, symbol in _OPERATIONS.items():
        capsule = jax.ffi.pycapsule(getattr(library, symbol))
        jax.ffi.register_ffi_target(f"{target}_{isa.name}", capsule, platform="cpu")
    _digests[isa.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return True


def build(isa: InstructionSet, *flags: str) -> Path:
    """The library for an instruction set, compiled if necessary with additional `flags`. Raises NativeBuildError."""
    program = shutil.which(compiler())
    if program is None:
        raise NativeBuildError(f"no C++ compiler {compiler()!r} (install one, for example g++, or set CXX)")
    options = (*isa.compiler_flags(), *flags)
    headers = Path(jax.ffi.include_dir())
    version = recipe.run([program, "--version"])
    jaxlib = importlib.metadata.version("jaxlib")  # its headers are compiled in
    text = recipe.source_text(_SOURCES)
    identity = "\0".join((version, *recipe.FLAGS, *options, text, jaxlib, processor()))
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    try:
        name = f"native-{isa.name}-{digest}.so"
        return library_cache.library(
            native_cache_directory(),
            name,
            lambda made: recipe.compile_library(
                program, options, _SOURCES, headers, made, threads=os.cpu_count() or 1
            ),
        )
    except OSError as error:
        raise NativeBuildError(f"the library cannot be kept: {error}") from error
