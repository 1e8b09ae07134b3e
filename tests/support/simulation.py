"""A run to simulate, and the assumed costs of its steps."""

from __future__ import annotations

import random
from pathlib import Path

from xla_engine import SamplingParams
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.observability.step_log_writer import logging_steps
from xla_engine.tools.simulator.cost import CostModel

COST = CostModel(
    call={2: 8e-4, 8: 2e-3},
    prompt_token=4e-6,
    prefill_key=3e-7,
    decode=9e-4,
    row=3e-5,
    key=2e-7,
    turn=2e-4,
    token=5e-6,
    end=2e-5,
    start_call=1e-4,
    submit=3e-5,
)


def record(engine: XlaBatchEngine, path: Path, *, seed: int, lag: int = 1, longest: int = 200) -> None:
    """A run of every kind of end: caps, stop ids, stop strings, aborts; priorities, prompts that begin alike, arrivals
    in the middle. Prompts have at most 150 tokens and `longest` more."""
    draw = random.Random(seed)
    engine.lag = lag
    vocabulary = engine.checkpoint.config.vocab_size
    stem = [draw.randrange(vocabulary) for _ in range(150)]
    with logging_steps(engine, path):
        for index in range(60):
            stops = [draw.randrange(vocabulary) for _ in range(6)] if index % 3 == 0 else []
            engine.submit(
                stem[: draw.choice((0, 0, 70, 150))]
                + [draw.randrange(vocabulary) for _ in range(draw.choice((1, 3, 20, 70, longest)))],
                SamplingParams(
                    temperature=1.0,
                    seed=index,
                    max_tokens=draw.choice((1, 2, 3, 9, 40)),
                    stop_token_ids=stops,
                    stop=["e"] if index % 7 == 1 and engine.tokenizer is not None else [],
                ),
                request_id=f"r{index}",
                priority=draw.choice((-1, 0, 0, 0, 2)),
            )
            for _ in range(draw.choice((0, 0, 1, 3))):
                engine.step()
            if index % 9 == 4:
                engine.abort(f"r{draw.randrange(index)}")
        engine.drain()
    engine.lag = engine.config.lag
