"""Measures parts of the work of two trees in turns, each tree in a process of its own on the same core."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


def begin(tree: Path, core: int) -> None:
    """In a worker, before the package is imported: stay on a core, and import the package from a tree."""
    os.sched_setaffinity(0, {core})
    sys.path.insert(0, str(tree))


def compare(
    before: Path,
    command: Sequence[str],
    parts: Sequence[str],
    rounds: int,
    shown: Callable[[float], str],
) -> None:
    """Print what each part takes in the tree `before` and in this one, and the median of the ratios of the rounds.

    command: the spike's module and a worker's arguments after the tree. The worker prints "ready", and then for
        each part, a line of its standard input, the seconds that it took.
    rounds: those that count; one more warms up. shown: seconds in words.
    """
    workers = {}
    for name, tree in (("before", before.resolve()), ("after", HERE)):
        module, *arguments = command
        workers[name] = subprocess.Popen(
            [sys.executable, "-m", module, str(tree), *arguments],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert workers[name].stdout.readline() == "ready\n"
    width = max(map(len, parts))
    for part in parts:
        found = {name: [] for name in workers}
        for turn in range(rounds + 1):
            for name in sorted(workers, reverse=turn % 2 == 0):
                print(part, file=workers[name].stdin, flush=True)
                found[name].append(float(workers[name].stdout.readline()))
        old, new = found["before"][1:], found["after"][1:]
        ratios = [a / b for a, b in zip(old, new, strict=True)]
        print(
            f"{part:{width}}  before {shown(statistics.median(old))}  after {shown(statistics.median(new))}  "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast",
            flush=True,
        )
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
