"""Running `xla-engine` inside the test's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xla_engine import cli

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments], input=stdin)


def commands_use(monkeypatch: pytest.MonkeyPatch, engine_for: Callable[[dict[str, Any]], Any]) -> None:
    """Commands get `engine_for(options)` in place of the engine that they would load."""

    @contextmanager
    def load(options: dict[str, Any], **_: Any) -> Iterator[Any]:
        yield engine_for(options)

    monkeypatch.setattr("xla_engine.cli._common.load_engine", load)


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def run_file(tmp_path: Path, data: bytes, *options: str) -> tuple[Result, list[dict[str, Any]]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(data)
    result = invoke("run", source, "-o", target, *options)
    return result, records_of(target) if target.exists() else []


def assert_not_started(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.stderr and result.stdout == ""
    assert result.exception is None or isinstance(result.exception, SystemExit)
