"""A record of what the tiny engine really did."""

from __future__ import annotations

import pytest

from tests.support.record_edits import recorded
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.record import Record


@pytest.fixture(scope="module")
def honest(shared_tiny: XlaBatchEngine) -> Record:
    """40 requests and their neighbours, lag 1."""
    return recorded(shared_tiny, lag=1)
