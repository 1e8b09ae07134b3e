"""What a decode step of pure JAX costs by its key bucket; three buckets against as many as doubling makes.

python -m spikes.017_key_buckets --rows 32 --positions 2048
"""

# %%
from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from graphs.attention_xla import XlaAttention
from graphs.model import ModelSpec
from spikes.timing import (
    SMOLLM2_135M,
    DecodeStep,
    describe_machine,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.config import EngineConfig

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--rows", type=int, default=32)
arguments.add_argument("--positions", type=int, default=2048)
options = arguments.parse_known_args()[0]

DOUBLING = (*(256 << n for n in range(24) if 256 << n < options.positions), options.positions)
CHOSEN = EngineConfig().buckets(options.positions)
FORMS = {"each twice the one before": DOUBLING, "three": CHOSEN, "one": (options.positions,)}

# %%
spec = ModelSpec(SMOLLM2_135M, jnp.dtype(jnp.bfloat16), XlaAttention())
weights = random_weights(spec)
shared = spec.attention.make_cache(spec.config, options.rows, options.positions, spec.dtype)


def step_of(keys: int) -> Callable[[], jax.Array]:
    """One step over `keys` positions, in the one cache that all have in turn."""
    step = DecodeStep(
        spec,
        weights,
        rows=options.rows,
        length=keys - 1,
        key_length=keys,
        positions=options.positions,
        cache=shared,
    )

    def run() -> jax.Array:
        global shared
        step.cache = shared
        samples = jax.block_until_ready(step())
        shared = step.cache
        return samples

    return run


keys = sorted({*DOUBLING, *CHOSEN})
times = interleave({str(size): step_of(size) for size in keys}, options.rounds)
cost = {size: times[str(size)].median for size in keys}

# %%
print(describe_machine())
print(markdown_table(["keys", "ms"], [[size, times[size].milliseconds()] for size in times]))


def mean(buckets: Sequence[int], lengths: np.ndarray) -> float:
    """Milliseconds of a step, averaged over the longest row's length."""
    return float(np.mean([cost[next(size for size in buckets if size >= at)] for at in lengths])) * 1e3


lengths = np.arange(1, options.positions + 1)
falling = np.exp(np.linspace(np.log(64), np.log(options.positions), 4000))  # each doubling as likely
print(
    markdown_table(
        ["buckets", "every length as likely, ms", "every doubling from 64 as likely, ms"],
        [
            [name, f"{mean(sizes, lengths):.1f}", f"{mean(sizes, falling):.1f}"]
            for name, sizes in FORMS.items()
        ],
    )
)
