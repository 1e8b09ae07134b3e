"""Which programs give the same bits on every processor: what XLA computes in them cannot be rounded in two ways.

The C++ kernels name every rounding. The rest of a program is compiled by XLA, whose exponentials, roots and sums
depend on the processor, the number of threads and its version, and LLVM fuses a product with the sum behind it if the
processor can. Data movement, comparisons, and single additions, subtractions and products are IEEE's everywhere.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from xla_engine.graphs.attention.native import TARGET, ZEROS
from xla_engine.graphs.linear.native import GATED_LINEAR, HEAD, LINEAR
from xla_engine.graphs.sampling.native import LOGPROBS, SAMPLE

ARITHMETIC = "portable-1"  # a change of any bit needs another name
ISAS = ("avx512_bf16", "avx512", "avx2", "neon")  # best first; tiles and bfdot add in orders of their own
KERNELS = (  # whose bits are known
    *(TARGET, ZEROS, SAMPLE, LOGPROBS),
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


def refusals(program: Jaxpr) -> list[str]:
    """Why a program may have other bits on another processor, without duplicates; empty if it cannot."""
    found: dict[str, None] = {}
    _walk(program, [False] * len(program.invars), found)
    return list(found)


def _walk(jaxpr: Jaxpr, given: Sequence[bool], found: dict[str, None]) -> list[bool]:
    """Add refusals of a jaxpr to `found`. given, and the result: which inputs and outputs are products that a sum
    might be fused with."""
    products = {variable for variable, is_product in zip(jaxpr.invars, given, strict=True) if is_product}

    def is_product(value: Any) -> bool:
        return not isinstance(value, Literal) and value in products

    for equation in jaxpr.eqns:
        name, taken = equation.primitive.name, [is_product(each) for each in equation.invars]
        made = any(taken)
        if name in _CALLS:
            (part,) = _parts(equation.params)
            flags = _walk(part, taken, found)
            products.update(each for each, flag in zip(equation.outvars, flags, strict=True) if flag)
            continue
        if name in _CONTROL:  # what goes into them and comes out counts as a product
            for part in _parts(equation.params):
                _walk(part, [True] * len(part.invars), found)
            products.update(equation.outvars)
            continue
        if not any(map(_is_float, (*equation.invars, *equation.outvars))):
            continue
        if name == "ffi_call":
            made = False
            if (why := _foreign(equation.params["target_name"])) is not None:
                found[why] = None
        elif name == "mul":
            made = True
        elif name == _BARRIER:
            made = False
        elif name in _SUMS:
            if made:
                found["a product that a sum may be fused with (an optimization_barrier keeps them apart)"] = (
                    None
                )
            made = False
        elif name not in _MOVES | _COMPARES and not (name == "convert_element_type" and _exact(equation)):
            found[f"{name!r} of floats outside of the C++ kernels"] = None
        if name in ("mul", *_SUMS) and _dtype(equation.outvars[0]) != jnp.float32:
            found[f"{name!r} of {_dtype(equation.outvars[0])}"] = (
                None  # XLA widens these, and rounds when it likes
            )
        if made:
            products.update(equation.outvars)
    return [is_product(each) for each in jaxpr.outvars]


def _parts(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    """The jaxprs inside an equation."""
    for value in parameters.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(each, "jaxpr", each)  # of a closed one
            if isinstance(inner, Jaxpr):
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
