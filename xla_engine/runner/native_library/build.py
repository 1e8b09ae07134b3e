"""Finds or compiles the libraries of C++ kernels (`graphs/native/`) and registers them.

A library bundled with the package holds all kernels and is used if it fits. Otherwise each part that a model needs is
compiled at first use for one instruction set of this CPU (seconds), several at a time, and kept with the compiled
programs. Without a compiler the engine falls back to pure JAX.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

import jax

from xla_engine.graphs.attention import native as attention
from xla_engine.graphs.experts.routing import DOWN_EXPERTS, EXPERTS, GATED_EXPERTS
from xla_engine.graphs.joined import JOINED, number
from xla_engine.graphs.linear.by_head import BY_HEAD
from xla_engine.graphs.linear.native import (
    GATED_LINEAR,
    GATED_LORA,
    HEAD,
    LINEAR,
    LINEAR_LORA,
    LORA,
    ROWS,
)
from xla_engine.graphs.ops.coded import BLOCK, KINDS, CodedForm, Order
from xla_engine.graphs.ops.encoder_rows import ACTIVATED, ADDED_NORM
from xla_engine.graphs.recurrent.native import DELTA_NET, DELTA_NET_OUTPUTS, MAMBA, MAMBA_OUTPUTS
from xla_engine.graphs.sampling.native import LOGPROBS, PROCESS, SAMPLE
from xla_engine.model_loader.tensor_files import Array
from xla_engine.model_loader.weights import Pack
from xla_engine.runner.native_library import bundled, recipe, widening
from xla_engine.runner.native_library.compiled import BUNDLE, SOURCES, build, identity
from xla_engine.runner.native_library.instruction_sets import InstructionSet, available
from xla_engine.runner.native_library.recipe import NativeBuildError

_log = logging.getLogger("xla_engine")
_KINDS = ("bf16", "int8", "coded", "fours")  # of weights
_EXPERTS = (EXPERTS, GATED_EXPERTS, DOWN_EXPERTS)  # those in codes are unpacked to bf16

_PACKS: dict[Order, str] = {"pairs": "pack_coded", "fours": "pack_fours"}  # parts with a plain C function

# What each source file defines: a part, which is compiled to a library of its own where a model needs it.
_TARGETS: dict[str, tuple[str, ...]] = {
    **{
        f"attention_{kind}": tuple(
            f"{each}_{kind}" for each in (attention.TARGET, attention.REACHING, attention.ZEROS)
        )
        for kind in attention.KINDS
    },
    "sampler": (SAMPLE, PROCESS, LOGPROBS, JOINED),
    "recurrent": (DELTA_NET, DELTA_NET_OUTPUTS, MAMBA, MAMBA_OUTPUTS),
    "encoder": (ADDED_NORM, ACTIVATED),
    **{f"experts_{kind}": tuple(f"{each}_{kind}" for each in _EXPERTS) for kind in ("bf16", "int8", "fours")},
    **{
        f"linear_{kind}": tuple(f"{each}_{kind}" for each in (LINEAR, GATED_LINEAR, HEAD, *more))
        for kind, more in zip(_KINDS, ((BY_HEAD,), (), (ROWS,), (ROWS,)), strict=True)
    },
    **{
        f"lora_{kind}": tuple(f"{each}_{kind}" for each in (LORA, LINEAR_LORA, GATED_LORA)) for kind in _KINDS
    },
    **dict.fromkeys(_PACKS.values(), ()),
}
PARTS = frozenset(_TARGETS)
ATTENTION = frozenset(f"attention_{kind}" for kind in attention.KINDS)  # the parts for stores of every dtype
_origins: dict[str, str] = {}  # BUNDLED or COMPILED, by instruction set
_digests: dict[str, str] = {}  # of what the kernels in use were made from, by instruction set
_handlers: dict[str, int] = {}  # addresses of the kernels in use, by target
_packers: dict[tuple[str, Order], Pack] = {}  # by instruction set
_joining: list[Callable[[int, int], None]] = []  # tell joined calls a target's number and address
_bound: set[tuple[str, str]] = set()  # parts that are registered, with their instruction set
BUNDLED, COMPILED = "came with the package", "was compiled on this machine"
LATER = "is compiled on this machine"
_BUILDS: ContextVar[bool] = ContextVar("builds", default=True)  # whether `register` compiles what is missing


@contextlib.contextmanager
def building_nothing() -> Iterator[None]:
    """In the block, `register` compiles nothing: with a compiler, kernels that are not there count as if they were.

    For descriptions of an engine that will not run.
    """
    before = _BUILDS.set(False)
    try:
        yield
    finally:
        _BUILDS.reset(before)


def register(isa: str | None = None, parts: Collection[str] = PARTS) -> str:
    """Register parts of the kernels with XLA:CPU, once per process and instruction set; returns the latter's name.

    isa: None takes the best one that works here. Raises NativeBuildError, also if this machine lacks `isa`.
    """
    failed = None
    for each in available():
        if isa in (None, each.name):
            try:
                if _register(each, frozenset(parts)) if _BUILDS.get() else _could_register(each):
                    if failed is not None:
                        _log.warning("the C++ kernels are compiled for %s only: %s", each.name, failed)
                    return each.name
            except NativeBuildError as error:  # a lesser instruction set may still work
                failed = failed or error
    if failed is not None:
        raise failed
    here = ", ".join(each.name for each in available()) or "none"
    raise NativeBuildError(f"this machine does not support {isa or 'any instruction set'} (it has: {here})")


def library_digest(isa: str) -> str:
    """A digest of what the kernels of a registered instruction set were made from."""
    return _digests[isa]


def origin(isa: str) -> str:
    """Where the kernels of a registered instruction set came from: BUNDLED or COMPILED; LATER if they were not
    compiled (`building_nothing`)."""
    return _origins.get(isa, LATER)


def packer(isa: str, order: Order) -> Pack:
    """What packs weights in this order of codes; of a registered instruction set with the part for it."""
    return _packers[isa, order]


def _could_register(isa: InstructionSet) -> bool:
    """Whether `_register` would succeed, as far as that shows without compiling. Raises NativeBuildError."""
    if not _register(isa, frozenset()):
        return False
    if isa.name not in _origins:
        identity(isa)  # asks the compiler for its version
    return True


@functools.cache
def _register(isa: InstructionSet, parts: frozenset[str]) -> bool:
    """Whether the operating system permits the instruction set; if so, these parts are registered."""
    if not isa.is_permitted():
        return False
    if isa.name not in _origins:
        try:
            headers = Path(jax.ffi.include_dir())
            sources, ffi = recipe.source_digest(SOURCES), recipe.ffi_version(headers)
            if (found := bundled.library(BUNDLE, isa, sources, ffi)) is not None:
                libraries = dict.fromkeys(PARTS, _bind(isa, PARTS, found))
                _bound.update((isa.name, part) for part in PARTS)
                _origins[isa.name] = BUNDLED
                _digests[isa.name] = hashlib.sha256(found.read_bytes()).hexdigest()
                _choose(isa, libraries)
        except (bundled.Unfit, OSError, AttributeError, RuntimeError) as error:
            _log.warning("the C++ library in the package is not used: %s", error)
    missing = sorted(part for part in parts if (isa.name, part) not in _bound)
    if missing:
        libraries = {}
        for part, path in build(isa, missing).items():
            try:
                libraries[part] = _bind(isa, (part,), path)
            except OSError as error:
                raise NativeBuildError(f"the compiled library cannot be loaded: {error}") from error
            _bound.add((isa.name, part))
        _origins[isa.name], _digests[isa.name] = COMPILED, identity(isa)
        _choose(isa, libraries)
    return True


def _choose(isa: InstructionSet, libraries: Mapping[str, ctypes.CDLL]) -> None:
    if isa.name == widening.ISA:
        widening.choose(libraries, _digests[isa.name])


def _bind(isa: InstructionSet, parts: Collection[str], path: Path) -> ctypes.CDLL:
    """Load a library and register these parts of it.

    Raises OSError if it cannot be loaded, AttributeError if a kernel is missing, and RuntimeError if XLA refuses it.
    """
    library = ctypes.CDLL(str(path))
    for part in parts:
        for target in _TARGETS[part]:
            function = getattr(library, _symbol(target))
            jax.ffi.register_ffi_target(f"{target}_{isa.name}", jax.ffi.pycapsule(function), platform="cpu")
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None
            _handlers[f"{target}_{isa.name}"] = address
    for order, part in _PACKS.items():
        if part in parts:
            _packers[isa.name, order] = _packer_of(library, part)
    if "sampler" in parts:
        library.XlaEngineKnow.argtypes = ctypes.c_int64, ctypes.c_void_p
        _joining.append(library.XlaEngineKnow)
    for know in _joining:
        for target, address in _handlers.items():
            know(number(target), address)
    return library


def _packer_of(library: ctypes.CDLL, part: str) -> Pack:
    function = getattr(library, f"XlaEngine{_symbol(part)}")
    function.argtypes = ctypes.c_int32, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2
    function.restype = ctypes.c_int64

    def pack(kind: str, form: CodedForm, rows: Array, blocks: Array) -> bool:
        count = len(blocks) // form.block_bytes(kind)
        assert rows.flags.c_contiguous and blocks.flags.c_contiguous and len(rows) == count * BLOCK
        first_bad: int = function(
            KINDS[kind].number, form.width, count, rows.shape[1], rows.ctypes.data, blocks.ctypes.data
        )
        assert first_bad >= -1, f"{kind}: rows of {rows.shape[1]} bytes"
        return first_bad < 0

    return pack


def _symbol(words: str) -> str:
    """The name of a function, as in the source."""
    return "".join(word.capitalize() for word in words.split("_"))
