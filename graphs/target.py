"""The devices that programs are made for: this process', or those of a topology for which programs are compiled ahead
of time.

What is traced depends on them, so the choice is part of JAX's key of what it has traced (`jax.make_user_context`).
"""

from collections.abc import Sequence
from typing import Any

import jax

_devices: Any = jax.make_user_context(default_value=None)


def devices() -> Sequence[Any]:
    """The jax devices that programs are made for."""
    ahead = _devices.value
    return jax.devices() if ahead is None else ahead


def is_ahead() -> bool:
    """Whether they are a topology's, which can run nothing."""
    return _devices.value is not None


def on_this_host(count: int) -> int:
    """How many of `count` devices this host has, if it shares them evenly with others."""
    return count if is_ahead() else max(count // jax.process_count(), 1)


def platform() -> str:
    """Their platform: "cpu", "gpu" or "tpu"."""
    return jax.default_backend() if _devices.value is None else str(_devices.value[0].platform)


def made_for(devices: Sequence[Any]) -> Any:
    """A context, for a `with` block, in which this thread makes programs for these devices of a topology."""
    return _devices(tuple(devices))
