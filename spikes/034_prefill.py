# Frozen: runs at commit 84bfb74.
"""Where does the time of a prefill call go, and what do prompts that share calls cost?

    python -m spikes.034_prefill

Products on matrix tiles by the way their data come and go (`034_tiles.cc`), parts of a prefill call, and whole jobs of
waiting prompts, all on SmolLM2-135M's shape.
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table, random_weights
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import compiler
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.kv_cache.cache import make_cache, places
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Norm
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.graphs.row_state.rows import make_rows, make_tables
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.runner.native_library.build import register
from xla_engine.runner.prefill_inputs import make_lanes
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=9)
arguments.add_argument(
    "--lanes", type=int, nargs="*", default=[8, 16], help="of 32 tokens, in a call; none: no parts"
)
arguments.add_argument("--no-tiles", action="store_true")
arguments.add_argument("--no-jobs", action="store_true")
options = arguments.parse_known_args()[0]

ISA = register()
CONFIG = dataclasses.replace(SMOLLM2_135M, max_position_embeddings=512)
SPEC = ModelSpec(CONFIG, jnp.dtype(jnp.bfloat16), NativeAttention(ISA), NativeProducts(ISA))
PRODUCTS = SPEC.products
assert PRODUCTS is not None
POSITIONS, SLOTS, CHUNK, PROMPT = 512, 16, 32, 128
print(describe_machine(), "\n")


# %% What products reach
def tiles(rows: int, threads: int) -> list[list[str]]:
    """Rows of a table: a form of the products and its GFLOP/s."""
    with tempfile.TemporaryDirectory() as directory:
        program = Path(directory) / "tiles"
        source = Path(__file__).with_suffix("").with_name("034_tiles.cc")
        subprocess.run(
            [compiler(), "-std=c++17", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)],
            check=True,
        )
        done = subprocess.run(
            [str(program), str(threads), str(rows), str(options.rounds)],
            check=True,
            capture_output=True,
            text=True,
        )
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    limit = float(lines[0][1])
    return [[name, median, f"{float(median) / limit:.0%}"] for name, _, median in lines]


if not options.no_tiles:
    table = tiles(256, len(os.sched_getaffinity(0)))
    print(markdown_table(["256 rows", "GFLOP/s", "of the tiles alone"], table), "\n")


# %% Parts of a call
def lanes_of(count: int) -> Lanes:
    """A full call: prompts of 128 tokens in chunks of 32, each prompt in a slot of its own."""
    lane = np.arange(count, dtype=np.int32)
    per_prompt = PROMPT // CHUNK
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (count, CHUNK)).astype(np.int32)
    last = lane % per_prompt == per_prompt - 1
    return jax.device_put(
        dataclasses.replace(
            make_lanes([], {}, count, CHUNK),
            tokens=tokens,
            slot=lane // per_prompt,
            start=lane % per_prompt * CHUNK,
            count=np.full(count, CHUNK, np.int32),
            is_last=last,
            max_tokens=np.where(last, 2, 0).astype(np.int32),
        )
    )


class Parts:
    """Programs over one call's rows: each takes weights, hidden rows and the cache, which it gives back."""

    def __init__(self, weights: list[jax.Array], lanes: int) -> None:
        self.weights, self.lanes, self.count = weights, lanes_of(lanes), lanes
        rows = lanes * CHUNK
        self.cache: Any = make_cache(SPEC, SLOTS, POSITIONS)
        self.rows = make_rows(SLOTS, MAX_STOP_TOKEN_IDS, POSITIONS)
        self.tables = jax.device_put(make_tables(SLOTS, CONFIG.vocab_size))
        self.rope = jax.device_put(rope_tables(CONFIG, POSITIONS))
        rng = np.random.default_rng(1)
        self.hidden = jax.device_put(rng.standard_normal((rows, CONFIG.hidden_size), np.float32))
        self.inner = jax.device_put(
            rng.standard_normal((rows, CONFIG.intermediate_size), np.float32).astype(SPEC.dtype)
        )

    def programs(self) -> dict[str, Callable[[], None]]:
        norm = functools.partial(Norm, eps=CONFIG.rms_norm_eps)

        def call(weights: Any, cache: Any, x: jax.Array) -> Any:
            head_rows = max(self.count, 8)
            cache, _, samples, *_ = prefill_chunk(
                SPEC, POSITIONS, head_rows, weights, self.rope, cache, self.rows, self.lanes, self.tables
            )
            return cache, samples

        def layers(weights: Any, cache: Any, x: jax.Array) -> Any:
            updated, where = list(cache), places(SPEC)
            angles = self.rope[0, self.lanes.start[:, None] + jnp.arange(CHUNK)]

            def attend(index: int, qkv: jax.Array, own: AttentionWeights) -> jax.Array:
                store, layer_in_store = where[index]
                own_call = CONFIG.attention(index), own, angles, POSITIONS, SPEC.dtype
                updated[store], out = SPEC.attention.attend_prefill(
                    updated[store],
                    qkv,
                    AttentionCall(*own_call, layer_in_store=layer_in_store),
                    Extents(self.lanes.slot, self.lanes.start, self.lanes.count),
                )
                return out

            hidden = SPEC.merge(weights).hidden(self.lanes.tokens.reshape(-1), attend, PRODUCTS)
            return updated, hidden

        def without_attention(weights: Any, cache: Any, x: jax.Array) -> Any:
            def attend(index: int, qkv: jax.Array, own: AttentionWeights) -> jax.Array:
                return qkv[:, : CONFIG.num_attention_heads * CONFIG.head_dim].astype(SPEC.dtype)

            return cache, SPEC.merge(weights).hidden(self.lanes.tokens.reshape(-1), attend, PRODUCTS)

        def mlp(weights: Any, cache: Any, x: jax.Array) -> Any:
            for layer in SPEC.merge(weights).layers:
                inner = PRODUCTS.gated(layer.gate_up[...], x, norm=norm(layer.pre_feedforward_norm[...]))
                x = PRODUCTS.linear(layer.down[...], inner, residual=x)
            return cache, x

        def down(weights: Any, cache: Any, x: jax.Array) -> Any:
            for layer in SPEC.merge(weights).layers:
                x = PRODUCTS.linear(layer.down[...], self.inner, residual=x)
            return cache, x

        def output(weights: Any, cache: Any, x: jax.Array) -> Any:
            inner = self.inner[:, : CONFIG.hidden_size]
            for layer in SPEC.merge(weights).layers:
                x = PRODUCTS.linear(layer.output[...], inner, residual=x)
            return cache, x

        def head(weights: Any, cache: Any, x: jax.Array) -> Any:
            return cache, SPEC.merge(weights).logits(x[: max(self.count, 8)], PRODUCTS)

        parts = (call, layers, without_attention, mlp, down, output, head)
        return {part.__name__: self._compiled(part) for part in parts}

    def _compiled(self, part: Callable[..., Any]) -> Callable[[], None]:
        lowered = jax.jit(part, donate_argnums=1, keep_unused=True).lower(
            self.weights, self.cache, self.hidden
        )
        compiled = lowered.compile()

        def run() -> None:
            self.cache, out = compiled(self.weights, self.cache, self.hidden)
            out.block_until_ready()

        return run


