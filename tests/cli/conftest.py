"""Fixtures of the tests of the command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from xla_engine import cli
from xla_engine.utils.startup import StartTimes


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine in the place of the real one."""
    fake = FakeEngine()

    @contextlib.contextmanager
    def load(options: dict[str, Any], *, show: bool, times: StartTimes | None = None) -> Iterator[FakeEngine]:
        fake.options = options  # type: ignore[attr-defined]
        fake.collector.take()  # an engine that was just loaded has no unread outputs
        yield fake

    monkeypatch.setattr(cli._common, "load_engine", load)
    return fake
