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
# # A first batch
#
# The embedded model writes Python: it was trained on CPython's standard library. `LLM()` loads it and compiles every
# program now and none later. `LLM("path/to/model")` loads yours.

# %%
from xla_engine import LLM, SamplingParams

llm = LLM()

# %% [markdown]
# ## Complete a few prompts
# One setting for all, or a list with one for each prompt. Results come in the order of the prompts.

# %%
prompts = ["def fibonacci(n):", "class Stack:", "import os\nimport"]
outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40))
outputs[0]

# %%
for output in outputs:
    completion = output.outputs[0]
    print(f"--- {completion.finish_reason}, {len(completion.token_ids)} tokens")
    print(output.prompt + completion.text)

# %% [markdown]
# ## Several answers to one prompt
# `n` sequences share one prompt. Each draws its own noise, derived from the seed.

# %%
[output] = llm.generate("def area(", SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=16))
output

# %% [markdown]
# ## Watch them grow
# `stream` yields the text so far whenever tokens arrive. Leaving the loop early aborts the rest.

# %%
settings = [SamplingParams(temperature=0.8, seed=seed, max_tokens=12 * seed) for seed in (1, 2, 3)]
for output in llm.stream(prompts, settings):
    if output.finished:
        print(f"request {output.request_id}: {output.outputs[0].text!r}")

# %% [markdown]
# ## What was done
# Closing frees the device memory; `with LLM() as llm:` does it by itself.

# %%
stats = llm.engine.stats()
llm.close()
stats.finished, stats.generation_tokens, f"{stats.occupancy:.0%} of the slots' steps used"
