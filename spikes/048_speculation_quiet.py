# Frozen: runs at commit 84bfb74.
"""Speculation's numbers, all in one command, for an idle machine: under eight minutes on two cores.

    python -m spikes.048_speculation_quiet                       # everything
    python -m spikes.048_speculation_quiet --only host json edit free
    python -m spikes.048_speculation_quiet --only smollm2 qwen3 --right 0.8

Engines with and without speculation take turns in one process, and a ratio is between the fastest of `--rounds` each;
results are compared bit for bit. One pair of engines of 32 slots serves every number of rows: what the C++ operations
compute are live rows.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from xla_engine.config import EngineConfig
from xla_engine.drafting.drafter import Drafter
from xla_engine.drafting.recorded import Recorded
from xla_engine.drafting.suffix import SuffixDrafter
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, random_weights
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams

SHAPES = {
    "smollm2": ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "qwen3": ModelConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        qk_norm="head",
    ),
}
BASE = EngineConfig(max_num_seqs=32, max_model_len=512, prefill_lanes=(8,), enable_prefix_caching=False)
AUTO: dict[str, Any] = {"method": "suffix"}
WIDTH = 7
MODULES = (
    "textwrap",
    "bisect",
    "heapq",
    "shlex",
    "fnmatch",
    "posixpath",
    "string",
    "keyword",
    "colorsys",
    "calendar",
)
FREE = [
    "def parse_header(line):\n    ",
    "class Counter:\n    ",
    "import os\n\n",
    '"""Return the',
    "for name in ",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "last_name": {"type": "string", "maxLength": 8},
        "is_active": {"type": "boolean"},
        "department": {"type": "string", "maxLength": 8},
    },
    "required": ["first_name", "last_name", "is_active", "department"],
    "additionalProperties": False,
}

Outputs = dict[str, Any]


def timed(engine: XlaBatchEngine, prompts: Sequence[Any], params: SamplingParams) -> tuple[float, Outputs]:
    """Tokens a second from the first submit to the last token, and the results."""
    gc.collect()
    began = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, replace(params, seed=number), request_id=str(number))
    found = {output.request_id: output.outputs[0] for output in engine.drain()}
    seconds = time.perf_counter() - began
    return sum(len(output.token_ids) for output in found.values()) / seconds, found


def in_turns(
    name: str,
    plain: XlaBatchEngine,
    other: XlaBatchEngine,
    drafter: Callable[[Outputs], Drafter],
    prompts: Sequence[Any],
    params: SamplingParams,
    rounds: int,
) -> None:
    """Time both in turns and print a line."""
    _, expected = timed(plain, prompts, params)
    speeds: dict[str, list[float]] = {"plain": [], "other": []}
    for _ in range(rounds):
        speeds["plain"].append(timed(plain, prompts, params)[0])
        other.draft_with(drafter(expected))
        before = other.stats()
        speed, found = timed(other, prompts, params)
        after = other.stats()
        speeds["other"].append(speed)
        assert found == expected, f"{name}: other bits"
    steps, drafted, accepted = (
        getattr(after, field) - getattr(before, field)
        for field in ("steps", "drafted_tokens", "accepted_tokens")
    )
    ratios = [new / old for old, new in zip(*speeds.values(), strict=True)]
    print(
        f"{name} | {max(speeds['other']) / max(speeds['plain']):.2f} (each round "
        f"{', '.join(f'{ratio:.2f}' for ratio in ratios)}) | plain {max(speeds['plain']):.0f} tokens/s | "
        f"{steps} steps, {accepted} of {drafted} drafts right | bits the same",
        flush=True,
    )


def shape(name: str, right: float, tokens: int, rounds: int) -> None:
    """Corrupted oracle on random weights of a shape."""
    config = SHAPES[name]
    checkpoint = Checkpoint(
        path=Path(name),
        config=config,
        weights=random_weights(config, dtype="bfloat16", seed=1),
        eos_token_ids=(0,),
        bos_token_id=None,
        dtype="bfloat16",
        fingerprint="random",
    )
    speculating = replace(BASE, speculative_config=AUTO)
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    drafter = partial(oracle, right)
    with (
        XlaBatchEngine(checkpoint, None, BASE) as plain,
        XlaBatchEngine(checkpoint, None, speculating) as other,
    ):
        print_costs(name, other)
        for batch in (1, 8, 32):
            prompts = [[at + 5] * 16 for at in range(batch)]
            in_turns(f"{name}, oracle {right}, B = {batch}", plain, other, drafter, prompts, params, rounds)


def oracle(right: float, outputs: Outputs) -> Drafter:
    return Recorded({name: output.token_ids for name, output in outputs.items()}, right)


def suffix(_: Outputs) -> Drafter:
    return SuffixDrafter()


def print_costs(name: str, engine: XlaBatchEngine) -> None:
    costs = engine.runner.step_costs()
    for kind, found in (("decode by rows", costs.decode), ("verify by (lanes, width)", costs.verify)):
        print(name, kind, {key: f"{1e3 * seconds:.2f} ms" for key, seconds in found.items()}, flush=True)


