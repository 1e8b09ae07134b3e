"""A user's own scheduling policy, named by its import path "package.module:Name".

It decides only the order of the queue. No token depends on it, and no request starves, because the one that waits
longest goes next after `priority_aging` others have passed it.
"""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from xla_engine.scheduler.policy import POLICIES, Facts, Place


class SchedulingPolicy(Protocol):
    """The interface of a policy. `Name` is a class without constructor arguments, or a function like `place`."""

    def place(self, facts: Facts) -> float:
        """A request's place in the queue; the lowest goes first, and of equal ones the earlier request.

        It should be a pure function of the facts and take microseconds: it is called when the request arrives and
        again when it is preempted. If it raises or returns no number, this request is refused; others are not
        affected.
        """
        ...


class PolicyError(ValueError):
    """A user's policy failed for one request, which was refused."""


class UserPolicy:
    """Loads a user's policy and turns its errors into PolicyError. Raises ValueError if there is none at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        module, _, name = path.partition(":")
        try:
            named: Any = importlib.import_module(module)
            for part in name.split("."):
                named = getattr(named, part)
            policy = named() if isinstance(named, type) else named
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"scheduling_policy {path!r} cannot be loaded: {type(error).__name__}: {error}; write "
                "package.module:Name of something Python can import from here"
            ) from error
        self._place = getattr(policy, "place", policy)
        if not callable(self._place):
            raise ValueError(
                f"scheduling_policy {path!r} is neither a function nor a class with a method `place`; see "
                "scheduler.user_policy.SchedulingPolicy"
            )

    def __call__(self, facts: Facts) -> Place:
        """A request's place. Raises PolicyError."""
        try:
            value = self._place(facts)
        except (Exception, SystemExit) as error:
            raise PolicyError(
                f"scheduling_policy {self._path!r} failed for this request, which was not accepted: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise PolicyError(
                f"scheduling_policy {self._path!r} returned a {type(value).__name__} for this request, which was "
                f"not accepted; a policy must return a number"
            )
        return value, facts.turn


def find_policy(name: str) -> Callable[[Facts], Place]:
    """One of `POLICIES`, or the policy at an import path. Raises ValueError if there is none."""
    if not isinstance(name, str):
        raise ValueError(f"scheduling_policy must be a name, not a {type(name).__name__}")
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise ValueError(
            f"scheduling_policy is {name!r:.99}; choose one of {', '.join(POLICIES)}, or package.module:Name"
        )
    return UserPolicy(name)
