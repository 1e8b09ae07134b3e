# Measured at commit b43e45bf; runs at HEAD.
"""What the trainer's log-probabilities cost beside a prefill of the same tokens: `python -m spikes.090_scoring_cost`.

Interleaved: a prefill of N prompts by the engine, the same with their log-probabilities, `Policy.logps` of the same
tokens, and its parts: rounding and packing the weights, all layers, the head with the log-probabilities.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xla_engine import LLM, SamplingParams
from xla_engine.training import Batch, Policy
from xla_engine.training import logps as module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--response", type=int, default=128, help="of the tokens, how many were sampled")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    options = {"max_num_seqs": asked.rows, "max_model_len": asked.tokens + 32, "enable_prefix_caching": False}
    with LLM(asked.model, **options) as llm:
        policy = Policy(llm)
        params, spec = policy.params(), policy._spec
        ids = np.random.default_rng(0).integers(100, 4000, (asked.rows, asked.tokens)).astype(np.int32)
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        mask = np.zeros(ids.shape, np.bool_)
        mask[:, asked.tokens - asked.response :] = True
        batch = Batch(
            tokens=ids,
            length=np.full(asked.rows, asked.tokens, np.int32),
            response_mask=mask,
            sampled=np.zeros(ids.shape, np.float32),
            processing=None,
        )
        nothing = Batch(
            **{name: getattr(batch, name) for name in batch.__slots__} | {"response_mask": mask & False}
        )
        pack = jax.jit(lambda params: [module._held(spec, name, params[name]) for name in spec.leaves])
        one, start = SamplingParams(max_tokens=1, temperature=0), asked.tokens - asked.response
        scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, logprobs_start=start)
        runs: dict[str, Callable[[], Any]] = {
            "prefill": lambda: llm.generate(prompts, one, use_tqdm=False),
            "prefill with log-probabilities": lambda: llm.generate(prompts, scored, use_tqdm=False),
            "logps": lambda: jax.block_until_ready(policy.logps(params, batch)),
            "logps without a response": lambda: jax.block_until_ready(policy.logps(params, nothing)),
            "rounding and packing": lambda: jax.block_until_ready(pack(params)),
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(asked.rounds + 1):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                if turn:
                    found[name].append(time.perf_counter() - began)
        for name, seconds in found.items():
            ratio = np.median(np.array(seconds) / np.array(found["prefill"]))
            print(f"{name}: median {np.median(seconds) * 1e3:.0f} ms, {ratio:.2f} of the prefill")


if __name__ == "__main__":
    main()
