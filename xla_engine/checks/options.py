"""Checks of the values of options."""

from __future__ import annotations

from xla_engine.errors import ConfigError
from xla_engine.utils.shown import shown


def at_least(name: str, value: object, low: int) -> None:
    """Raise ConfigError unless an option is an integer of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
        raise ConfigError(f"{name} must be an integer of at least {low}, not {shown(value)}")


def check_ascending(name: str, sizes: object) -> None:
    """Raise ConfigError unless an option is ascending positive integers."""
    if not isinstance(sizes, tuple | list) or not sizes:
        raise ConfigError(f"{name} must be ascending positive sizes, not {shown(sizes)}")
    for low, size in zip((0, *sizes), sizes, strict=False):
        at_least(f"each next size of {name}", size, low + 1)


def is_number(value: object) -> bool:
    """Whether a value is a number, true and false left out."""
    return isinstance(value, int | float) and not isinstance(value, bool)
