# Frozen: runs at commit a8802fc.
"""What is the host's time a step made of, and what do more steps ahead, or several in one program, gain?

python -m spikes.033_host_time host --model smollm2-135m --rows 32
python -m spikes.033_host_time ahead --model embedded --rows 8
python -m spikes.033_host_time buffers
"""

# %%
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.bench.models import find_model
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.row_state.rows import pack_rows, unpack_rows
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.runner.programs import decode_name
from xla_engine.sampling_params import SamplingParams

PROMPT = 16


def make_engine(model: str, rows: int, shapes: Path) -> XlaBatchEngine:
    config = EngineConfig(max_num_seqs=rows, max_model_len=512, enable_prefix_caching=False, self_check=False)
    if model == "embedded":
        return XlaBatchEngine.from_pretrained(config=config)
    return XlaBatchEngine(load_checkpoint(find_model(model, shapes), dtype="bfloat16"), None, config)


def submit(engine: XlaBatchEngine, tokens: int) -> None:
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for _ in range(engine.max_num_seqs):
        engine.submit([int(token) for token in draw.integers(10, 400, PROMPT)], params)


# %%
Spent = dict[str, list[tuple[float, float]]]  # verb to (wall, thread's CPU) seconds of each turn


def host(engine: XlaBatchEngine, turns: int) -> Spent:
    """The verbs of turns in which everybody decodes and nobody comes or goes."""
    spent: Spent = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            found = call(*arguments, **named)
            spent.setdefault(name, []).append((time.perf_counter() - wall, time.thread_time() - cpu))
            return found

        return run

    submit(engine, turns + 40)
    while engine.num_waiting or engine.stats().prompt_tokens < PROMPT * engine.max_num_seqs:
        engine.step(only_finished=True)
    for owner, verb in (
        (engine.scheduler, "plan"),
        (engine.runner._dispatch, "run"),
        (engine.runner, "start"),
        (engine.runner, "wait"),
        (engine.scheduler, "commit"),
        (engine, "_deliver"),
    ):
        setattr(owner, verb, timed(verb.lstrip("_"), getattr(owner, verb)))
    step = timed("turn", engine.step)
    for _ in range(turns):
        step(only_finished=True)
    return spent


# %%
def job(engine: XlaBatchEngine, lag: int, tokens: int) -> Callable[[], None]:
    def run() -> None:
        engine.lag = lag
        submit(engine, tokens)
        engine.drain()

    return run


def ahead(engine: XlaBatchEngine, tokens: int, block: int, rounds: int) -> list[list[str]]:
    """Whole jobs at several lags; and the bare step, one dispatch each or `block` in one program."""
    jobs = {f"engine, lag {lag}": job(engine, lag, tokens) for lag in (0, 1, 2, 4)}
    runner = engine.runner
    like = jax.eval_shape(runner._state.make_rows)
    keys = runner.buckets[0]
    scheduled = jnp.ones(engine.config.device_rows, bool)

    def one(weights: Any, rope: Any, cache: Any, state: Any, live: Any, tables: Any) -> Any:
        # Rows that never end, in the middle of the smallest bucket.
        rows = unpack_rows(state, like)
        rows = rows.__class__(
            **{name: getattr(rows, name) for name in rows.__dataclass_fields__}
            | {"remaining": jnp.full_like(rows.remaining, 9), "length": jnp.full_like(rows.length, 64)}
        )
        cache, rows, samples, _ = decode_step(runner._spec, keys, weights, rope, cache, rows, live, tables)
        return cache, pack_rows(rows), samples

    def many(weights: Any, rope: Any, cache: Any, state: Any, live: Any, tables: Any) -> Any:
        def body(index: Any, carry: Any) -> Any:
            cache, state, found = carry
            cache, state, samples = one(weights, rope, cache, state, live, tables)
            return cache, state, found.at[index].set(samples)

        found = jnp.zeros((block, 2, live.shape[0]), jnp.int32)
        return jax.lax.fori_loop(0, block, body, (cache, state, found))

    def bare(function: Callable[..., Any], calls: int) -> Callable[[], None]:
        held, tables = runner._state, runner._state.tables
        fixed = (runner._weights, runner._rope)
        program = (
            jax.jit(function, donate_argnums=(2, 3)).lower(*fixed, *held.held, scheduled, tables).compile()
        )

        def run() -> None:
            for _ in range(calls):
                held.cache, held.rows, samples = program(*fixed, *held.held, scheduled, tables)
            jax.block_until_ready(samples)

        return run

    jobs |= {"bare, a call a step": bare(one, tokens), f"bare, {block} a call": bare(many, tokens // block)}
    times = interleave(jobs, rounds, warm_up=1)
    base = {"engine": "engine, lag 1", "bare": "bare, a call a step"}
    found = []
    for name, taken in times.items():
        other = times[base[name.split(",")[0]]].seconds
        ratios = [b / a for a, b in zip(taken.seconds, other, strict=True)]
        ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        found.append([name, f"{1e3 * taken.median / tokens:.2f}", ratio])
    return found


# %%
def buffers(calls: int = 40) -> list[list[str]]:
    """Microseconds of the caller's CPU per call of a program that does next to nothing, by its buffers."""
    memory = np.ones(50_000_000, np.float32)  # read between calls, as a step reads the weights
    found = []
    for read, kept in ((0, 0), (60, 0), (180, 0), (0, 20), (0, 80), (182, 78), (182, 62), (182, 2)):

        def program(given: Any, state: Any, x: Any) -> Any:
            return [leaf.at[0].add(1.0) for leaf in state], x + 1.0

        given = [jnp.full(1024, float(index)) for index in range(read)]
        state = [jnp.full(1024, float(index)) for index in range(kept)]
        x = jnp.ones(8)
        compiled = jax.jit(program, donate_argnums=1, keep_unused=True).lower(given, state, x).compile()
        cells = []
        for flush in (False, True):
            spent = []
            for _ in range(calls):
                if flush:
                    memory.sum()
                began = time.thread_time()
                state, y = compiled(given, state, x)
                spent.append(time.thread_time() - began)
                y.block_until_ready()
            cells.append(f"{1e6 * statistics.median(spent):.0f}")
        found.append([str(read), str(kept), *cells])
    return found


# %%
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["host", "ahead", "buffers"])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", type=Path, default=Path(tempfile.gettempdir(), "xla-engine-shapes"))
    options = parser.parse_args()
    print(describe_machine())
    if options.question == "buffers":
        print(markdown_table(("read", "donated and returned", "us, warm", "us, caches cold"), buffers()))
        return
    with make_engine(options.model, options.rows, options.shapes) as engine:
        if options.question == "ahead":
            rows = ahead(engine, options.tokens, options.block, options.rounds)
            print(
                markdown_table((f"{options.model}, {options.rows} rows", "ms a step", "times as fast"), rows)
            )
            return
        leaves = jax.tree.leaves((engine.runner._weights, engine.runner._state.held))
        spent = host(engine, options.tokens)
        table = [
            [
                verb,
                *(f"{1e6 * statistics.median(pair[at] for pair in pairs):.0f}" for at in (0, 1)),
                f"{1e6 * statistics.mean(cpu for _, cpu in pairs):.0f}",
            ]
            for verb, pairs in spent.items()
        ]
        print(
            f"{len(leaves)} buffers of weights, cache and rows; program {decode_name(engine.runner.buckets[0])}"
        )
        head = (f"{options.model}, {options.rows} rows", "wall, us", "CPU, us", "CPU, mean, us")
        print(markdown_table(head, table))


if __name__ == "__main__":
    main()
