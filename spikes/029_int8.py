# Frozen: runs at commit 055c598.
"""What do weights and activations in eight bits cost in quality, and what do they gain in speed?

python -m spikes.029_int8
"""

# %%
from __future__ import annotations

import argparse
import importlib
from dataclasses import replace
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
from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.runner.native_library.build import register

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=9)
arguments.add_argument(
    "--windows", type=int, default=96, help="stretches of 384 held-out tokens, 0: only speed"
)
arguments.add_argument(
    "--rows", type=int, nargs="*", default=[8, 32], help="of the decode step; none: only quality"
)
options = arguments.parse_known_args()[0]
print(describe_machine(), "\n")

# %% Quality: the embedded model on files that its training held out
WINDOW, PROMPT, NEW = 384, 48, 64


def quality(count: int) -> None:
    """Loss, predictions and greedy streams on `count` stretches of text."""
    training = importlib.import_module("spikes.010_train_embedded_model")
    config = EngineConfig(max_num_seqs=16, max_model_len=512)
    names = {"bfloat16": config, "int8": replace(config, quantization="int8")}
    windows: list[list[int]] = []
    predicted: dict[str, list[int]] = {}
    losses: dict[str, float] = {}
    greedy: dict[str, list[list[int]]] = {}
    for name, each in names.items():
        engine = XlaBatchEngine.from_pretrained(None, each)
        if not windows:
            tokenizer: Any = engine.tokenizer
            for file in (file for file in training.read_corpus() if file.held_out):
                ids = tokenizer.encode(file.text)
                windows += [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)]
            order = np.random.default_rng(0).permutation(len(windows))[:count]
            windows = [windows[index] for index in order]
        for index, window in enumerate(windows):
            engine.submit(
                window, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), request_id=f"{index}"
            )
        outputs = sorted(engine.drain(), key=lambda output: int(output.request_id))
        found = [position for output in outputs for position in (output.prompt_logprobs or [])[1:]]
        tokens = [token for window in windows for token in window[1:]]
        losses[name] = -float(
            np.mean([place[token].logprob for place, token in zip(found, tokens, strict=True)])
        )
        predicted[name] = [
            next(token for token, entry in place.items() if entry.rank == 1) for place in found
        ]
        for index, window in enumerate(windows):
            params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
            engine.submit(window[:PROMPT], params, request_id=f"{index}")
        outputs = sorted(engine.drain(), key=lambda output: int(output.request_id))
        greedy[name] = [list(output.outputs[0].token_ids) for output in outputs]
        engine.close()
    same = np.mean(np.array(predicted["int8"]) == np.array(predicted["bfloat16"]))
    agreed = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), NEW)
        for pair in zip(greedy["int8"], greedy["bfloat16"], strict=True)
    ]
    print(f"{len(windows)} held-out stretches of {WINDOW} tokens; greedy: {NEW} tokens behind {PROMPT}\n")
    rows = [
        ["loss, nats per token", f"{losses['bfloat16']:.4f}", f"{losses['int8']:.4f}"],
        ["same most likely token", "", f"{same:.2%}"],
        ["greedy tokens before the first other one, mean", "", f"{np.mean(agreed):.1f} of {NEW}"],
        ["greedy streams all the same", "", f"{np.mean(np.array(agreed) == NEW):.0%}"],
    ]
    print(markdown_table(["", "bfloat16", "int8"], rows), "\n")


if options.windows:
    quality(options.windows)

# %% Speed: the decode step of SmolLM2-135M's shape, 192 keys a row
BF16 = jnp.dtype(jnp.bfloat16)
ISA = register()
specs = {
    "bfloat16, C++ products": ModelSpec(SMOLLM2_135M, BF16, NativeAttention(ISA), NativeProducts(ISA)),
    "bfloat16, XLA": ModelSpec(SMOLLM2_135M, BF16, NativeAttention(ISA)),
    "int8, C++ products": ModelSpec(
        SMOLLM2_135M, BF16, NativeAttention(ISA), NativeProducts(ISA), quantized=True
    ),
    "int8, XLA": ModelSpec(SMOLLM2_135M, BF16, NativeAttention(ISA), quantized=True),
}
steps: dict[str, Any] = {}
for count in options.rows:
    for name, spec in specs.items():
        weights = [
            jax.random.randint(jax.random.key(0), leaf.shape, -127, 128, jnp.int8)
            if leaf.dtype == jnp.int8
            else leaf
            for leaf in random_weights(spec)
        ]
        steps[f"{count} {name}"] = DecodeStep(
            spec, weights, rows=count, length=192, key_length=512, positions=512
        )
times = interleave(steps, options.rounds)
table = []
for count in options.rows:
    base = times[f"{count} bfloat16, C++ products"].median
    for name, spec in specs.items():
        each_time = times[f"{count} {name}"]
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in spec.leaves) / 1e6
        rate, ratio = f"{count / each_time.median:.0f}", f"{base / each_time.median:.2f}"
        table.append([str(count), name, f"{size:.0f}", each_time.milliseconds(), rate, ratio])
print(markdown_table(["rows", "form", "weights, MB", "ms a step", "tok/s", "against the first"], table))
