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
# # The first minute
#
# After `pip install`, nothing has to be downloaded: a small model that writes Python comes with the package. What a
# start does, and how long it takes, stands in one line while it runs.

# %%
import json
import time
from pathlib import Path
from tempfile import mkdtemp

began = time.monotonic()
from xla_engine import LLM, SamplingParams

llm = LLM()

# %% [markdown]
# ## A completion

# %%
params = SamplingParams(temperature=0, max_tokens=32)
llm.generate("def size(self):", params)[0]

# %% [markdown]
# ## The same, whatever else runs
# Among thirty others a request gets the same tokens, and the same bits of every log-probability.

# %%
wanted = params.clone(logprobs=0)
[alone] = llm.generate("def size(self):", wanted, use_tqdm=False)
crowd = llm.generate(["def size(self):"] + [f"class Stack{n}:" for n in range(30)], wanted, use_tqdm=False)
(
    alone.outputs[0].token_ids == crowd[0].outputs[0].token_ids,
    alone.outputs[0].logprobs == crowd[0].outputs[0].logprobs,
)

# %% [markdown]
# ## A chat

# %%
question = [{"role": "user", "content": "Reverse a list."}]
print(llm.chat(question, params, use_tqdm=False)[0].outputs[0].text)

# %% [markdown]
# ## A file of requests
# A file for OpenAI's Batch API runs as it is. In a shell this is `xla-engine run requests.jsonl -o results.jsonl`,
# where `--resume` goes on after a crash.

# %%
folder = Path(mkdtemp())
lines = [
    {
        "custom_id": f"r{n}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "max_tokens": 12},
    }
    for n, prompt in enumerate(
        ["def size(self):", "def read(path):", "class Queue:\n    def push(self, item):"]
    )
]
(folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
llm.close()

# %%
import subprocess
import sys

run = [
    "run",
    folder / "requests.jsonl",
    "-o",
    folder / "results.jsonl",
    "--temperature",
    "0",
    "--no-progress",
]
shown = subprocess.run([sys.executable, "-m", "xla_engine", *run], capture_output=True, text=True, check=True)
print("\n".join(shown.stderr.splitlines()[:3]))
for line in (folder / "results.jsonl").read_text().splitlines():
    record = json.loads(line)
    print(record["custom_id"], repr(record["response"]["body"]["choices"][0]["text"]))

# %% [markdown]
# ## Vectors
# The same model, asked for vectors in place of text.

# %%
with LLM(runner="pooling") as pools:
    ranks = pools.rerank("def add(a, b):", ["import os", "class Stack:", "def sub(a, b):"], use_tqdm=False)
[(each.document, round(each.relevance_score, 2)) for each in ranks]

# %%
f"{time.monotonic() - began:.0f} s since the beginning"
