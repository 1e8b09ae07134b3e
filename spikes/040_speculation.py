# Frozen: runs at commit 7be6ccc.
"""What speculation gains, and what it costs where it gains nothing.

    python -m spikes.040_speculation --model embedded --batch 1 8 32
    python -m spikes.040_speculation --model smollm2 --batch 1 8 32      # random weights, recorded drafts only

Engines with and without speculation take turns in one process; each number is the best of `--rounds`, in tokens a
second from the first submit to the last token, as a ratio to the engine without. Results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from xla_engine.config import EngineConfig
from xla_engine.drafting.recorded import Recorded
from xla_engine.drafting.suffix import SuffixDrafter
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, random_weights
from xla_engine.sampling_params import SamplingParams

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
COUNTS = ("drafted", "accepted", "steps")
FUNCTION = """def clean_{0}(values, limit=10):
    \"\"\"Return the values below the limit, each once, in their order.\"\"\"
    seen = set()
    result = []
    for value in values:
        if value in seen or value >= limit:
            continue
        seen.add(value)
        result.append(value)
    return result


"""


def engine_of(model: str, config: EngineConfig) -> XlaBatchEngine:
    if model == "embedded":
        return XlaBatchEngine.from_pretrained(None, config)
    checkpoint = Checkpoint(
        path=Path(model),
        config=SMOLLM2,
        weights=random_weights(SMOLLM2, dtype="bfloat16", seed=1),
        eos_token_ids=(0,),
        bos_token_id=None,
        dtype="bfloat16",
        fingerprint="random",
    )
    return XlaBatchEngine(checkpoint, None, config)


def timed(
    engine: XlaBatchEngine, prompts: Sequence[Any], params: SamplingParams
) -> tuple[float, dict[str, Any]]:
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, replace(params, seed=number), request_id=str(number))
    found = {output.request_id: output.outputs[0] for output in engine.drain()}
    seconds = time.perf_counter() - began
    return sum(len(output.token_ids) for output in found.values()) / seconds, found


def milliseconds(costs: Mapping[Any, float]) -> str:
    return ", ".join(f"{key}: {seconds * 1e3:.2f}" for key, seconds in costs.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["embedded", "smollm2"], default="embedded")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--right", type=float, nargs="+", default=[0.8])
    options = parser.parse_args()
    print(jax.devices()[0].device_kind, jax.__version__)
    print("model batch workload | plain tok/s | speculation: ratio, drafted, accepted a step, bits")
    for batch in options.batch:
        base = EngineConfig(max_num_seqs=batch, max_model_len=512, enable_prefix_caching=False)
        fixed = {1: 7, 8: 3}.get(batch, 1)
        plain = engine_of(options.model, base)
        auto = engine_of(options.model, replace(base, speculative_config={"method": "suffix"}))
        wide = engine_of(
            options.model,
            replace(base, speculative_config={"method": "suffix", "num_speculative_tokens": fixed}),
        )
        costs = auto.runner.step_costs()
        print("isa", plain.runner.isa, "least ms of a decode step by rows", milliseconds(costs.decode))
        print("    of a verify step by (lanes, width)", milliseconds(costs.verify), flush=True)
        if options.model == "embedded":
            names = [
                f"{word}" for word in ("names", "ports", "keys", "paths", "words", "lines", "codes", "marks")
            ]
            edit = [
                FUNCTION.format(names[at % 8]) + f"def clean_{names[at % 8]}(values" for at in range(batch)
            ]
            free = ["def parse_header(line):\n    ", "class Counter:\n    ", "import os\n\n", '"""Return the']
            loads = {"edit T=0": (edit, 0.0), "free T=0.8": ([free[at % 4] for at in range(batch)], 0.8)}
        else:
            loads = {"noise T=1": ([[at + 5] * 16 for at in range(batch)], 1.0)}
        for load, (prompts, temperature) in loads.items():
            params = SamplingParams(
                temperature=temperature, max_tokens=options.tokens, ignore_eos=True, logprobs=0
            )
            _, expected = timed(plain, prompts, params)
            outputs = {name: output.token_ids for name, output in expected.items()}
            rows: list[tuple[str, XlaBatchEngine, Callable[[], Any]]] = [
                ("suffix auto", auto, SuffixDrafter),
                (f"suffix {fixed}", wide, SuffixDrafter),
                *(
                    (f"recorded {right} {fixed}", wide, partial(Recorded, outputs, right))
                    for right in options.right
                ),
                *(
                    (f"recorded {right} auto", auto, partial(Recorded, outputs, right))
                    for right in options.right
                ),
            ]
            best: dict[str, float] = {}
            for _ in range(options.rounds):
                gc.collect()
                speed, found = timed(plain, prompts, params)
                best["plain"] = max(best.get("plain", 0.0), speed)
                for name, engine, drafter in rows:
                    engine.draft_with(drafter())
                    before = engine.stats()
                    speed, found = timed(engine, prompts, params)
                    after = engine.stats()
                    drafted = after.drafted_tokens - before.drafted_tokens
                    accepted = after.accepted_tokens - before.accepted_tokens
                    best[name] = max(best.get(name, 0.0), speed)
                    best[f"{name}/drafted"], best[f"{name}/accepted"] = drafted, accepted
                    best[f"{name}/steps"] = after.steps - before.steps
                    assert found == expected, f"{name}: other bits"
            for name, _, _ in rows:
                ratio = best[name] / best["plain"]
                counts = ", ".join(f"{each} {best[f'{name}/{each}']:.0f}" for each in COUNTS)
                head = f"{options.model} B={batch} {load} | {best['plain']:.0f}"
                print(f"{head} | {name}: {ratio:.2f}x, {counts}", flush=True)
        for engine in (plain, auto, wide):
            engine.close()


if __name__ == "__main__":
    main()
