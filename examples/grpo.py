"""Train the embedded model by GRPO on what it samples: `python examples/grpo.py [--steps N] [--control]`.

The task: complete `def NAME(ARGUMENT):` + `return` so that Python parses the line and it uses the argument. Each step
samples 8 answers to 8 prompts, asserts that the trainer's log-probabilities are the sampler's bits, and takes one step
of GRPO (Shao et al. 2024, arXiv 2402.03300). `--control` trains with XLA's own forward pass instead, as a trainer
without the sampler's kernels does, and asserts nothing. Needs the extra `train` (optax).
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from xla_engine import LLM, SamplingParams
from xla_engine.training import Policy

NAMES = (
    "area",
    "double",
    "half",
    "square",
    "total",
    "mean",
    "first",
    "last",
    "length",
    "negate",
    "scale",
    "next",
)
ARGUMENTS = ("x", "n", "a", "value", "data", "items", "size", "text")
PROMPTS, ANSWERS, WIDTH, CLIP = 8, 8, 24, 0.2


def reward(argument: str, prompt: str, answer: str) -> float:
    """1 if the function is Python and its one line uses its argument, otherwise 0."""
    line = answer.split("\n")[0]
    try:
        tree = ast.parse(prompt + line)
    except (SyntaxError, ValueError):
        return 0.0
    return float(any(isinstance(node, ast.Name) and node.id == argument for node in ast.walk(tree)))


def train(steps: int, *, control: bool = False, rate: float = 1e-4) -> list[dict[str, float]]:
    """Train, and return what each step saw."""
    draw, seen = random.Random(0), []
    with LLM(max_num_seqs=PROMPTS * ANSWERS, max_model_len=64) as llm:
        policy = Policy(llm)
        params, optimizer = policy.params(), optax.adam(rate)
        state = optimizer.init(params)
        logps_of = policy.xla_logps if control else policy.logps

        def loss(params: Any, batch: Any, advantage: jax.Array) -> tuple[jax.Array, jax.Array]:
            logps = logps_of(params, batch)
            ratio = jnp.exp(logps - batch.sampled)
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
            return -jnp.sum(jnp.where(batch.response_mask, gain, 0)) / jnp.sum(batch.response_mask), logps

        @jax.jit
        def improve(params: Any, state: Any, batch: Any, advantage: jax.Array) -> Any:
            gradient, logps = jax.grad(loss, has_aux=True)(params, batch, advantage)
            changes, state = optimizer.update(gradient, state)
            return optax.apply_updates(params, changes), state, logps

        for step in range(steps):
            began = time.perf_counter()
            tasks = [(draw.choice(NAMES), draw.choice(ARGUMENTS)) for _ in range(PROMPTS)]
            prompts = [f"def {name}({argument}):\n    return" for name, argument in tasks]
            sampling = SamplingParams(
                temperature=1, n=ANSWERS, max_tokens=10, stop="\n", logprobs=0, seed=step
            )
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
            batch = policy.batch(outputs, sampling, width=WIDTH)
            rewards = np.array(
                [
                    [reward(argument, prompt, each.text) for each in output.outputs]
                    for (_, argument), prompt, output in zip(tasks, prompts, outputs, strict=True)
                ]
            )
            spread = rewards.std(axis=1, keepdims=True) + 1e-4
            advantage = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).reshape(-1, 1)
            params, state, logps = improve(params, state, batch, advantage.astype(np.float32))
            apart = np.abs(np.asarray(logps) - batch.sampled)
            assert control or apart.max() == 0, f"step {step}: trainer and rollout differ by {apart.max()}"
            policy.publish(params)
            clipped = np.abs(np.expm1(np.asarray(logps) - batch.sampled)) > CLIP
            tokens = int(batch.response_mask.sum())
            seen.append(
                {
                    "step": step,
                    "reward": float(rewards.mean()),
                    "largest": float(apart.max()),
                    "mean": float(apart.sum() / tokens),
                    "clipped": float(clipped.sum() / tokens),
                    "tokens": tokens,
                    "seconds": time.perf_counter() - began,
                }
            )
            if step % 10 == 0 or step + 1 == steps:
                told = seen[-1] | {
                    "largest": max(each["largest"] for each in seen),
                    "reward": float(np.mean([each["reward"] for each in seen[-10:]])),
                }
                print(json.dumps({name: round(value, 6) for name, value in told.items()}), flush=True)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--control", action="store_true")
    asked = parser.parse_args()
    seen = train(asked.steps, control=asked.control)
    first, last = seen[: max(1, len(seen) // 10)], seen[-max(1, len(seen) // 10) :]
    summary = {
        "steps": len(seen),
        "responses": len(seen) * PROMPTS * ANSWERS,
        "largest": max(each["largest"] for each in seen),
        "mean": float(np.mean([each["mean"] for each in seen])),
        "clipped": float(np.mean([each["clipped"] for each in seen])),
        "reward of the first tenth": float(np.mean([each["reward"] for each in first])),
        "reward of the last tenth": float(np.mean([each["reward"] for each in last])),
        "seconds a step": float(np.median([each["seconds"] for each in seen])),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
