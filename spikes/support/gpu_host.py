# Frozen: runs at commit 84bfb74.
"""Part of spike 013 that asks whether the host keeps up: turns of the whole engine against its bare decode step."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np

from spikes.support.gpu_kernels import Table
from spikes.support.gpu_scale import Scale, milliseconds
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.decoder import parameter_shapes
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.runner.programs import decode_name
from xla_engine.sampling_params import SamplingParams

PROMPT = 16


def host(scale: Scale, rows: int) -> list[Table]:
    """Turns in which `rows` requests decode and nobody comes or goes, at lag 1 and 2, and the same program alone.

    The gap is what the device waits for per step. Time inside `start` near that of a step means that the host waits
    for the device where it should only dispatch.
    """
    turns, table = 5 * scale.calls, []
    for name, model in (("small model", scale.small), (f"{scale.few} layers", scale.shallow)):
        with _busy_engine(scale, model, rows) as engine:
            found = {lag: _turns(engine, lag, turns) for lag in (1, 2)}
            bare = _bare(scale, engine)
        for lag, (turn, start, cpu) in found.items():
            cells = [f"{ms:.3f}" for ms in (turn, bare, turn - bare, cpu, start)]
            table.append([name, str(rows), str(lag), *cells, f"{1e3 * rows / turn:.0f}"])
    header = ("model", "rows", "lag", "ms, start to start", "bare step", "gap", "host's CPU", "inside start",
              "tok/s")  # fmt: skip
    return [("Turns of the engine, ms, medians", header, table)]


def _busy_engine(scale: Scale, model: ModelConfig, rows: int) -> XlaBatchEngine:
    """An engine whose slots all decode."""
    config = EngineConfig(
        attention_backend="gpu",
        max_num_seqs=rows,
        max_model_len=1024 if scale.calls > 2 else 256,
        prefill_lanes=(8,),
        enable_prefix_caching=False,
        preemption=False,
        compile_cache=False,
        self_check=False,
    )
    engine = XlaBatchEngine(random_checkpoint(model, weights=_weights(model)), None, config)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=engine.max_model_len - PROMPT)
    draw = np.random.default_rng(0)
    for _ in range(rows):
        engine.submit(draw.integers(0, model.vocab_size, PROMPT).tolist(), params)
    while engine.num_waiting or engine.stats().prompt_tokens < PROMPT * rows:
        engine.step(only_finished=True)
    return engine


def _weights(model: ModelConfig) -> dict[str, Any]:
    """One block of random numbers over and over: billions of draws would take the host a minute."""
    block = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(ml_dtypes.bfloat16)
    return {
        name: np.resize(block, shape) if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in parameter_shapes(model).items()
    }


def _turns(engine: XlaBatchEngine, lag: int, turns: int) -> tuple[float, float, float]:
    """Median milliseconds from turn to turn, inside the runner's `start`, and of the thread's CPU in a turn."""
    engine.lag = lag
    runner: Any = engine.runner
    start, inside = runner.start, []

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = start(*arguments)
        inside.append(time.perf_counter() - began)
        return found

    for _ in range(4):
        engine.step(only_finished=True)
    began, spent = [time.perf_counter()], []
    runner.start = timed
    for _ in range(turns):
        cpu = time.thread_time()
        engine.step(only_finished=True)
        spent.append(time.thread_time() - cpu)
        began.append(time.perf_counter())
    del runner.start
    between = np.diff(began).tolist()
    turn, inside_start, cpu = (1e3 * statistics.median(each) for each in (between, inside, spent))
    return turn, inside_start, cpu


def _bare(scale: Scale, engine: XlaBatchEngine) -> float:
    """The engine's own decode program, of which nothing is read. The engine is of no use afterwards."""
    runner = engine.runner
    joined = runner._dispatch._rows
    assert joined is not None

    def run() -> jax.Array:
        return runner._dispatch.run(decode_name(runner.buckets[-1], joined.few), joined.work)[0]

    return milliseconds(scale, run)
