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
# # An equivalence experiment
#
# A request runs alone. Then it runs among random neighbours that come and go. Its tokens and the bits of its logprobs
# are compared.

# %%
import random

import numpy as np

from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine

engine = XlaBatchEngine.from_pretrained(None, EngineConfig(max_num_seqs=8))
PROMPT = "class Stack:"
PARAMS = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=48, logprobs=0)


def bits(output):
    completion = output.outputs[0]
    return completion.token_ids, np.float32(completion.logprobs).view(np.uint32).tolist()


engine.submit(PROMPT, PARAMS, request_id="alone")
[alone] = engine.drain()
print(PROMPT + alone.outputs[0].text)


# %% [markdown]
# ## Among neighbours
# Twelve other requests with other prompts, lengths and settings, some aborted on the way; ours arrives at a random
# step.


# %%
def among_neighbours(seed):
    draw = random.Random(seed)
    for number in range(12):
        params = SamplingParams(
            temperature=draw.choice([0, 0.7, 1.5]), max_tokens=draw.randint(2, 60), seed=number
        )
        engine.submit("import os\n" * draw.randint(1, 12), params, request_id=f"neighbour-{number}")
    for _ in range(draw.randint(0, 30)):
        engine.step()
    engine.submit(PROMPT, PARAMS, request_id="ours")
    mine = None
    for output in engine.stream():
        if draw.random() < 0.02:
            engine.abort(f"neighbour-{draw.randrange(12)}")
        if output.finished and output.request_id == "ours":
            mine = output
    return mine


results = [bits(among_neighbours(seed)) for seed in range(20)]
print(sum(result == bits(alone) for result in results), "of", len(results), "runs equal, bit for bit")
assert all(result == bits(alone) for result in results)

# %% [markdown]
# ## What a bit means
# The comparison is of float32 bits, not of rounded numbers. One unit in the last place would count:

# %%
logprob = np.float32(alone.outputs[0].logprobs[0])
logprob, logprob.view(np.uint32), np.nextafter(logprob, np.float32(0)).view(np.uint32)

# %% [markdown]
# `xla-engine verify` does this with every sampling field, in random schedules with preemption and both lags. The same
# from Python:

# %%
from xla_engine.equivalence.verify import verify

report = verify(engine, requests=40, schedules=2)
engine.close()
print("\n".join(report.lines()))
assert report.ok
