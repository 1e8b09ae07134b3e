"""Fixtures of the tests of the command line."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.command_line import commands_use
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine in the place of the real one."""
    fake = FakeEngine()

    def engine_for(options: dict[str, Any]) -> FakeEngine:
        fake.options = options  # type: ignore[attr-defined]
        fake.collector.take()  # an engine that was just loaded has no unread outputs
        return fake

    commands_use(monkeypatch, engine_for)
    return fake