def tokens_a_step(prompt: Sequence[int], output: Sequence[int]) -> float:
    """What look-up of width `WIDTH` brings, if every step knew all before it."""
    drafter, at, steps = SuffixDrafter(), 0, 0
    drafter.begin("a", prompt, "")
    while at < len(output):
        ahead = drafter.propose("a", WIDTH).tokens
        right = next(
            (n for n, (x, y) in enumerate(zip(ahead, output[at:], strict=False)) if x != y), len(ahead)
        )
        new = output[at : at + right + 1]
        drafter.extend("a", new)
        at, steps = at + len(new), steps + 1
    return len(output) / steps


def functions(engine: XlaBatchEngine) -> list[str]:
    """A function of the standard library, and its first line again."""
    assert engine.tokenizer is not None
    found = []
    for module in map(import_module, MODULES):
        for _, function in inspect.getmembers(module, inspect.isfunction):
            try:
                source = inspect.getsource(function)
            except OSError:  # it was made, not written
                continue
            if function.__module__ != module.__name__:
                continue
            prompt = f"{source}\n\n{source.splitlines()[0]}\n"
            if 40 < len(engine.tokenizer.encode(prompt)) < 380:
                found.append(prompt)
    return found


def edit(plain: XlaBatchEngine, other: XlaBatchEngine, rounds: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True, logprobs=0)
    prompts = functions(plain)[:48]
    fitting = []
    assert plain.tokenizer is not None
    _, outputs = timed(plain, prompts, params)
    for number, prompt in enumerate(prompts):
        if tokens_a_step(plain.tokenizer.encode(prompt), outputs[str(number)].token_ids) >= 2.5:
            fitting.append(prompt)
    enough = f"{len(fitting)} of {len(prompts)} requests"
    print(f"edit: look-up of width {WIDTH} can find 2.5 tokens a step or more in {enough}", flush=True)
    if not fitting:
        return
    for batch in (1, 8):
        chosen = [fitting[at % len(fitting)] for at in range(batch)]
        in_turns(f"edit, T = 0, B = {batch}", plain, other, suffix, chosen, params, rounds)


def free(plain: XlaBatchEngine, other: XlaBatchEngine, rounds: int) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=192, ignore_eos=True, logprobs=0)
    for batch in (1, 8, 32):
        prompts = [FREE[at % len(FREE)] for at in range(batch)]
        in_turns(f"free, T = 0.8, B = {batch}", plain, other, suffix, prompts, params, rounds)


def json_steps() -> None:
    """Steps of requests with a schema of fixed keys, in four slots."""
    constraint = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    found, steps = [], []
    for options in (None, {"method": "suffix", "num_speculative_tokens": WIDTH}):
        config = replace(BASE, max_num_seqs=4, max_model_len=256, speculative_config=options)
        with XlaBatchEngine.from_pretrained(None, config) as engine:
            for seed in range(8):
                params = SamplingParams(
                    max_tokens=120, temperature=0.8, seed=seed, logprobs=1, structured_outputs=constraint
                )
                engine.submit("x = ", params, request_id=str(seed))
            found.append({output.request_id: output.outputs for output in engine.drain()})
            steps.append(engine.stats().steps)
    assert found[0] == found[1], "JSON: other bits"
    print(
        f"JSON by schema | {steps[0] / steps[1]:.2f} times fewer steps ({steps[0]}, {steps[1]}) | bits the same"
    )


def host_cost() -> None:
    """Milliseconds of the host in a step: eight rows of 2,000 tokens are told two more each, and propose."""
    drafter = SuffixDrafter()
    words = [hash((at * 7919) % 501) % 997 for at in range(2400)]
    for row in range(8):
        drafter.begin(str(row), [(word + row) % 997 for word in words[:2000]], "")
    took = []
    for step in range(200):
        began = time.perf_counter()
        for row in range(8):
            drafter.extend(
                str(row), [(word + row) % 997 for word in words[2000 + 2 * step : 2002 + 2 * step]]
            )
            drafter.propose(str(row), 3 * (WIDTH + 1))
        took.append(time.perf_counter() - began)
    print(f"host, 8 rows | median {1e3 * statistics.median(took):.3f} ms a step, most {1e3 * max(took):.3f}")


def main() -> None:
    parts = ("host", "json", "edit", "free", *SHAPES)
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--right", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    if "host" in options.only:
        host_cost()
    if "json" in options.only:
        json_steps()
    if {"edit", "free"} & set(options.only):
        speculating = replace(BASE, speculative_config=AUTO)
        with (
            XlaBatchEngine.from_pretrained(None, BASE) as plain,
            XlaBatchEngine.from_pretrained(None, speculating) as other,
        ):
            print_costs("embedded", other)
            if "edit" in options.only:
                edit(plain, other, options.rounds)
            if "free" in options.only:
                free(plain, other, 2 * options.rounds)
    for name in SHAPES:
        if name in options.only:
            shape(name, options.right, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
