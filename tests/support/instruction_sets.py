"""The C++ operations of each instruction set here: the best by default, the least and JAX in `full`."""

from __future__ import annotations

import jax
import pytest

from xla_engine.environment import requested_isa
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.runner.native_library.recipe import NativeBuildError

NAMES = [each.name for each in available()]


def marks(name: str) -> list[pytest.MarkDecorator]:
    """The least instruction set is `full`. Those between are `release`: they share vectors with one neighbour and sums
    with the other. Of them, `full` has the kernels by themselves, and `.ci/run` the laws by `XLA_ENGINE_ISA`."""
    if name == NAMES[0]:
        return []
    return [pytest.mark.full] if name == NAMES[-1] else [pytest.mark.full, pytest.mark.release]


_ON_CPU = jax.default_backend() == "cpu"  # elsewhere XLA cannot call them
HERE = [pytest.param(name, marks=marks(name), id=name) for name in NAMES] if _ON_CPU else []
_JAX = pytest.param(None, marks=pytest.mark.full, id="None")
ISAS = [*HERE, _JAX] if HERE else [None]
NATIVE_ISAS = HERE
# Whether engines here use C++ kernels. Nothing is compiled to find out, because all workers of a run import this.
HAS_KERNELS = bool(NATIVE_ISAS) and requested_isa() != "none"


def registered(isa: str | None, *parts: str) -> str | None:
    """The instruction set, with these parts of its kernels registered; None is what JAX does."""
    try:
        return isa and register(isa, parts)
    except NativeBuildError as error:
        pytest.skip(str(error))
