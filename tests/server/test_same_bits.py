"""Our server passes `verify --url`, the check for any server."""

from __future__ import annotations

import pytest

from tests.server.conftest import Running
from xla_engine.same_bits import HttpTarget, check


@pytest.mark.full
def test_this_server_gives_the_same_answers_whatever_the_load(server: Running) -> None:
    report = check(HttpTarget(server.url))
    assert report.exit_status == 0, report.text()
    assert {row.name: row.verdict for row in report.rows} == {row.name: "same" for row in report.rows}
    overlaps = [row.overlap[1] for row in report.rows if row.overlap is not None]
    assert len(overlaps) == 2 and min(overlaps) >= 4
