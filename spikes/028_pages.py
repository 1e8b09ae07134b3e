"""In one and the same memory: slots of their own, or more slots that borrow pages?

python -m spikes.028_pages
"""

# %%
from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path

from spikes.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table
from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.checkpoint import Checkpoint, random_weights

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=3)
options = arguments.parse_known_args()[0]

MODEL = replace(SMOLLM2_135M, max_position_embeddings=1024)
CHECKPOINT = Checkpoint(
    path=Path("random"),
    config=MODEL,
    weights=random_weights(MODEL, dtype="bfloat16", scale=0.04),
    eos_token_ids=(0,),
    bos_token_id=None,
    dtype="bfloat16",
    fingerprint="random",
)
BASE = EngineConfig(max_model_len=1024, enable_prefix_caching=False, prefill_lanes=(8,))
ENGINES = {
    "8 slots of 1024": replace(BASE, max_num_seqs=8),
    "8 slots, 128 pages of 64": replace(BASE, max_num_seqs=8, num_blocks=128),
    "32 slots, 128 pages of 64": replace(BASE, max_num_seqs=32, num_blocks=128),
}
LOADS = {  # prompt tokens, new tokens, requests
    "short (32 + 48)": (32, 48, 48),
    "long (704 + 64)": (704, 64, 8),
}


# %%
def run(engine: XlaBatchEngine, load: tuple[int, int, int]) -> None:
    prompt, new, count = load
    draw = random.Random(0)
    for _ in range(count):
        engine.submit(
            [draw.randrange(1, MODEL.vocab_size) for _ in range(prompt)],
            SamplingParams(temperature=0, max_tokens=new, ignore_eos=True),
        )
    engine.drain()


# %%
if __name__ == "__main__":
    engines = {name: XlaBatchEngine(CHECKPOINT, None, config) for name, config in ENGINES.items()}
    rows = []
    for name, load in LOADS.items():
        variants = {
            each: lambda engine=engine, load=load: run(engine, load) for each, engine in engines.items()
        }
        times = interleave(variants, options.rounds, warm_up=0)
        first = times["8 slots of 1024"].median
        for each, engine in engines.items():
            seconds = times[each].median
            rows.append(
                [
                    name,
                    each,
                    f"{engine.runner.cache_bytes / 1e6:.0f}",
                    f"{seconds:.2f}",
                    f"{first / seconds:.2f}",
                ]
            )
    print(describe_machine())
    print(markdown_table(["load", "layout", "cache, MB", "seconds", "speed"], rows))
