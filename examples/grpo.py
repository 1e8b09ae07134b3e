# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # Train on what was sampled
#
# GRPO (Shao et al. 2024, arXiv 2402.03300) on the embedded model: complete `def NAME(ARGUMENT):` and `return` so that
# Python parses the line and it uses the argument. Each step samples 8 answers to 8 prompts, asserts that the trainer's
# log-probabilities are the sampler's bits, and takes one step of Adam. The control trains with XLA's own forward pass,
# as a trainer without the sampler's kernels does, and asserts nothing.
#
# This notebook takes a few steps. `python examples/grpo.py --steps 200 [--control] [--model MODEL]` trains on. Needs
# the extra `train` (optax); see docs/training.md.

# %%
from __future__ import annotations

import argparse
import ast
import json
import random
import resource
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


# %% [markdown]
# ## The reward


# %%
def reward(argument: str, prompt: str, answer: str) -> float:
    """1 if the function is Python and its one line uses its argument, otherwise 0."""
    line = answer.split("\n")[0]
    try:
        tree = ast.parse(prompt + line)
    except (SyntaxError, ValueError):
        return 0.0
    return float(any(isinstance(node, ast.Name) and node.id == argument for node in ast.walk(tree)))


# %% [markdown]
# ## The training
# The loss takes `policy.logps` in place of a forward pass of its own. `policy.publish` gives the new parameters to the
# engine, and the next step samples from them.


# %%
def train(
    steps: int, *, control: bool = False, rate: float = 1e-4, model: str | None = None
) -> list[dict[str, float]]:
    """Train, and return what each step saw."""
    draw, seen = random.Random(0), []
    with LLM(model, max_num_seqs=PROMPTS * ANSWERS, max_model_len=64) as llm:
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
                print(json.dumps(told(seen[-10:])), flush=True)
    return seen


def told(seen: list[dict[str, float]]) -> dict[str, float]:
    """The largest difference of some steps, and the means of the rest."""
    found = {name: float(np.mean([step[name] for step in seen])) for name in seen[0]}
    found |= {"step": seen[-1]["step"], "largest": max(step["largest"] for step in seen)}
    found["seconds"] = float(np.median([step["seconds"] for step in seen]))
    return {name: round(value, 6) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model as LLM takes it; the embedded one by default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-4, help="of Adam")
    parser.add_argument("--control", action="store_true", help="train with XLA's forward pass")
    asked = parser.parse_args()
    seen = train(asked.steps, control=asked.control, rate=asked.rate, model=asked.model)
    tenth = max(1, len(seen) // 10)
    shares = {
        "responses": len(seen) * PROMPTS * ANSWERS,
        "reward of the first tenth": told(seen[:tenth])["reward"],
        "reward of the last tenth": told(seen[-tenth:])["reward"],
        "largest memory, MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(told(seen) | shares))


# %% [markdown]
# ## A few steps
# In the first, the kernels compute the log-probabilities that were sampled: `largest` is the largest difference of any
# token of any step, and `clipped` the share of tokens whose ratio leaves 0.8 to 1.2. Then the control, with the same
# seeds: it differs in every step.

# %%
if "get_ipython" in globals():
    shared = train(3)
    control = train(2, control=True)
    assert all(step["largest"] == 0 for step in shared) and all(step["largest"] > 0 for step in control)
elif __name__ == "__main__":
    main()
