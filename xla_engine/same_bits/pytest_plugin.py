"""The fixture `same_bits`, in every pytest of an environment with this package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xla_engine.same_bits.report import Report


@pytest.fixture
def same_bits() -> Callable[..., Report]:
    """`same_bits(target, requests=30, ...)`: the report of `xla_engine.same_bits.check` on a function or a server.

    `same_bits(my_generate).raise_if_different()` fails the test with the report if answers depend on the batch.
    """
    from xla_engine.same_bits.checks import check

    return check
