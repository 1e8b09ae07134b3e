# Measured at commit 97b4d149; runs at HEAD.
"""How fast does a model of SmolLM2-135M's shape decode with keys and values in eight bits, beside bfloat16?

    python -m spikes.067_int8_kv [--rows 8] [--context 4000] [--rounds 4]

Both engines are in one process; each reads its prompt, then they take turns of 24 decode steps.
"""

import argparse
import dataclasses
import json
import time

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.bench import models

TURN = 24


def started(checkpoint, kind, rows, context, tokens):
    """An engine whose rows have all read their prompt, and the prompt tokens per second of the first.

    All have the same prompt: the others copy its keys and values into slots of their own.
    """
    config = EngineConfig(
        max_num_seqs=rows, max_model_len=context + tokens, kv_cache_dtype=kind, self_check=False
    )
    engine = XlaBatchEngine(checkpoint, None, config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompt = [17 * place % 40000 + 9 for place in range(context)]
    begun = time.perf_counter()
    for row in range(rows):
        engine.submit(prompt, params)
        while not any(output.outputs[0].token_ids for output in engine.step()):
            pass
        if not row:
            rate = context / (time.perf_counter() - begun)
    assert engine.stats().cached_tokens >= (rows - 1) * (context - 64)
    return engine, rate


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    tokens = TURN * (options.rounds + 2) + 100
    model = dataclasses.replace(models.SMOLLM2_135M, max_position_embeddings=8192)
    checkpoint = random_checkpoint(model, dtype="bfloat16", seed=1)
    engines, report = {}, {"rows": options.rows, "context": options.context}
    for kind in ("auto", "int8"):
        engine, rate = started(checkpoint, kind, options.rows, options.context, tokens)
        engines[kind] = engine
        report[kind] = {
            "prefill": round(rate),
            "kv_bytes_per_token": engine.runner.kv_bytes_per_token,
            "decode": [],
        }
    for turn in range(options.rounds + 1):
        for kind, engine in engines.items():
            begun = time.perf_counter()
            for _ in range(TURN):
                engine.step()
            if turn:  # the first one is to warm up
                report[kind]["decode"].append(round(options.rows * TURN / (time.perf_counter() - begun), 1))
    report["ratios"] = [
        round(eight / sixteen, 3)
        for eight, sixteen in zip(report["int8"]["decode"], report["auto"]["decode"], strict=True)
    ]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
