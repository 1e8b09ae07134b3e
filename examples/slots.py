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
# # The slots of a run
#
# The engine below `LLM`, step by step, with more requests than slots. `lag=0` reads each step before the next one
# starts, so that what is shown is what has happened.

# %%
from pathlib import Path
from tempfile import mkdtemp

from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine

engine = XlaBatchEngine.from_pretrained(None, EngineConfig(max_num_seqs=8, lag=0))


def submit(number: int) -> None:
    prompt = "def f(x):" + "\n    x += 1" * (number % 5)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3 + 2 * number)
    engine.submit(prompt, params, request_id=f"request-{number}")


for number in range(20):
    submit(number)

# %% [markdown]
# A snapshot shows every slot, the queue, and why each request stands where it stands.

# %%
for _ in range(5):
    engine.step()
engine.snapshot()

# %% [markdown]
# Aborting a request frees its place at once. Each request ends with exactly one output that is `finished`.

# %%
engine.abort("request-19")
finished = [output for output in engine.stream() if output.finished]
{output.request_id: output.outputs[0].finish_reason for output in finished}

# %% [markdown]
# ## Drawn
# A step log keeps every step of a run. It shows itself as slots by steps: a slot is refilled as soon as its request
# ends. Point at a bar to read what it was. `xla-engine timeline` draws a larger picture that zooms.

# %%
from xla_engine.observability.step_log import read_step_log
from xla_engine.observability.step_log_writer import logging_steps

path = Path(mkdtemp()) / "steps.jsonl"
with logging_steps(engine, path):
    for number in range(20):
        submit(number)
    engine.drain()
read_step_log(path)

# %%
stats = engine.stats()
engine.close()
f"{stats.steps} steps, {stats.occupancy:.0%} of the slots' steps used"
