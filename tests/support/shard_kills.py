"""Kill shards of a run by SIGKILL at random moments, go on, merge, and compare with a run that was left alone.

Run as a program, so that it can fork without jax's threads: `python -m tests.support.shard_kills DIRECTORY KILLS`
prints how often a shard was killed, and every difference as a line that begins with DIFFERENT. `--plant` lets a merge
take what is not finished, which must be found.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.command_line import invoke
from tests.support.fake_engine import FakeEngine
from xla_engine import cli
from xla_engine.batch import shards

SHARDS = 3
# What a run imports late, jax among it: once, not in each of some forty children. jax itself is never started.
IMPORTED = ("cli.run", "cli.merge", "cli._run", "batch.earlier_runs", "model_loader.describe")
LINES = b"".join(
    b'{"prompt": "p%d", "custom_id": "id%d", "max_tokens": %d}\n' % (n, n % 37, 200 if n % 9 == 0 else 2)
    for n in range(1, 41)
)


def install(engine: FakeEngine) -> None:
    @contextlib.contextmanager
    def load(options: dict[str, Any], **_: Any) -> Iterator[FakeEngine]:
        yield engine

    cli._common.load_engine = load


def run(folder: Path, shard: int | None, *, kill_at: int | None = None, seed: int = 0) -> bool:
    """Run a shard, or all, in a process of its own; whether it came to its end."""

    def die(step: int) -> None:
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        install(FakeEngine(seed=seed, on_step=die))
        name = "whole.jsonl" if shard is None else f"part-{shard}.jsonl"
        options = ["--ordered", "--created", "17", "--no-progress", "--resume"]
        options += [] if shard is None else ["--shard", f"{shard}/{SHARDS}"]
        done = invoke("run", folder / "in.jsonl", "-o", folder / name, *options)
        os._exit(0 if done.exit_code in (0, 1) else 3)  # 1: some lines are errors
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        print("DIFFERENT: a run failed")
    return not os.WIFSIGNALED(status)


def merged(folder: Path) -> bytes | None:
    parts = [folder / f"part-{shard}.jsonl" for shard in range(SHARDS)]
    done = invoke("merge", *parts, "-o", folder / "out.jsonl", "--overwrite")
    return (folder / "out.jsonl").read_bytes() if done.exit_code == 0 else None


def main() -> None:
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    for name in IMPORTED:
        importlib.import_module(f"xla_engine.{name}")
    (folder / "in.jsonl").write_bytes(LINES)
    run(folder, None)
    expected = (folder / "whole.jsonl").read_bytes()
    if "--plant" in sys.argv:
        shards._check_one_job = lambda *arguments, **options: None
    draw, killed = random.Random(19), 0
    for trial in range(kills):
        for path in folder.glob("part-*"):
            path.unlink()
        for shard in draw.sample(range(SHARDS), SHARDS):
            while not run(folder, shard, kill_at=draw.randrange(1, 12), seed=draw.randrange(99)):
                killed += 1
                if merged(folder) is not None:
                    print(f"DIFFERENT: merged before the end of trial {trial}")
        if merged(folder) != expected:
            print(f"DIFFERENT: trial {trial}")
    print(f"{killed} killed")


if __name__ == "__main__":
    main()
