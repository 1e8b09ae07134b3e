from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.batch.test_run import FakeEngine
from xla_engine import cli
from xla_engine.engine.identity import EngineIdentity


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine in the place of the real one."""
    fake = FakeEngine()
    identity = EngineIdentity(model="fake", dtype="none", config={}, platform={})
    monkeypatch.setattr(EngineIdentity, "of", lambda engine: identity)

    @contextlib.contextmanager
    def load(options: dict[str, Any], *, show: bool) -> Iterator[FakeEngine]:
        fake.options = options  # type: ignore[attr-defined]
        yield fake

    monkeypatch.setattr(cli._common, "load_engine", load)
    return fake