def attributed(ms: dict[str, float]) -> dict[str, float]:
    """Milliseconds of each part, from programs that differ by it."""
    return {
        "q, k and v": ms["without_attention"] - ms["mlp"] - ms["output"],
        "attention with rotation and write": ms["layers"] - ms["without_attention"],
        "output": ms["output"],
        "gates and ups": ms["mlp"] - ms["down"],
        "down": ms["down"],
        "head": ms["head"],
        "sampler, row state, embedding": ms["call"] - ms["layers"] - ms["head"],
    }


def gflop(rows: int) -> dict[str, float]:
    d, inner, heads = (
        CONFIG.hidden_size,
        CONFIG.intermediate_size,
        CONFIG.num_attention_heads * CONFIG.head_dim,
    )
    each = {
        "q, k and v": CONFIG.qkv_features * d,
        "output": heads * d,
        "gates and ups": 2 * inner * d,
        "down": inner * d,
    }
    return {name: 2e-9 * rows * CONFIG.num_hidden_layers * weights for name, weights in each.items()}


if options.lanes:
    weights = random_weights(SPEC)
    programs = {
        (lanes, name): run
        for lanes in options.lanes
        for name, run in Parts(weights, lanes).programs().items()
    }
    times = interleave({f"{lanes} {name}": run for (lanes, name), run in programs.items()}, options.rounds)
    for lanes in options.lanes:
        medians = {name: 1e3 * times[f"{at} {name}"].median for at, name in programs if at == lanes}
        work = gflop(lanes * CHUNK)
        rows = [
            [
                name,
                f"{ms:.1f}",
                f"{ms / medians['call']:.0%}",
                f"{1e3 * work[name] / ms:.0f}" if name in work else "",
            ]
            for name, ms in attributed(medians).items()
        ]
        whole = times[f"{lanes} call"]
        rows.append(["whole call", whole.milliseconds(), f"{lanes * CHUNK / whole.median:.0f} tok/s", ""])
        print(markdown_table([f"{lanes * CHUNK} rows", "ms", "share", "GFLOP/s"], rows), "\n")
    del programs, weights

# %% Jobs of waiting prompts, one new token each, through the engine
JOBS = [(1, 16), (4, 16), (8, 16), (1, 128), (2, 128), (4, 128), (8, 128), (32, 128)]

if not options.no_jobs:
    engine_config = EngineConfig(max_num_seqs=32, max_model_len=256, enable_prefix_caching=False)
    with XlaBatchEngine(random_checkpoint(CONFIG), None, engine_config) as engine:
        rng = np.random.default_rng(2)

        def job(prompts: int, length: int) -> float:
            tokens = rng.integers(0, CONFIG.vocab_size, (prompts, length)).tolist()
            began = time.perf_counter()
            for prompt in tokens:
                engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            list(engine.drain())
            return time.perf_counter() - began

        seconds: dict[tuple[int, int], list[float]] = {each: [] for each in JOBS}
        for turn in range(options.rounds + 1):
            for each in JOBS if turn % 2 else reversed(JOBS):
                taken = job(*each)
                if turn:
                    seconds[each].append(taken)
    table = []
    for (prompts, length), found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds[1, length], strict=True))
        middle = statistics.median(found)
        table.append(
            [
                str(prompts),
                str(length),
                f"{1e3 * middle:.1f}",
                f"{ratio:.2f}",
                f"{prompts * length / middle:.0f}",
            ]
        )
    print(markdown_table(["prompts", "tokens of each", "ms", "over one prompt", "tok/s"], table))
