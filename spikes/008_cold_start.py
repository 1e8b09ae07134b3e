# Frozen: runs at commit 84bfb74.
"""How long from the start of the process to the first token, with and without compiled programs on disk?

Each run is a fresh process with the embedded model and the command line's defaults. The compile cache is a
temporary directory: empty before every cold run, left by the cold run for the warm one.

    python -m spikes.008_cold_start
"""

# %%
from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = "def add(a, b):"
GOALS = {"cold": 15.0, "warm": 6.0}  # seconds to the first token
PARTS = ("interpreter", "imports", "load", "lower", "compile", "first token", "total")
COMMAND = "total, `xla-engine run`"


# %%
def child(began: float) -> None:
    """One start, told in seconds on the system's monotonic clock; `began` is when the parent started us."""
    marks = [began, time.monotonic()]
    import jax  # noqa: F401

    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.environment import embedded_model_directory
    from xla_engine.model_loader.checkpoint import load_checkpoint
    from xla_engine.sampling_params import SamplingParams
    from xla_engine.text.tokenizer import Tokenizer

    marks.append(time.monotonic())
    directory = embedded_model_directory()
    checkpoint, tokenizer = load_checkpoint(directory), Tokenizer.from_pretrained(directory)
    loaded = time.monotonic()
    engine = XlaBatchEngine(checkpoint, tokenizer, EngineConfig())
    built = time.monotonic()
    engine.submit(PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
    engine.drain()
    ended = time.monotonic()
    stats, reports = engine.stats(), engine.inventory_report()
    lower = sum(report.lower_seconds for report in reports)
    parts = {
        "interpreter": marks[1] - marks[0],
        "imports": marks[2] - marks[1],
        "load": loaded - marks[2] + (built - loaded - stats.compile_seconds),
        "lower": lower,
        "compile": stats.compile_seconds - lower,
        "first token": ended - built,
        "total": ended - began,
        "programs": len(reports),
    }
    print(json.dumps(parts))
    engine.close()


# %%
def start(cache: Path) -> dict[str, float]:
    """One start in a fresh process."""
    command = [sys.executable, "-m", "spikes.008_cold_start", "--child", str(time.monotonic())]
    return dict(json.loads(_run(command, cache).stdout.splitlines()[-1]))


def start_command_line(cache: Path) -> float:
    """Seconds to the first token that `xla-engine run` itself reports for the example file."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["run", "examples/requests.jsonl", "-o", f"{folder}/out.jsonl", "--no-progress"]
        told = _run([sys.executable, "-m", "xla_engine", *arguments], cache).stderr
    found = re.search(r"cold start\s+([\d.]+) s", told)
    if found is None:
        raise SystemExit(f"no cold start in the summary:\n{told}")
    return float(found[1])


def _run(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XLA_ENGINE_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done


def rounds_of(count: int) -> dict[str, list[dict[str, float]]]:
    """Cold and warm starts in turns; both ways of starting each get a cache of their own."""
    found: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as ours, tempfile.TemporaryDirectory() as theirs:
            for state in ("cold", "warm"):
                found[state].append({**start(Path(ours)), COMMAND: start_command_line(Path(theirs))})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child)
        return
    from spikes.support.timing import describe_machine, markdown_table

    found = rounds_of(arguments.rounds)
    print(describe_machine())
    print(
        f"\nSeconds, median (least-most) of {arguments.rounds} runs, {found['cold'][0]['programs']} programs:\n"
    )
    rows = []
    for part in (*PARTS, COMMAND):
        columns = ([run[part] for run in runs] for runs in found.values())
        rows.append([part, *(f"{statistics.median(c):.2f} ({min(c):.2f}-{max(c):.2f})" for c in columns)])
    rows.append(["goal", *(f"{GOALS[state]:.0f}" for state in found)])
    print(markdown_table(["part", "cold", "warm"], rows))
    slowest = {state: max(max(run["total"], run[COMMAND]) for run in runs) for state, runs in found.items()}
    met = {state: slowest[state] < GOALS[state] for state in found}
    print(json.dumps({"spike": "008", "slowest": slowest, "goal_met": met}))


if __name__ == "__main__":
    main()
