"""Runs of more than a few files use all cores: as if `-n COUNT --dist loadfile` were given.

There is one worker more than cores, because a third of the tests' time is spent waiting for sockets and processes.
"""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path

import pytest

MOST_WORKERS = 8  # more only import the tests more often
MEMORY = 3 << 30  # bytes a worker may come to need
FEW_FILES = 4
YOUNG = 50_000  # objects between two searches for garbage; after each 700 they take a tenth of tests in plain Python
# Folders whose tests compile or take long go first: a worker that begins one at the end keeps the others waiting.
LONG = (
    *("perplexity", "security", "trained", "runner", "graphs", "laws", "engine", "training", "equivalence"),
    *("prefix_cache", "model_loader", "vllm", "docs", "data_parallel", "images", "soak", "batch", "cli"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Choose the workers before xdist reads its options."""
    if (count := workers(config)) > 1:
        config.option.numprocesses = count
        config.option.dist = "loadfile"  # a file's tests share its engines
        config.option.loadscopereorder = False  # by `LONG`, not by the number of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder, long ones first; the order within a folder stays."""
    items.sort(
        key=lambda item: LONG.index(folder) if (folder := item.path.parent.name) in LONG else len(LONG)
    )


def pytest_collection() -> None:
    """Importing and collecting thousands of tests leaves no garbage to speak of."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was imported and collected stays, so nobody searches it for garbage."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])


def workers(config: pytest.Config) -> int:
    """How many processes run the tests; 0 leaves the choice to the command line, which may ask for one."""
    option = config.option
    inside = hasattr(config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ
    if inside or not config.pluginmanager.hasplugin("xdist"):
        return 0
    chosen = option.numprocesses is not None or option.dist != "no" or option.tx
    at_terminal = option.usepdb or option.trace or option.capture == "no"
    if chosen or at_terminal or option.collectonly or _files(config) <= FEW_FILES:
        return 0
    return min(_cores() + 1, MOST_WORKERS, max(1, _memory() // MEMORY))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    """Bytes of the machine, or of the container if that has fewer."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such version, or "max"
            sizes.append(int(Path(limit).read_text()))
    return min(sizes)


def _files(config: pytest.Config) -> int:
    """How many files of tests the arguments name."""
    named = {Path(config.invocation_params.dir, each.partition("::")[0]) for each in config.args}
    return sum(len(list(each.rglob("test_*.py"))) if each.is_dir() else 1 for each in named)
