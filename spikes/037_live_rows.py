# Frozen: runs at commit 055c598.
"""What do rows cost that are not live, and what would one call for prompts and decoding rows save?

    python -m spikes.037_live_rows

SmolLM2-135M's shape: decode steps in which some rows are live, prefill calls that are not full, lone prompts through
the engine. "every row" are the same products told that all rows are live.
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Self
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import (
    SMOLLM2_135M,
    DecodeStep,
    Times,
    describe_machine,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.bench.workloads import Sizes, ragged
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.attention.backend import whole_spans
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows, make_tables
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.runner import backends
from xla_engine.runner.native_library.build import register
from xla_engine.runner.prefill_inputs import make_lanes
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=15)
arguments.add_argument("--only", nargs="*", default=["decode", "prefill", "mixed", "jobs", "ragged"])
arguments.add_argument("--forms", type=int, default=2, help="of the ragged job: own slots, pages")
arguments.add_argument("--requests", type=int, default=64, help="of the ragged job")
options = arguments.parse_known_args()[0]

ISA = register()


class EveryRow(NativeProducts):
    """Products that multiply all rows."""

    def for_rows(self, live: jax.Array) -> Self:
        return self


CONFIG = dataclasses.replace(SMOLLM2_135M, max_position_embeddings=512)
POSITIONS, ROWS, CHUNK, LENGTH = 512, 32, 32, 160
SPECS = {
    name: ModelSpec(CONFIG, jnp.dtype(jnp.bfloat16), NativeAttention(ISA), products)
    for name, products in (("every row", EveryRow(ISA)), ("live rows", NativeProducts(ISA)))
}
print(describe_machine(), "\n")


def ratio(before: Times, after: Times) -> str:
    """`median (least-most)` of the rounds' ratios."""
    each = sorted(a / b for a, b in zip(before.seconds, after.seconds, strict=True))
    return f"{statistics.median(each):.2f} ({each[0]:.2f}-{each[-1]:.2f})"


# %% Decode steps
def spread(count: int) -> np.ndarray:
    """`count` live rows among all, drawn."""
    live = np.zeros(ROWS, bool)
    live[np.random.default_rng(count).choice(ROWS, count, replace=False)] = True
    return live


def decode_steps(weights: Any) -> None:
    counts = (1, 4, 8, 13, 16, 17, 32)
    shape = {"rows": ROWS, "length": LENGTH, "key_length": POSITIONS, "positions": POSITIONS}
    steps = {name: DecodeStep(spec, weights, **shape) for name, spec in SPECS.items()}

    def run(name: str, scheduled: jax.Array) -> None:
        steps[name].scheduled = scheduled
        steps[name]()

    variants = {
        f"{name} {count}": functools.partial(run, name, jax.device_put(spread(count)))
        for count in counts
        for name in SPECS
    }
    times = interleave(variants, options.rounds)
    table = []
    for count in counts:
        before, after = (times[f"{name} {count}"] for name in SPECS)
        table.append([str(count), before.milliseconds(), after.milliseconds(), ratio(before, after)])
    print(markdown_table([f"live of {ROWS}", *SPECS, "ratio"], table), "\n")


