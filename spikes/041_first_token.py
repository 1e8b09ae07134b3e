# Frozen: runs at commit 84bfb74.
"""What does the first token of a lone prompt wait for, and what do prompts that wait together cost?

    python -m spikes.041_first_token --model smollm2-135m

From `submit` to the turn that delivers the first token, through the engine, for a prompt that asks for one token and
for one that goes on; beside them the programs that run meanwhile, alone. Parts of the prefill call:
`python -m spikes.034_prefill --no-tiles --lanes 4 8`.
"""

# %%
from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.bench.models import find_model
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.row_state.packing import pack
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.runner.dispatch import decode_work
from xla_engine.runner.prefill_inputs import make_lanes
from xla_engine.runner.programs import decode_name, prefill_name
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Chunk, Slot


def make_engine(model: str, lanes: tuple[int, ...], shapes: Path) -> XlaBatchEngine:
    config = EngineConfig(
        max_num_seqs=8, max_model_len=1024, enable_prefix_caching=False, prefill_lanes=lanes
    )
    if model == "embedded":
        return XlaBatchEngine.from_pretrained(config=config)
    return XlaBatchEngine(load_checkpoint(find_model(model, shapes), dtype="bfloat16"), None, config)


def first_tokens(engine: XlaBatchEngine, prompts: int, length: int, tokens: int) -> Callable[[], None]:
    """From the first `submit` to the turn in which the last prompt has a token. What follows is aborted, untimed."""
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    spent = [0.0]

    def run() -> None:
        began = time.perf_counter()
        waiting = {
            engine.submit([int(each) for each in draw.integers(10, 400, length)], params)
            for _ in range(prompts)
        }
        ids = set(waiting)
        while waiting:
            waiting -= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
        spent[0] = time.perf_counter() - began
        for name in ids:
            engine.abort(name)
        engine.drain()

    def timed() -> None:
        run()
        times.setdefault(id(run), []).append(spent[0])

    times: dict[int, list[float]] = {}
    timed.found = lambda: next(iter(times.values()))  # type: ignore[attr-defined]
    return timed


def prefill(engine: XlaBatchEngine, length: int, lanes: int) -> Callable[[], None]:
    """A prefill call of one prompt in the program of so many lanes."""
    runner, size = engine.runner, engine.config.chunk_size
    slot = Slot(index=0, epoch=0)
    chunks = [
        Chunk(
            slot=slot,
            request_id="a",
            start=start,
            tokens=tuple(range(10, 10 + min(size, length - start))),
            is_last=False,
        )
        for start in range(0, length, size)
    ]
    work: Any = jax.device_put(pack(make_lanes(chunks, {}, lanes, size)))
    name = prefill_name(lanes, runner.buckets[-1])
    return lambda: jax.block_until_ready(runner._dispatch.run(name, work))


def decode(engine: XlaBatchEngine, few: int | None) -> Callable[[], None]:
    """A decode step in which no row is live."""
    runner = engine.runner
    work = jax.device_put(decode_work(np.arange(0), engine.config.device_rows, few))
    name = decode_name(runner.buckets[-1], few)
    return lambda: jax.block_until_ready(runner._dispatch.run(name, work))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--lanes", type=int, nargs="+", default=[2, 8])
    options = parser.parse_args()
    print(describe_machine(), "\n")
    with tempfile.TemporaryDirectory() as shapes:
        engine = make_engine(options.model, tuple(options.lanes), Path(shapes))
        jobs = {
            f"{prompts} x {length}, {tokens} to sample": first_tokens(engine, prompts, length, tokens)
            for prompts, length, tokens in (
                (1, 16, 1),
                (4, 16, 1),
                (1, 128, 1),
                (1, 128, 64),
                (2, 128, 1),
                (4, 128, 1),
                (4, 128, 64),
                (1, 512, 1),
            )
        }
        programs: dict[str, Callable[[], None]] = {
            f"prefill of 128 tokens in {lanes} lanes": prefill(engine, 128, lanes)
            for lanes in engine.runner.lane_choices
            if lanes * engine.config.chunk_size >= 128
        }
        for few in (None, *engine.runner.few_choices[:1]):
            programs[f"decode, no row live, program of {few or engine.config.device_rows}"] = decode(
                engine, few
            )
        interleave(jobs, options.rounds, warm_up=2)
        times = interleave(programs, options.rounds)
        table = []
        for name, job in jobs.items():
            found = sorted(job.found()[2:])  # type: ignore[attr-defined]
            table.append(
                [name, f"{1e3 * found[len(found) // 2]:.1f} ({1e3 * found[0]:.1f}-{1e3 * found[-1]:.1f})"]
            )
        table += [[name, each.milliseconds()] for name, each in times.items()]
        print(markdown_table(["", "ms"], table))
        engine.close()


if __name__ == "__main__":
    main()
