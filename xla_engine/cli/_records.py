"""Shared by `replay` and `shrink`: load a record, and an engine like the one that made it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from xla_engine.cli import _common

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.equivalence.record import Record


def load_record(
    stack: contextlib.ExitStack, path: str, model: str | None, *, force: bool
) -> tuple[Record, XlaBatchEngine]:
    """Load a record, and an engine with its options and its model, or `model`."""
    from dataclasses import asdict

    from xla_engine.equivalence.record_file import read_record
    from xla_engine.equivalence.replay import engine_config

    record = read_record(path)
    config = asdict(engine_config(record, force=force))
    options = {"model": record.model_path if model is None else model, **config}
    return record, stack.enter_context(_common.load_one_engine(options, show=True))
