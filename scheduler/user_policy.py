"""A scheduling policy of the caller's own, named by its import path "package.module:Name".

It decides who is next in line, and nothing else: no token depends on it, and no request waits for ever, since the one
that waits longest is next after `priority_aging` others have gone before it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

from xla_engine.scheduler.policy import POLICIES, Facts, Place


class SchedulingPolicy(Protocol):
    """What `Name` is: a class of such objects, made without arguments, or a function like this method."""

    def place(self, facts: Facts) -> float:
        """A request's place in line; the lowest goes first, and of equal ones the earlier request.

        A pure function of the facts, asked when the request comes and again if it loses its slot; so nothing but the
        facts should count, and it should take microseconds. A request for which it raises or returns no number is
        refused, and no other is concerned.
        """
        ...


class PolicyError(ValueError):
    """A caller's policy failed for one request, which was not taken."""


class UserPolicy:
    """A policy with its errors by name. Raises ValueError where there is none at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        module, _, name = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            policy = found() if isinstance(found, type) else found
        except (Exception, SystemExit) as error:
            raise ValueError(
                f"scheduling_policy {path!r} cannot be loaded: {type(error).__name__}: {error}; write "
                "package.module:Name of something Python can import from here"
            ) from error
        self._place = getattr(policy, "place", policy)
        if not callable(self._place):
            raise ValueError(
                f"scheduling_policy {path!r} has no method `place` and is no function; see "
                "scheduler.user_policy.SchedulingPolicy"
            )

    def __call__(self, facts: Facts) -> Place:
        """A request's place. Raises PolicyError."""
        try:
            value = self._place(facts)
        except (Exception, SystemExit) as error:
            raise PolicyError(
                f"scheduling_policy {self._path!r} failed for this request, which was not taken: "
                f"{type(error).__name__}: {error}"
            ) from error
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise PolicyError(
                f"scheduling_policy {self._path!r} returned a {type(value).__name__} that is no number for this "
                "request, which was not taken; a place is a number"
            )
        return value, facts.turn


def find_policy(name: str) -> Callable[[Facts], Place]:
    """One of `POLICIES`, or the policy at an import path. Raises ValueError."""
    if not isinstance(name, str):
        raise ValueError(f"scheduling_policy must be a name, not a {type(name).__name__}")
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        raise ValueError(
            f"scheduling_policy is {name!r:.99}; choose one of {', '.join(POLICIES)}, or package.module:Name"
        )
    return UserPolicy(name)
