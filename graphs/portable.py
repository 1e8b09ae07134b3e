"""Which programs give the same bits on every processor: what XLA computes in them cannot be rounded in two ways.

The C++ kernels name every rounding. The rest of a program is compiled by XLA, whose exponentials, roots and sums
depend on the processor, the number of threads and its version, and LLVM fuses a product with the sum behind it if the
processor can. Data movement, comparisons, and single additions, subtractions and products are IEEE's everywhere.
A product that is exact in float32 may be fused: of two numbers with eight significant bits, or by a power of two.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.attention.native import TARGET, ZEROS
from xla_engine.graphs.joined import is_literal
from xla_engine.graphs.linear.native import GATED_LINEAR, HEAD, LINEAR
from xla_engine.graphs.sampling.native import LOGPROBS, SAMPLE

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

ARITHMETIC = "portable-1"  # a change of any bit needs another name
ISAS = ("avx512_bf16", "avx512", "avx2", "neon")  # best first; tiles and bfdot add in orders of their own
KERNELS = (  # whose bits are known
    *(SAMPLE, LOGPROBS),
    *(f"{call}_bf16" for call in (TARGET, ZEROS)),
    *(f"{product}_{kind}" for product in (LINEAR, GATED_LINEAR, HEAD) for kind in ("bf16", "int8")),
)

_BARRIER = "optimization_barrier"
_MOVES = frozenset(
    (
        *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice"),
        *("dynamic_update_slice", "expand_dims", "gather", "pad", "reshape", "rev", "scatter", "select_n"),
        *("slice", "split", "squeeze", "stack", "transpose"),
    )
)
_CALLS = frozenset(("closed_call", "jit", "pjit"))
_CONTROL = frozenset(("cond", "scan", "while"))
_COMPARES = frozenset(("eq", "ge", "gt", "is_finite", "le", "lt", "ne"))
_SUMS = frozenset(("add", "sub"))
# Kinds of values: one that a sum may be fused with, and one of at most eight significant bits.
_PRODUCT, _SHORT = "product", "short"
_SHORT_TYPES = ("bool", "int8", "uint8", "bfloat16")


@functools.cache
def barriers_hold() -> bool:
    """Whether XLA keeps a product and a sum apart by an `optimization_barrier`. That of jaxlib 0.10.2 does not."""
    a, b, c = np.random.default_rng(0).standard_normal((3, 64, 64), np.float32)
    apart = jax.jit(lambda a, b, c: lax.optimization_barrier(a * b) + c)(a, b, c)
    return np.array_equal(np.asarray(apart), a * b + c)


def refusals(program: Jaxpr) -> list[str]:
    """Why a program may have other bits on another processor, without duplicates; empty if it cannot."""
    found: dict[str, None] = {}
    _walk(program, [None] * len(program.invars), found)
    return list(found)


def _walk(jaxpr: Jaxpr, given: Sequence[str | None], found: dict[str, None]) -> list[str | None]:
    """Add refusals of a jaxpr to `found`. given, and the result: the kinds of inputs and outputs."""
    kinds = dict(zip(jaxpr.invars, given, strict=True))

    def kind_of(value: Any) -> str | None:
        return kinds.get(value) if not is_literal(value) else None

    for equation in jaxpr.eqns:
        name, taken = equation.primitive.name, [kind_of(each) for each in equation.invars]
        made = _PRODUCT if _PRODUCT in taken else None
        if name in _CALLS:
            (part,) = _parts(equation.params)
            kinds.update(zip(equation.outvars, _walk(part, taken, found), strict=True))
            continue
        if name in _CONTROL:  # what goes into them and comes out counts as a product
            for part in _parts(equation.params):
                _walk(part, [_PRODUCT] * len(part.invars), found)
            kinds.update(dict.fromkeys(equation.outvars, _PRODUCT))
            continue
        if not any(map(_is_float, (*equation.invars, *equation.outvars))):
            continue
        if name == _BARRIER:
            kept = [None if kind == _PRODUCT and barriers_hold() else kind for kind in taken]
            kinds.update(zip(equation.outvars, kept, strict=True))
            continue
        if name == "ffi_call":
            made = None
            if (why := _foreign(equation.params["target_name"])) is not None:
                found[why] = None
        elif name == "mul":
            made = None if made is None and _is_exact(equation, taken) else _PRODUCT
        elif name in _SUMS:
            if made:
                found[_fused()] = None
            made = None
        elif name == "convert_element_type" and _exact(equation):
            made = made or (_SHORT if _dtype(equation.invars[0]).name in _SHORT_TYPES else taken[0])
        elif name in _MOVES:
            floats = [kind for value, kind in zip(equation.invars, taken, strict=True) if _is_float(value)]
            if floats and floats.count(_SHORT) == len(floats) and name != "bitcast_convert_type":
                made = _SHORT
        elif name not in _COMPARES:
            found[f"{name!r} of floats outside of the C++ kernels"] = None
        if name in ("mul", *_SUMS) and _dtype(equation.outvars[0]) != jnp.float32:
            # XLA widens these, and rounds when it likes.
            found[f"{name!r} of {_dtype(equation.outvars[0])}"] = None
        kinds.update(dict.fromkeys(equation.outvars, made))
    return [kind_of(each) for each in jaxpr.outvars]


def _is_exact(equation: Any, taken: Sequence[str | None]) -> bool:
    """Whether a product needs no rounding: of two short numbers, or by a power of two."""
    if taken == [_SHORT, _SHORT]:
        return True
    scales = [each.val for each in equation.invars if is_literal(each)]
    return any(abs(math.frexp(float(each))[0]) == 0.5 for each in scales if np.ndim(each) == 0)


def _fused() -> str:
    why = "a product that a sum may be fused with"
    if barriers_hold():
        return f"{why} (an optimization_barrier keeps them apart)"
    return f"{why} (jax {jax.__version__} removes barriers; use a newer one)"


def _parts(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs inside an equation."""
    for value in parameters.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            inner: Any = getattr(each, "jaxpr", each)  # of a closed one
            if hasattr(inner, "eqns"):
                yield inner


@functools.cache
def _foreign(target: str) -> str | None:
    """Why a call of a kernel is refused; None if its bits are known."""
    if any(target == f"{kernel}_{isa}" for kernel in KERNELS for isa in ISAS):
        return None
    return f"the kernel {target}, whose bits are not known on every processor"


def _dtype(value: Any) -> Any:
    return getattr(value.aval, "dtype", jnp.int32)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(_dtype(value), jnp.floating)


def _exact(equation: Any) -> bool:
    """Whether a conversion is IEEE's: not that of floats to integers, for which values out of range differ."""
    return _is_float(equation.outvars[0]) or not _is_float(equation.invars[0])
