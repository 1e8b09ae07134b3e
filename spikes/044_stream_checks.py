# Frozen: runs at commit 84bfb74.
"""Which random weights give greedy streams that show a wrong position or a swapped slot?

python -m spikes.044_stream_checks
"""

# %%
from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spikes.support.timing import describe_machine, markdown_table
from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.bench.judge import NEAR_TIE, dull_reason
from xla_engine.bench.models import SHAPES, Weights, lively_weights, write_checkpoint
from xla_engine.bench.workers.xla import Judge
from xla_engine.environment import embedded_model_directory
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import load_checkpoint, random_weights

arguments = argparse.ArgumentParser()
arguments.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m")
arguments.add_argument("--requests", type=int, default=8)
arguments.add_argument("--weights", nargs="+", default=["plain", "stretched", "lively", "trained"])
options = arguments.parse_known_args()[0]
PROMPT, NEW = 64, 48
BOUND = NEAR_TIE["bfloat16"]
print(describe_machine(), "\n")


# %% Weights
def plain(config: ModelConfig) -> Weights:
    """All matrices normal with deviation 0.02."""
    return random_weights(config, dtype="bfloat16")


def stretched(config: ModelConfig) -> Weights:
    """What the benchmark wrote before: signs in the last norm, attention three times as strong, a stretched head."""
    weights = plain(config)
    generator = np.random.default_rng([0, 1])
    factor = np.exp(0.5 * generator.standard_normal((config.vocab_size, 1), dtype=np.float32))
    weights["embed"] = (weights["embed"].astype(np.float32) * factor).astype(ml_dtypes.bfloat16)
    for leaf in weights:
        if leaf.endswith((".qkv", ".output")):
            weights[leaf] = weights[leaf] * ml_dtypes.bfloat16(3)
    weights["final_norm"] = generator.choice(np.array([-1, 1], np.float32), config.hidden_size)
    return weights


RECIPES: dict[str, Callable[[ModelConfig], Weights] | None] = {
    "plain": plain,
    "stretched": stretched,
    "lively": lively_weights,
    "trained": None,  # the embedded model
}


# %% Streams, and what a judge says of them and of faults
class LateJudge(Judge):
    """Takes every token behind the prompt to stand one place too late: what a wrong position would compute."""

    def load(self, model: str) -> dict[str, Any]:
        found = super().load(model)
        assert self._reference is not None
        forward = self._reference._forward

        def late(weights: Any, rope: Any, tokens: Any) -> Any:
            count = tokens.shape[0]
            place = np.arange(count) + (np.arange(count) >= PROMPT)
            return forward(weights, rope[:, place.clip(0, count - 1)], tokens)

        self._reference._forward = late  # type: ignore[assignment]
        return found


def greedy(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    config = EngineConfig(max_num_seqs=8, max_model_len=PROMPT + NEW, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with XlaBatchEngine(load_checkpoint(model, dtype="bfloat16"), None, config) as engine:
        for index, prompt in enumerate(prompts):
            engine.submit(prompt, params, request_id=str(index))
        found = {int(each.request_id): list(each.outputs[0].token_ids) for each in engine.drain()}
    return [found[index] for index in range(len(prompts))]


def row(name: str, model: Path) -> list[object]:
    vocabulary = load_checkpoint(model).config.vocab_size
    prompts = np.random.default_rng(0).integers(0, vocabulary, (options.requests, PROMPT)).tolist()
    streams = greedy(model, prompts)
    distinct = [len(set(stream)) for stream in streams]

    def worst(judge: Judge, streams: list[list[int]]) -> list[float]:
        """The largest regret of each stream."""
        judge.load(str(model))
        return [max(each) for each in judge.regrets(prompts, streams)["regrets"]]

    right = worst(Judge(1), streams)
    faults = {"swapped": worst(Judge(1), [*streams[1:], streams[0]]), "late": worst(LateJudge(1), streams)}
    seen = [f"{sum(r > BOUND for r in found)} of {len(found)}" for found in faults.values()]
    return [
        name,
        f"{statistics.median(distinct):g} ({min(distinct)}-{max(distinct)})",
        len({tuple(stream[:8]) for stream in streams}),
        f"{max(right):.3f}",
        *seen,
        "yes" if dull_reason(streams) else "no",
    ]


# %%
rows = []
for name, recipe in ((name, RECIPES[name]) for name in options.weights):
    if recipe is None:
        rows.append(row(name, embedded_model_directory()))
        continue
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(SHAPES[options.shape], recipe(SHAPES[options.shape]), Path(folder))
        rows.append(row(name, Path(folder)))
head = [
    "weights",
    f"distinct tokens of {NEW}",
    "beginnings",
    "worst regret",
    "swapped slot seen",
    "late position seen",
    "refused",
]
print(markdown_table(head, rows))
