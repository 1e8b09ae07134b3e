"""The C++ operations of each instruction set that this machine has, and none."""

from __future__ import annotations

import jax
import pytest

from xla_engine.runner.native_library.build import NativeBuildError, register
from xla_engine.runner.native_library.instruction_sets import available

ISAS = [None, *(each.name for each in available())] if jax.default_backend() == "cpu" else [None]


def registered(isa: str | None) -> str | None:
    """The instruction set, its library registered; None is what JAX does."""
    try:
        return isa and register(isa)
    except NativeBuildError as error:
        pytest.skip(str(error))
