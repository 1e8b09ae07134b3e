"""Which runs of the tests start processes of their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import parallel
from tests.support.parallel import pytest_cmdline_main, workers

HERE = Path(__file__).parent


def config(*args: str, plugin: bool = True, **options: object) -> SimpleNamespace:
    """What pytest knows of a command line: paths from this folder, and xdist's and its own options."""
    defaults = {"numprocesses": None, "dist": "no", "tx": []} if plugin else {}
    defaults |= {"usepdb": False, "trace": False, "capture": "fd", "collectonly": False}
    return SimpleNamespace(
        args=list(args) or ["."],
        invocation_params=SimpleNamespace(dir=HERE),
        option=SimpleNamespace(**{**defaults, **options}),
        pluginmanager=SimpleNamespace(hasplugin=lambda name: plugin and name == "xdist"),
    )


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setattr(parallel, "_cores", lambda: 4)
    monkeypatch.setattr(parallel, "_memory", lambda: 64 << 30)


def test_a_run_of_many_files_uses_all_cores_and_one_worker_more() -> None:
    chosen = config()
    pytest_cmdline_main(chosen)
    assert (chosen.option.numprocesses, chosen.option.dist) == (5, "loadfile")


def test_the_command_line_decides_and_a_worker_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (
        {"numprocesses": 0},
        {"numprocesses": 3},
        {"dist": "load", "tx": ["popen"]},
        {"usepdb": True},
        {"trace": True},
        {"capture": "no"},
        {"collectonly": True},
    ):
        assert workers(config(**options)) == 0, options
    assert workers(config(plugin=False)) == 0
    inside = config()
    inside.workerinput = {}
    assert workers(inside) == 0
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert workers(config()) == 0


def test_few_files_and_little_memory_need_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workers(config("test_parallel.py::test_x", "test_parallel.py::test_y", "utils/test_html.py")) == 0
    monkeypatch.setattr(parallel, "_memory", lambda: 7 << 30)
    assert workers(config()) == 2
    monkeypatch.setattr(parallel, "_memory", lambda: 2 << 30)
    assert workers(config()) == 1