# %% Prefill calls
def lanes_of(lanes: int, tokens: int, decoding: int = 0) -> Lanes:
    """One prompt after another of at most 128 tokens in chunks, then `decoding` lanes of one token each."""
    lane = np.arange(lanes, dtype=np.int32)
    count = np.clip(tokens - lane * CHUNK, 0, CHUNK).astype(np.int32)
    chunks = -(-tokens // CHUNK)
    last = (count > 0) & ((lane % 4 == 3) | (lane == chunks - 1))
    slot, start = lane // 4, lane % 4 * CHUNK
    rides = (lane >= chunks) & (lane < chunks + decoding)
    draw = np.random.default_rng(0)
    return jax.device_put(
        dataclasses.replace(
            make_lanes([], {}, lanes, CHUNK),
            tokens=draw.integers(0, CONFIG.vocab_size, (lanes, CHUNK)).astype(np.int32),
            slot=np.where(rides, 8 + lane - chunks, slot).astype(np.int32),
            start=np.where(rides, LENGTH, start).astype(np.int32),
            count=np.where(rides, 1, count).astype(np.int32),
            is_last=last | rides,
            max_tokens=np.where(last | rides, 2, 0).astype(np.int32),
        )
    )


class Calls:
    """The prefill program of so many lanes, with a cache of its own."""

    def __init__(self, spec: ModelSpec, weights: Any, lanes: int) -> None:
        self.weights, self.lanes = weights, lanes
        self.cache: Any = make_cache(spec, ROWS, POSITIONS)
        rope = jax.device_put(rope_tables(CONFIG, POSITIONS))
        rows = make_rows(ROWS, MAX_STOP_TOKEN_IDS, POSITIONS)
        tables = jax.device_put(make_tables(ROWS, CONFIG.vocab_size))

        def call(weights: Any, cache: Any, lanes_: Lanes) -> Any:
            cache, _, samples, *_ = prefill_chunk(
                spec, POSITIONS, max(lanes, 8), weights, rope, cache, rows, lanes_, tables
            )
            return cache, samples

        jitted = jax.jit(call, donate_argnums=1)
        self._compiled = jitted.lower(weights, self.cache, lanes_of(lanes, 0)).compile()

    def variant(self, tokens: int, decoding: int = 0) -> Callable[[], None]:
        work = lanes_of(self.lanes, tokens, decoding)

        def run() -> None:
            self.cache, samples = self._compiled(self.weights, self.cache, work)
            samples.block_until_ready()

        return run


def prefill_calls(weights: Any) -> None:
    every, live = SPECS.values()
    calls = {
        "every row, 2 lanes": Calls(every, weights, 2),
        "every row, 8 lanes": Calls(every, weights, 8),
        "live rows, 2 lanes": Calls(live, weights, 2),
        "live rows, 8 lanes": Calls(live, weights, 8),
        "live rows, 16 lanes": Calls(live, weights, 16),
    }
    sizes = (16, 32, 64, 100, 128, 192, 256, 512)
    variants = {
        f"{name} {tokens}": call.variant(tokens)
        for tokens in sizes
        for name, call in calls.items()
        if tokens <= call.lanes * CHUNK
    }
    times = interleave(variants, options.rounds)
    table = []
    for tokens in sizes:
        found = [times.get(f"{name} {tokens}") for name in calls]
        before, after = found[0] or found[1], found[2] or found[3]
        last = "" if before is None or after is None else ratio(before, after)
        table.append([str(tokens), *("" if each is None else each.milliseconds() for each in found), last])
    print(markdown_table(["tokens", *calls, "smallest with every row / with live rows"], table), "\n")


# %% One call for both
def mixed_calls(weights: Any) -> None:
    """Rows that decode as lanes of one token, beside the two calls that are run today."""
    live = SPECS["live rows"]
    prompts, both = Calls(live, weights, 8), Calls(live, weights, 16)
    step = DecodeStep(live, weights, rows=ROWS, length=LENGTH, key_length=POSITIONS, positions=POSITIONS)
    step.scheduled = jax.device_put(np.arange(ROWS) < 7)

    def in_turn(first: Callable[[], None]) -> None:
        first()
        step()

    variants: dict[str, Callable[[], object]] = {"decode alone": step}
    sizes = (16, 64, 128, 256)
    for tokens in sizes:
        alone = prompts.variant(tokens)
        variants[f"prefill {tokens}"] = alone
        variants[f"two calls {tokens}"] = functools.partial(in_turn, alone)
        variants[f"one call {tokens}"] = both.variant(tokens, decoding=7)
    times = interleave(variants, options.rounds)
    names = ("prefill", "two calls", "one call")
    table = []
    for tokens in sizes:
        found = [times[f"{name} {tokens}"] for name in names]
        table.append([str(tokens), *(each.milliseconds() for each in found), ratio(found[1], found[2])])
    print("decode alone:", times["decode alone"].milliseconds(), "\n")
    print(markdown_table(["tokens, beside 7 rows", *names, "two / one"], table), "\n")


# %% Jobs through the engine
def started(model: ModelConfig, config: EngineConfig) -> dict[str, XlaBatchEngine]:
    """An engine that multiplies every row, and one that multiplies live rows."""
    checkpoint = random_checkpoint(model)
    with mock.patch.object(backends, "NativeProducts", EveryRow):
        before = XlaBatchEngine(checkpoint, None, config)
    return {"every row": before, "live rows": XlaBatchEngine(checkpoint, None, config)}


def run(engine: XlaBatchEngine, prompts: Any, new: Sequence[int]) -> None:
    for prompt, count in zip(prompts, new, strict=True):
        engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
    list(engine.drain())


def jobs() -> None:
    config = EngineConfig(max_num_seqs=ROWS, max_model_len=256, enable_prefix_caching=False, self_check=False)
    engines = started(CONFIG, config)
    sizes = [
        (1, 16, 1),
        (1, 64, 1),
        (1, 100, 1),
        (1, 128, 1),
        (8, 16, 1),
        (32, 128, 1),
        (1, 16, 40),
        (8, 16, 40),
    ]
    rng = np.random.default_rng(2)

    variants = {}
    for count, length, new in sizes:
        prompts = rng.integers(0, CONFIG.vocab_size, (count, length)).tolist()
        for name, engine in engines.items():
            variants[f"{name} {count} {length} {new}"] = functools.partial(
                run, engine, prompts, [new] * count
            )
    times = interleave(variants, min(options.rounds, 7))
    table = []
    for size in sizes:
        label = " ".join(map(str, size))
        found = [times[f"{name} {label}"] for name in engines]
        table.append([*map(str, size), *(each.milliseconds() for each in found), ratio(*found)])
    print(markdown_table(["prompts", "tokens of each", "new", *engines, "ratio"], table))
    for engine in engines.values():
        engine.close()


# %% The ragged job of the benchmark
def ragged_job() -> None:
    work = ragged(Sizes(batch=8, vocab_size=CONFIG.vocab_size))
    prompts, new = work.prompts[: options.requests], work.max_tokens[: options.requests]
    model = dataclasses.replace(CONFIG, max_position_embeddings=2048)
    own = EngineConfig(
        max_num_seqs=8, max_model_len=work.longest, enable_prefix_caching=False, self_check=False
    )
    blocks = 8 * -(-whole_spans(work.longest) // own.block_size)
    pages = dataclasses.replace(own, max_num_seqs=32, num_blocks=blocks)
    table = []
    for name, config in (("8 slots", own), ("32 slots over their pages", pages))[: options.forms]:
        engines = started(model, config)
        both = {}
        for which, engine in engines.items():
            plans = []
            engine.on_step = lambda plan, events, plans=plans: plans.append(plan) if events is None else None
            run(engine, prompts, new)
            engine.on_step = None
            both[which] = sum(bool(plan.chunks and plan.decode) for plan in plans), len(plans)
        variants = {which: functools.partial(run, engine, prompts, new) for which, engine in engines.items()}
        times = interleave(variants, 2, warm_up=0)
        for engine in engines.values():
            engine.close()
        found = [times[which] for which in engines]
        rates = [f"{sum(new) / each.median:.0f}" for each in found]
        table.append([name, *rates, ratio(*found), "{} of {}".format(*both["live rows"])])
    head = ["ragged", *(f"{which}, tok/s" for which in SPECS), "ratio", "steps that prefill and decode"]
    print(markdown_table(head, table), "\n")


if set(options.only) - {"jobs", "ragged"}:
    weights = random_weights(SPECS["live rows"])
    for name, part in (("decode", decode_steps), ("prefill", prefill_calls), ("mixed", mixed_calls)):
        if name in options.only:
            part(weights)
    del weights
if "jobs" in options.only:
    jobs()
if "ragged" in options.only:
    ragged_job()
