# ---
# jupyter:
#   jupytext:
#     text_representation:
#       format_name: percent
# ---

# %% [markdown]
# # xla-engine in a notebook
#
# Run the cells in any editor that knows `# %%`, or the whole file with `python examples/notebook.py`.
# The embedded model writes Python: it was trained on CPython's standard library.

# %%
from xla_engine import LLM, EngineConfig, SamplingParams, XlaBatchEngine

llm = LLM()  # compiles every program now and none later; LLM("path/to/model") loads a Hugging Face directory

# %% [markdown]
# ## Complete a few prompts
# One setting for all, or a list with one per prompt. Results come in the order of the prompts.

# %%
prompts = ["def fibonacci(n):", "class Stack:", "import os\nimport"]
for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False):
    completion = output.outputs[0]
    print(f"--- {completion.finish_reason}, {len(completion.token_ids)} tokens")
    print(output.prompt + completion.text)

# %% [markdown]
# ## Watch them grow
# `stream` yields the text so far whenever tokens arrive. Leaving the loop early aborts the rest.

# %%
settings = [SamplingParams(temperature=0.8, seed=seed, max_tokens=12 * seed) for seed in (1, 2, 3)]
for output in llm.stream(prompts, settings):
    if output.finished:
        print(f"request {output.request_id}: {output.outputs[0].text!r}")

llm.close()  # frees the device memory; `with LLM() as llm:` does it by itself

# %% [markdown]
# ## Step by step
# The engine below the `LLM`, with more requests than slots. `lag=0` reads each step before the next starts.
# A snapshot shows every slot, the queue, and why each request stands where it stands.

# %%
engine = XlaBatchEngine.from_pretrained(None, EngineConfig(lag=0))
for number in range(20):
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3 + number)
    engine.submit("def f(x):" + "\n    x += 1" * (number % 5), params, request_id=f"request-{number}")

for step in range(1, 6):
    outputs = engine.step()
    snapshot = engine.snapshot()
    print(f"step {step}: {len(outputs)} requests got a token, {engine.num_waiting} wait")
    for view in snapshot.slots[:4]:
        if view.request is not None:
            why = view.request.decision.reason if view.request.decision else ""
            print(f"  slot {view.slot.index}: {view.request.request_id}, {view.position} KV entries, {why}")

# %%
engine.abort("request-19")
finished = [output for output in engine.stream() if output.finished]
print({output.request_id: output.outputs[0].finish_reason for output in finished})
print(f"{engine.stats().occupancy:.0%} of the slots' steps were used")
engine.close()
