"""Tests of what happens at a moment, which a machine that stands still at that moment spoils."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import ParamSpec

TIMES = 5
Given = ParamSpec("Given")


def again(test: Callable[Given, None]) -> Callable[Given, None]:
    """Repeat a test that fails, up to five times in all: a fault of the program fails each of them."""

    @functools.wraps(test)
    def repeated(*args: Given.args, **kwargs: Given.kwargs) -> None:
        for _ in range(TIMES - 1):
            try:
                return test(*args, **kwargs)
            except Exception:
                time.sleep(2)
        test(*args, **kwargs)

    return repeated
