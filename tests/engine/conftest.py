"""Cases of the tiny engine, with what each returns alone."""

from __future__ import annotations

import pytest

from tests.support.engine_faults import bits
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import Case, draw_cases
from xla_engine.equivalence.schedule import run_alone


@pytest.fixture(scope="module")
def cases(shared_tiny: XlaBatchEngine) -> list[Case]:
    return draw_cases(shared_tiny, 24, seed=31)


@pytest.fixture(scope="module")
def alone(shared_tiny: XlaBatchEngine, cases: list[Case]) -> dict[str, bytes]:
    return {case.request_id: bits(run_alone(shared_tiny, case)) for case in cases}
