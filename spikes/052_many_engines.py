# Frozen: runs at commit 9aa75a3.
"""What do several engines give and cost, and does a job survive its processes?

    python -m spikes.052_many_engines parallel [ROUNDS]     one engine beside two, in turns
    python -m spikes.052_many_engines ray [ROUNDS] [MODEL] [ROWS A BLOCK]
                                                            one actor of Ray Data beside one engine and one `run`
    python -m spikes.052_many_engines kills [TIMES]         SIGKILL of engines and shards at random moments
    python -m spikes.052_many_engines ray_kills [TIMES]     of actors and drivers of Ray Data

The embedded model; with `parallel` each of two engines has half of the cores.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from xla_engine import SamplingParams
from xla_engine.batch.lines import read_lines
from xla_engine.batch.results import ResultHeader
from xla_engine.batch.resume import FileSystem, PlainSink
from xla_engine.batch.run import BatchRun
from xla_engine.bench.models import find_model
from xla_engine.config import EngineConfig
from xla_engine.distributed.data_parallel.engine import DataParallelEngine
from xla_engine.distributed.ray_data.rows import columns_of, error_of
from xla_engine.engine.batch_engine import XlaBatchEngine

CONFIG = EngineConfig(max_num_seqs=16, max_model_len=256)
REQUESTS = Path("examples/requests.jsonl")


Wanted = Sequence[tuple[Any, SamplingParams]]


def prompts(count: int) -> Wanted:
    draw = random.Random(0)
    return [
        (f"def function_{number}(x, y):", SamplingParams(max_tokens=draw.randrange(16, 96), ignore_eos=True))
        for number in range(count)
    ]


def timed(engine: XlaBatchEngine | DataParallelEngine, wanted: Wanted) -> float:
    began = time.monotonic()
    for prompt, params in wanted:
        engine.submit(prompt, params)
    tokens = sum(len(output.outputs[0].token_ids) for output in engine.drain())
    return tokens / (time.monotonic() - began)


def asked(params: SamplingParams) -> dict[str, Any]:
    return {"max_tokens": params.max_tokens, "ignore_eos": True, "detokenize": params.detokenize}


def timed_run(engine: XlaBatchEngine, wanted: Wanted) -> float:
    """Tokens a second of `xla-engine run` over the same, without its start."""
    lines = b"".join(
        json.dumps({"prompt": each, **asked(params)}).encode() + b"\n" for each, params in wanted
    )
    header = ResultHeader(
        created=17, model="m", system_fingerprint=engine.identity().digest(), tokenizer=engine.tokenizer
    )
    with tempfile.TemporaryFile() as target:
        began = time.monotonic()
        totals = BatchRun(
            engine, read_lines(io.BytesIO(lines)), PlainSink(target, FileSystem()), header=header
        ).run()
        seconds = time.monotonic() - began
    assert totals.ok == len(wanted), totals
    return sum(params.max_tokens or 0 for _, params in wanted) / seconds


def parallel(rounds: int) -> None:
    wanted = prompts(200)
    found: dict[str, list[float]] = {"one engine": [], "two engines": []}
    with (
        XlaBatchEngine.from_pretrained(None, CONFIG) as one,
        DataParallelEngine(None, CONFIG, engines=2) as two,
    ):
        for number in range(rounds + 1):
            for name, engine in (("one engine", one), ("two engines", two)):
                speed = timed(engine, wanted)
                if number:
                    found[name].append(speed)
    ratios = [b / a for a, b in zip(*found.values(), strict=True)]
    for name, speeds in found.items():
        print(f"{name}: {median(speeds):.0f} tok/s")
    print(f"two engines / one engine: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


class AtOnce:
    """In place of `EngineActor`: answers at once. What a row takes then is Ray's."""

    def __init__(self, stage: dict[str, Any]) -> None:
        """Take what an actor is given."""

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        """A batch with the columns of results."""
        for name, column in columns_of([error_of("none")] * batch.num_rows).items():
            batch = batch.append_column(name, column)
        yield batch


