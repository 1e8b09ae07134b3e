"""JAX's settings of the whole process, which other libraries and environment variables change: engines use their own.

Programs are traced, and steps are run, under the defaults, in the thread that does so. Other code keeps its settings.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import jax

from xla_engine.environment import named_platforms
from xla_engine.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

# jax's functions that set a value for a thread, and the defaults.
_DEFAULTS: dict[str, tuple[str, Any]] = {
    "jax_enable_x64": ("enable_x64", False),
    "jax_default_matmul_precision": ("default_matmul_precision", None),
    "jax_numpy_dtype_promotion": ("numpy_dtype_promotion", "standard"),
    "jax_numpy_rank_promotion": ("numpy_rank_promotion", "allow"),
    "jax_default_device": ("default_device", None),
    "jax_default_prng_impl": ("default_prng_impl", "threefry2x32"),
    "jax_threefry_partitionable": ("threefry_partitionable", True),
    "jax_enable_checks": ("enable_checks", False),
    "jax_debug_key_reuse": ("debug_key_reuse", False),
    "jax_no_tracing": ("no_tracing", False),
}
# those that a step asks for, too: stale rows may hold NaN, and a step reads arrays of the host
_OF_STEPS: dict[str, tuple[str, Any]] = {
    "jax_debug_nans": ("debug_nans", False),
    "jax_debug_infs": ("debug_infs", False),
    "jax_disable_jit": ("disable_jit", False),
    "jax_transfer_guard": ("transfer_guard", "allow"),
    "jax_transfer_guard_host_to_device": ("transfer_guard_host_to_device", "allow"),
    "jax_transfer_guard_device_to_host": ("transfer_guard_device_to_host", "allow"),
    "jax_transfer_guard_device_to_device": ("transfer_guard_device_to_device", "allow"),
}


@contextlib.contextmanager
def own_settings() -> Iterator[None]:
    """Run a block, in this thread, under the settings that an engine needs."""
    with contextlib.ExitStack() as stack:
        for name, (setter, default) in (_DEFAULTS | _OF_STEPS).items():
            _enter(stack, name, setter, default)
        yield


def with_own_settings(method: F) -> F:
    """Decorate a function that traces or starts programs."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with own_settings():
            return method(*args, **kwargs)

    return cast("F", call)


def in_steps(method: F) -> F:
    """Decorate a function that runs compiled programs only; it looks at few settings, in about a microsecond."""
    asked = jax.config

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            asked.jax_debug_nans
            or asked.jax_debug_infs
            or asked.jax_disable_jit
            or asked.jax_transfer_guard_host_to_device
            or asked.jax_transfer_guard_device_to_host
        ):
            with own_settings():
                return method(*args, **kwargs)
        return method(*args, **kwargs)

    return cast("F", call)


def _enter(stack: contextlib.ExitStack, name: str, setter: str, default: Any) -> None:
    if getattr(jax.config, name, None) in (None, default):
        return
    if (scope := getattr(jax, setter, None)) is not None:  # not every version of jax has all
        stack.enter_context(scope(default))


def check_platform() -> None:
    """Raise ConfigError if JAX finds no device of the platforms that its settings name."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        where, asked = asked_platforms()
        reason = str(error).partition("\n")[0] or "jax has no plugin for it"
        raise ConfigError(
            f"{where}={asked}: there is no such device here ({reason}). This machine has: cpu. Unset {where}, "
            "or set it to cpu"
        ) from error


def asked_platforms() -> tuple[str, str | None]:
    """The setting that names JAX's platforms, and its value."""
    asked = jax.config.jax_platforms
    return "JAX_PLATFORMS" if named_platforms() == asked else "jax_platforms", asked
