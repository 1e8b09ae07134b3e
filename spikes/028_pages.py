# Frozen: runs at commit a8802fc.
"""In one and the same memory: slots of their own, or as many or more slots that borrow pages?

python -m spikes.028_pages [--loads short mixed long growing shared] [--attention 8 32]
"""

# %%
from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table
from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.model_loader.checkpoint import random_checkpoint

MODEL = replace(SMOLLM2_135M, max_position_embeddings=1024)
CHECKPOINT = random_checkpoint(MODEL, scale=0.04, eos_token_ids=(0,))
BASE = EngineConfig(max_model_len=1024, prefill_lanes=(8,), self_check=False)
OWN = "8 slots of 1024"
ENGINES = {
    OWN: replace(BASE, max_num_seqs=8),
    **{
        f"{slots} slots, 128 pages": replace(BASE, max_num_seqs=slots, num_blocks=128)
        for slots in (8, 16, 32)
    },
}


# %%
def heavy_tailed(draw: random.Random, median: float, most: int) -> int:
    return min(max(round(draw.lognormvariate(math.log(median), 1.0)), 4), most)


def lengths(load: str) -> list[tuple[int, int, int]]:
    """Prompt tokens in common, prompt tokens of its own and new tokens of each request."""
    draw = random.Random(28)
    return {
        "short": [(0, 32, 48)] * 48,
        "mixed": [(0, heavy_tailed(draw, 64, 512), heavy_tailed(draw, 48, 384)) for _ in range(40)],
        "long": [(0, 704, 64)] * 12,
        "growing": [(0, 600, 160)] * 12,
        "shared": [(448, 64, 48)] * 24,
    }[load]


LOADS = {
    "short": "48 of 32 + 48",
    "mixed": "40, medians 64 + 48",
    "long": "12 of 704 + 64",
    "growing": "12 of 600 + 160",
    "shared": "24 of 448 in common + 64 + 48",
}

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=3)
arguments.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
arguments.add_argument(
    "--attention", type=int, nargs="+", default=[], metavar="B", help="only attention under XLA, B rows"
)
options = arguments.parse_known_args()[0]


# %%
def run(engine: XlaBatchEngine, load: str) -> None:
    draw = random.Random(7)
    common = [draw.randrange(1, MODEL.vocab_size) for _ in range(512)]
    engine.reset_prefix_cache()
    for shared, own, new in lengths(load):
        engine.submit(
            [*common[:shared], *(draw.randrange(1, MODEL.vocab_size) for _ in range(own))],
            SamplingParams(temperature=0, max_tokens=new, ignore_eos=True),
        )
    engine.drain()


def preemptions(engine: XlaBatchEngine) -> int:
    return engine.scheduler.counters().preemptions


# %%
def attention(rows: int, *, paged: bool) -> tuple[Callable[[], object], int]:
    """Decode attention of one layer under XLA, 1024 keys a row, and the scratch it takes in bytes."""
    backend, draw = XlaAttention(), np.random.default_rng(0)
    model, pages = replace(MODEL, num_hidden_layers=1), rows * 1024 // 64
    sizes = (pages, 64) if paged else (rows, 1024)
    layer = backend.make_store(model, (0,), *sizes, jnp.dtype(jnp.bfloat16))
    state = [jax.tree.map(lambda leaf: jnp.asarray(draw.standard_normal(leaf.shape), leaf.dtype), layer)]
    tables = jnp.asarray(draw.permutation(pages).reshape(rows, -1), jnp.int32) if paged else None
    qkv = jnp.asarray(draw.standard_normal((rows, model.qkv_features)), jnp.float32)

    def attend(layer: Any, qkv: jax.Array) -> Any:
        rope = jnp.ones((rows, 2, model.head_dim // 2))
        bf16 = jnp.dtype(jnp.bfloat16)
        call = AttentionCall(model.attention(0), AttentionWeights(), rope, 1024, bf16, tables)
        length, live = jnp.full(rows, 1019, jnp.int32), jnp.ones(rows, jnp.bool_)
        return backend.attend_decode(layer, qkv, call, length=length, live=live)

    compiled = jax.jit(attend, donate_argnums=0).lower(state[0], qkv).compile()

    def run() -> None:
        state[0], out = compiled(state[0], qkv)
        jax.block_until_ready(out)

    return run, compiled.memory_analysis().temp_size_in_bytes


def compare_attention() -> None:
    rows = []
    for batch in options.attention:
        forms = {name: attention(batch, paged=name == "pages") for name in ("slots", "pages")}
        times = interleave({name: run for name, (run, _) in forms.items()}, 40)
        rows += [
            [f"{batch}", name, f"{scratch / 1e6:.1f}", times[name].milliseconds(2)]
            for name, (_, scratch) in forms.items()
        ]
    print(markdown_table(["B", "layout", "scratch, MB", "ms a layer"], rows))


# %%
if __name__ == "__main__" and options.attention:
    compare_attention()
elif __name__ == "__main__":
    engines = {name: XlaBatchEngine(CHECKPOINT, None, config) for name, config in ENGINES.items()}
    rows = []
    for load in options.loads:
        variants = {each: partial(run, engine, load) for each, engine in engines.items()}
        before = {each: preemptions(engine) for each, engine in engines.items()}
        times = interleave(variants, options.rounds, warm_up=0)
        for each, engine in engines.items():
            seconds = times[each]
            rows.append(
                [
                    f"{load}: {LOADS[load]}",
                    each,
                    f"{engine.runner.cache_bytes / 1e6:.0f}",
                    f"{seconds.median:.2f} ({seconds.least:.2f}-{seconds.most:.2f})",
                    f"{times[OWN].median / seconds.median:.2f}",
                    f"{(preemptions(engine) - before[each]) / options.rounds:.0f}",
                ]
            )
    print(describe_machine())
    print(markdown_table(["load", "layout", "cache, MB", "seconds", "speed", "lost their slot"], rows))