def through_ray(rounds: int, model: str = "embedded", block: int = 50) -> None:
    """model: "embedded" or "smollm2-135m" with random weights. block: rows of each block of the dataset."""
    import ray

    from xla_engine.distributed.ray_data import stage as module
    from xla_engine.ray import ModelStage, build_processor

    ray.init(num_cpus=2, object_store_memory=256 << 20, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    fields = {"max_num_seqs": CONFIG.max_num_seqs, "max_model_len": CONFIG.max_model_len}
    small = model == "embedded"
    path = None if small else str(find_model(model, Path.home() / ".cache" / "xla-engine-bench"))
    processor = build_processor(ModelStage(model=path, engine=fields, batch_size=32))
    few, many = (prompts(count) for count in ((400, 4000) if small else (40, 240)))
    if not small:
        few, many = (
            [
                ([7, 11, 13, number], params.clone(detokenize=False))
                for number, (_, params) in enumerate(wanted)
            ]
            for wanted in (few, many)
        )

    def job(wanted: Wanted, actor: type) -> tuple[int, float]:
        items = [
            {
                "prompt" if isinstance(prompt, str) else "tokenized_prompt": prompt,
                "sampling_params": asked(params),
            }
            for prompt, params in wanted
        ]
        usual, module.EngineActor = module.EngineActor, actor  # type: ignore[misc, assignment]
        began = time.monotonic()
        blocks = processor(ray.data.from_items(items, override_num_blocks=max(len(items) // block, 1)))
        tokens = sum(int(each["num_generated_tokens"].sum()) for each in blocks.iter_batches())
        module.EngineActor = usual  # type: ignore[misc]
        return tokens, time.monotonic() - began

    ratios, of_run = [], []
    with XlaBatchEngine.from_pretrained(path, CONFIG) as one:
        timed(one, few)
        for _ in range(rounds):
            alone, run = timed(one, many), timed_run(one, many)
            # A job starts its actor. What a longer one makes more, in the time that it takes more, is without that.
            (less, shorter), (more, longer) = job(few, module.EngineActor), job(many, module.EngineActor)
            through = (more - less) / (longer - shorter)
            floor = (job(many, AtOnce)[1] - job(few, AtOnce)[1]) / (len(many) - len(few))
            ratios.append(through / alone)
            of_run.append(through / run)
            row = (less - more) / (len(few) - len(many))  # tokens
            print(
                f"one engine {alone:.0f} tok/s, run {run:.0f}, stage {through:.0f}, ratios {ratios[-1]:.2f} and "
                f"{of_run[-1]:.2f}; a row takes "
                f"{1e3 * row / alone:.2f} ms, {1e3 * row / through:.2f} ms, and Ray alone {1e3 * floor:.2f} ms",
                flush=True,
            )
    print(f"median of the stage: {median(ratios):.2f} of one engine, {median(of_run):.2f} of run")
    ray.shutdown()


def kills(times: int) -> None:
    draw = random.Random(0)
    engines = engine_kills(times, draw)
    print(f"engines of one machine: {engines} killed, 0 requests lost, 0 twice, 0 with other bits")
    print(f"shards: {shard_kills(times, draw)} killed, the merged bytes are those of one run")


def engine_kills(times: int, draw: random.Random) -> int:
    wanted, killed = prompts(60), 0
    with (
        XlaBatchEngine.from_pretrained(None, CONFIG) as one,
        DataParallelEngine(None, CONFIG, engines=2) as two,
    ):
        for number, (prompt, params) in enumerate(wanted):
            one.submit(prompt, params, request_id=str(number))
        expected = {output.request_id: output.outputs for output in one.drain()}
        while killed < times:
            for number, (prompt, params) in enumerate(wanted):
                two.submit(prompt, params, request_id=str(number))
            found = []
            at = draw.uniform(0, 0.5) + time.monotonic()
            while two.has_unfinished:
                found += two.step(only_finished=True)
                if at is not None and time.monotonic() > at and len(two.pids) == 2:
                    os.kill(draw.choice(two.pids), signal.SIGKILL)
                    killed, at = killed + 1, None
            assert len(found) == len(wanted), "lost or twice"
            assert {output.request_id: output.outputs for output in found} == expected, "other bits"
    return killed


def shard_kills(times: int, draw: random.Random) -> int:
    command = [sys.executable, "-m", "xla_engine"]
    options = ["--ordered", "--created", "17", "--no-progress", "--resume"]
    killed = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)

        def run(name: str, *more: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*command, "run", str(REQUESTS), "-o", str(place / name), *options, *more],
                stderr=subprocess.DEVNULL,
            )

        assert run("whole.jsonl").wait() == 0
        while killed < times:
            for path in place.glob("part-*"):
                path.unlink()
            for shard in range(2):
                name = f"part-{shard}.jsonl"
                while (process := run(name, "--shard", f"{shard}/2")).poll() is None:
                    try:
                        process.wait(draw.uniform(3.5, 9))
                        break
                    except subprocess.TimeoutExpired:
                        process.kill()
                        process.wait()
                        killed += 1
            parts = [str(place / f"part-{shard}.jsonl") for shard in range(2)]
            merge = [*command, "merge", *parts, "-o", str(place / "out.jsonl"), "--overwrite"]
            subprocess.run(merge, check=True, stderr=subprocess.DEVNULL)
            assert (place / "out.jsonl").read_bytes() == (place / "whole.jsonl").read_bytes(), "other bytes"
            assert json.loads((place / "out.jsonl").read_bytes().splitlines()[0])["error"] is None
    return killed


def ray_kills(times: int) -> None:
    from tests.support import ray_job

    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        source = ray_job.write_source(Path(folder) / "in.parquet", 600)
        with XlaBatchEngine.from_pretrained(None, ray_job.CONFIG) as engine:
            expected = ray_job.expected(source, engine)
        for what, kill in (("actors", kill_actors), ("drivers", kill_drivers)):
            killed = jobs = 0
            while killed < times:
                target = Path(folder) / f"{what}-{jobs}"
                killed += kill(source, target, times - killed, draw)
                assert ray_job.found(target) == expected, "lost, twice or other bits"
                jobs += 1
                print(
                    f"{what}: {killed} killed in {jobs} jobs, 0 rows lost, 0 twice, 0 with other bits",
                    flush=True,
                )


def kill_actors(source: Path, target: Path, most: int, draw: random.Random) -> int:
    """A job with two actors, of which one is killed a while after both are there, until it is done."""
    from tests.support import ray_job

    process = ray_job.start(source, target, "-", 2)
    killed, at, limit = 0, None, time.monotonic() + 900
    while process.poll() is None:
        assert time.monotonic() < limit, "the job hangs"
        alive = ray_job.actors_of(process.pid)
        if len(alive) < 2 or killed == most:
            at = None
        elif at is None:
            at = time.monotonic() + draw.uniform(0, 25)  # some are killed while their engine starts
        elif time.monotonic() > at:
            os.kill(draw.choice(alive), signal.SIGKILL)
            killed, at = killed + 1, None
        time.sleep(0.2)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    return killed


def kill_drivers(source: Path, target: Path, most: int, draw: random.Random) -> int:
    """A job with checkpoints, killed with all its processes and begun again, until it is done."""
    from tests.support import ray_job

    checkpoint, killed = target.with_suffix(".checkpoint"), 0
    while True:
        process = ray_job.start(source, target, checkpoint, 1)
        began = time.monotonic()
        while process.poll() is None and not ray_job.actors_of(process.pid):
            assert time.monotonic() < began + 300, "the job hangs"
            time.sleep(0.2)
        try:
            _, errors = process.communicate(timeout=600 if killed == most else draw.uniform(0, 25))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            killed += 1
            continue
        assert process.returncode == 0, errors.decode()[-3000:]
        return killed


if __name__ == "__main__":
    what: dict[str, Callable[..., None]] = {
        "parallel": parallel,
        "ray": through_ray,
        "kills": kills,
        "ray_kills": ray_kills,
    }
    rest: list[Any] = [int(word) if word.isdigit() else word for word in sys.argv[2:]]
    what[sys.argv[1]](*(rest or [5]))
