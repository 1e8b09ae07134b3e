"""Count the calls of a piece of Python, which unlike its time does not depend on how busy the machine is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class TooManyCallsError(Exception):
    """A piece of work made more calls than its budget."""


def calls_of(work: Callable[[], Any], budget: int) -> int:
    """How many functions, of Python and of C, the work calls in this thread.

    Raises TooManyCallsError beyond the budget, so that work without end ends.
    """
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        if event.endswith("call"):
            count += 1
            if count > budget:
                raise TooManyCallsError(f"more than {budget} calls")

    before = sys.getprofile()
    assert before is None, "another profiler runs"
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
