# Frozen: runs at commit 055c598.
"""What does each instruction set give, and what share of the machine's read limit?

    python -m spikes.038_isa

SmolLM2-135M's shape: decode steps with some rows live, and the prefill call of a lone prompt of 128 tokens, by every
instruction set of this machine and by pure JAX. The kernels alone: `native_kernels time` (tests/native_kernels.cc).
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import (
    SMOLLM2_135M,
    DecodeStep,
    describe_machine,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.bench.limits import core_count, read_bandwidth
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows, make_tables
from xla_engine.graphs.steps.prefill import prefill_chunk
from xla_engine.runner.native_library.build import register
from xla_engine.runner.native_library.instruction_sets import available
from xla_engine.runner.prefill_inputs import make_lanes
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=9)
arguments.add_argument("--isa", nargs="+", default=[*(each.name for each in available()), "none"])
arguments.add_argument("--live", type=int, nargs="+", default=[1, 2, 4, 8, 32])
arguments.add_argument("--quantized", action="store_true")
arguments.add_argument("--prefill", type=int, default=128, help="tokens of the lone prompt")
options = arguments.parse_known_args()[0]

CONFIG = dataclasses.replace(SMOLLM2_135M, max_position_embeddings=512)
POSITIONS, LENGTH, CHUNK, LANES = 512, 160, 32, 8
BF16 = jnp.dtype(jnp.bfloat16)


def spec_of(isa: str) -> ModelSpec:
    if isa == "none":
        return ModelSpec(CONFIG, BF16, XlaAttention(), quantized=options.quantized)
    register(isa)
    return ModelSpec(CONFIG, BF16, NativeAttention(isa), NativeProducts(isa), quantized=options.quantized)


SPECS = {isa: spec_of(isa) for isa in options.isa}
weights: Any = random_weights(next(iter(SPECS.values())))
megabytes = sum(leaf.nbytes for leaf in weights) / 1e6
limit = 1e9 * read_bandwidth(core_count())
print(describe_machine(), f"\n{megabytes:.0f} MB of weights, read limit {limit / 1e9:.1f} GB/s\n")


# %% Decode steps
def decode_steps() -> None:
    variants = {}
    for isa, spec in SPECS.items():
        for rows in {8 if live <= 8 else live for live in options.live}:
            keys = POSITIONS if spec.attention.bounded_by_length else 256
            step = DecodeStep(spec, weights, rows=rows, length=LENGTH, key_length=keys, positions=POSITIONS)

            def run(step: DecodeStep, scheduled: jax.Array) -> None:
                step.scheduled = scheduled
                step()

            for live in options.live:
                if (8 if live <= 8 else live) == rows:
                    mask = jax.device_put(np.arange(rows) < live)
                    variants[f"{isa} {live}"] = functools.partial(run, step, mask)
    times = interleave(variants, options.rounds)
    table = []
    for live in options.live:
        base = times[f"{options.isa[-1]} {live}"]
        for isa in options.isa:
            each = times[f"{isa} {live}"]
            share = megabytes * 1e6 / each.least / limit
            table.append(
                [
                    str(live),
                    isa,
                    each.milliseconds(),
                    f"{live / each.least:.0f}",
                    f"{base.least / each.least:.2f}",
                    f"{share:.2f}",
                ]
            )
    head = [
        "live rows",
        "isa",
        "ms a step",
        "tok/s, least ms",
        f"over {options.isa[-1]}",
        "of the read limit",
    ]
    print(markdown_table(head, table), "\n")


# %% A lone prompt
class Prefill:
    """The prefill program of eight lanes, with a cache of its own and one prompt in its first lanes."""

    def __init__(self, spec: ModelSpec) -> None:
        self.cache: Any = make_cache(spec, LANES, POSITIONS)
        rope = jax.device_put(rope_tables(CONFIG, POSITIONS))
        rows = make_rows(LANES, MAX_STOP_TOKEN_IDS, POSITIONS)
        tables = jax.device_put(make_tables(LANES, CONFIG.vocab_size))
        lane = np.arange(LANES, dtype=np.int32)
        count = np.clip(options.prefill - lane * CHUNK, 0, CHUNK).astype(np.int32)
        last = lane == -(-options.prefill // CHUNK) - 1
        draw = np.random.default_rng(0)
        self.lanes = jax.device_put(
            dataclasses.replace(
                make_lanes([], {}, LANES, CHUNK),
                tokens=draw.integers(0, CONFIG.vocab_size, (LANES, CHUNK)).astype(np.int32),
                slot=np.zeros(LANES, np.int32),
                start=lane * CHUNK,
                count=count,
                is_last=last,
                max_tokens=np.where(last, 2, 0).astype(np.int32),
            )
        )
        keys = POSITIONS if spec.attention.bounded_by_length else 256

        def call(weights: Any, cache: Any, lanes: Any) -> Any:
            cache, _, samples, *_ = prefill_chunk(spec, keys, 8, weights, rope, cache, rows, lanes, tables)
            return cache, samples

        self._call = jax.jit(call, donate_argnums=1)

    def __call__(self) -> None:
        self.cache, samples = self._call(weights, self.cache, self.lanes)
        samples.block_until_ready()


def prefill_calls() -> None:
    calls = {isa: Prefill(spec) for isa, spec in SPECS.items()}
    times = interleave(calls, options.rounds)
    base = times[options.isa[-1]]
    table = [[isa, times[isa].milliseconds(), f"{base.least / times[isa].least:.2f}"] for isa in options.isa]
    print(markdown_table(["isa", f"ms, {options.prefill} tokens", f"over {options.isa[-1]}"], table))


decode_steps()
prefill_calls()
