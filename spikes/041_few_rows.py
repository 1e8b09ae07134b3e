# Frozen: runs at commit 84bfb74.
"""What do decode programs of few rows gain, and what do they cost at start-up?

    python -m spikes.041_few_rows --model smollm2-135m --slots 8 32
    python -m spikes.041_few_rows --model embedded --slots 8 --cold

For each number of live rows the program of all slots and the programs of few rows take turns: the engine's own, with
its own sampler, on rows of 160 keys.
"""

# %%
from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.bench.models import find_model
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.row_state.rows import pack_rows
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.runner.dispatch import decode_work
from xla_engine.runner.programs import decode_name

LENGTH = 160


def make_engine(model: str, slots: int, shapes: Path, *, cold: bool) -> XlaBatchEngine:
    config = EngineConfig(
        max_num_seqs=slots,
        max_model_len=512,
        prefill_lanes=(8,),
        preemption=False,
        enable_prefix_caching=False,
        compile_cache=not cold,
    )
    if model == "embedded":
        return XlaBatchEngine.from_pretrained(config=config)
    return XlaBatchEngine(load_checkpoint(find_model(model, shapes), dtype="bfloat16"), None, config)


# %%
def step(engine: XlaBatchEngine, live: int, few: int | None, temperature: float) -> Callable[[], Any]:
    """A decode step of `live` rows through the program of `few`; None: of all."""
    runner = engine.runner
    host: Any = jax.tree.map(np.asarray, runner._state.make_rows())
    total = len(host.token)
    rows = replace(
        host,
        length=np.full(total, LENGTH, np.int32),
        remaining=np.full(total, 1 << 20, np.int32),
        sampling=replace(
            host.sampling,
            temperature=np.full(total, temperature, np.float32),
            num_logprobs=np.zeros(total, np.int32),
        ),
    )
    work = jax.device_put(decode_work(np.arange(live), total, few))
    name = decode_name(runner.buckets[0], few)
    words = np.asarray(pack_rows(rows).words)

    def run() -> None:
        runner._state.rows = replace(runner._state.rows, words=jax.device_put(words))
        jax.block_until_ready(runner._dispatch.run(name, work))

    return run


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cold", action="store_true", help="compile everything, and say what that took")
    options = parser.parse_args()
    print(describe_machine(), "\n")
    head = ["slots", "live rows", "ms, program of all", "ms, of few (rows)", "least, of all"]
    table, programs = [], []
    with tempfile.TemporaryDirectory() as shapes:
        for slots in options.slots:
            engine = make_engine(options.model, slots, Path(shapes), cold=options.cold)
            for report in engine.inventory_report():
                if report.name.startswith("decode"):
                    programs.append(
                        [
                            str(slots),
                            report.name,
                            f"{report.lower_seconds:.2f}",
                            f"{report.compile_seconds:.2f}",
                        ]
                    )
            for live in (live for live in (1, 2, 4, 8) if live < slots):
                choices = [few for few in engine.runner.few_choices if few >= live]
                forms: dict[str, Callable[[], object]] = {
                    str(few): step(engine, live, few, options.temperature) for few in (None, *choices)
                }
                times = interleave(forms, options.rounds)
                everything = times["None"]
                table += [
                    [
                        str(slots),
                        str(live),
                        everything.milliseconds(),
                        f"{times[str(few)].milliseconds()} ({few})",
                        f"{times[str(few)].least / everything.least:.2f}",
                    ]
                    for few in choices
                ]
            engine.close()
    print(markdown_table(head, table), "\n")
    if options.cold:
        print(markdown_table(["slots", "program", "s to trace and lower", "s to compile"], programs))


if __name__ == "__main__":
    main()
