# Frozen: runs at commit a8802fc.
"""What does the prefix cache gain on prompts that begin alike, and what does it cost where they do not?

python -m spikes.026_prefix_cache
"""

# %%
from __future__ import annotations

import argparse
import random
from dataclasses import replace

from spikes.support.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table
from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.model_loader.checkpoint import random_checkpoint

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=3)
arguments.add_argument("--requests", type=int, default=24)
arguments.add_argument("--shared", type=int, default=448, help="tokens that all prompts begin with")
arguments.add_argument("--own", type=int, default=64, help="tokens of each prompt's own")
arguments.add_argument("--new", type=int, default=16, help="tokens to generate for each")
options = arguments.parse_known_args()[0]

MODEL = replace(SMOLLM2_135M, max_position_embeddings=1024)
CHECKPOINT = random_checkpoint(MODEL, scale=0.04, eos_token_ids=(0,))


# %%
def engine(*, caching: bool) -> XlaBatchEngine:
    config = EngineConfig(max_model_len=1024, enable_prefix_caching=caching)
    return XlaBatchEngine(CHECKPOINT, None, config)


ENGINES = {"off": engine(caching=False), "on": engine(caching=True)}
draw = random.Random(0)


def tokens(count: int) -> list[int]:
    return [draw.randrange(1, MODEL.vocab_size) for _ in range(count)]


STEM = tokens(options.shared)
WORKLOADS = {
    "begin alike": [STEM + tokens(options.own) for _ in range(options.requests)],
    "nothing shared": [tokens(options.shared + options.own) for _ in range(options.requests)],
}
PARAMS = SamplingParams(temperature=0, max_tokens=options.new, ignore_eos=True)


def run(name: str, workload: str) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Tokens by request, and how many prompt tokens were computed and how many found. Slots begin empty."""
    driven = ENGINES[name]
    driven.reset_prefix_cache()
    before = driven.stats()
    for number, prompt in enumerate(WORKLOADS[workload]):
        driven.submit(prompt, PARAMS, request_id=str(number))
    found = {output.request_id: output.outputs[0].token_ids for output in driven.drain()}
    after = driven.stats()
    computed = after.prompt_tokens - before.prompt_tokens
    return found, computed, after.cached_tokens - before.cached_tokens


# %%
if __name__ == "__main__":
    rows = []
    for workload in WORKLOADS:
        off, on = run("off", workload), run("on", workload)
        assert off[0] == on[0], "the tokens differ"
        times = interleave(
            {name: lambda name=name, workload=workload: run(name, workload) for name in ENGINES},
            options.rounds,
            warm_up=0,
        )
        for name, counted in (("off", off), ("on", on)):
            ratio = times["off"].median / times[name].median
            rows.append([workload, name, counted[1], counted[2], f"{times[name].median:.2f}", f"{ratio:.2f}"])
    print(describe_machine())
    print(markdown_table(["prompts", "cache", "tokens computed", "found", "seconds", "speed"], rows))
    print("same tokens")
