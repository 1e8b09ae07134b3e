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
# # A cheater is caught
#
# Somebody runs a batch for us and sends the answers with receipts. We check them with the model, on any CPU, many
# tokens at a time.

# %%
import json
import tempfile
from pathlib import Path

from xla_engine import LLM, receipts

folder = Path(tempfile.mkdtemp())
answers, proof = folder / "out.jsonl", folder / "out.receipts.jsonl"
requests = [
    {
        "custom_id": f"q{number}",
        "prompt": f"def task_{number}(",
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": number,
    }
    for number in range(40)
]
with LLM(max_num_seqs=8) as llm:
    receipts.write(llm.engine, requests, answers, proof)
print(len(answers.read_text().splitlines()), "answers")

# %% [markdown]
# ## An honest run
# The audit proposes the claimed tokens to the engine's own sampler, many at a time, and compares every answer.

# %%
report = receipts.audit(answers, proof)
print(report.verdict, report.checked, "computed again by", report.method)

# %% [markdown]
# ## A retouched answer
# Whoever changes an answer without its receipt is found by the digests, without a model.


# %%
def saved(name, lines):
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


lines = [json.loads(line) for line in answers.read_text().splitlines()]
lines[3]["response"]["body"]["choices"][0]["text"] = "self): return 42"
for each in receipts.verify(saved("retouched.jsonl", lines), proof).rejected:
    print(each.custom_id, "-", each.why)

# %% [markdown]
# ## A careful cheater
# This one runs a quarter of the requests at another temperature, and writes receipts that say what was asked. All
# digests and the root fit.

# %%
cheap = [{**each, "temperature": 0} if number % 4 == 0 else each for number, each in enumerate(requests)]
cheated, forged = folder / "cheated.jsonl", folder / "cheated.receipts.jsonl"
with LLM(max_num_seqs=8) as llm:
    receipts.write(llm.engine, cheap, cheated, folder / "true.receipts.jsonl")

from xla_engine.batch.receipts import MerkleTree, footer_line, sha256_of

header, *claims, _ = (json.loads(line) for line in (folder / "true.receipts.jsonl").read_text().splitlines())
asked = {each["custom_id"]: each for each in requests}
for claim in claims:
    claim["request"] = asked[claim["custom_id"]]
    claim["request_sha256"] = sha256_of(claim["request"])
tree = MerkleTree()
for line in (header, *claims):
    tree.add(json.dumps(line).encode())
saved(forged.name, [header, *claims, footer_line(tree)])
print("the files alone:", receipts.verify(cheated, forged).verdict)

# %% [markdown]
# The model is not deceived. A sample of a quarter is enough here.

# %%
report = receipts.audit(cheated, forged, sample=0.25, sample_seed=5)
print(report.verdict, len(report.rejected), "of", report.checked)
for each in report.rejected[:3]:
    print(each.custom_id, "-", each.why)

# %% [markdown]
# How likely was that? The report says it for several shares of false answers.

# %%
for share, chance in report.detection():
    print(f"{share:6.1%} false: found with {chance:.1%}")
