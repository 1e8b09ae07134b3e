# Frozen: runs at commit 84bfb74.
"""What does a vector of a text cost, beside reading the text: 256 texts embedded, and prefilled for one token.

python -m spikes.055_embeddings [--model smollm2]
"""

# %%
from __future__ import annotations

import argparse
import random
from pathlib import Path

from spikes.support.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table
from xla_engine import LLM, SamplingParams
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.model_loader.checkpoint import load_checkpoint, random_checkpoint
from xla_engine.pooling.pooler import Pooler

parser = argparse.ArgumentParser()
parser.add_argument("--model", choices=("embedded", "smollm2"), default="embedded")
parser.add_argument("--texts", type=int, default=256)
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()

# %%
if arguments.model == "embedded":
    checkpoint = load_checkpoint(Path(embedded_model_directory()))
else:
    checkpoint = random_checkpoint(SMOLLM2_135M)
vocabulary, draw = checkpoint.config.vocab_size, random.Random(0)
texts = [
    [draw.randrange(1, vocabulary) for _ in range(draw.randint(16, 112))] for _ in range(arguments.texts)
]
tokens = sum(map(len, texts))
one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def make(runner: str, kind: str = "LAST") -> LLM:
    config = EngineConfig(max_num_seqs=16, max_model_len=256, runner=runner, enable_prefix_caching=False)
    return LLM.from_engine(XlaBatchEngine(checkpoint, None, config, pooler=Pooler(pooling_type=kind)))


engines = {"prefill": make("generate"), "last token": make("pooling"), "mean": make("pooling", "MEAN")}


def prefill() -> object:
    return engines["prefill"].generate(texts, one_token, use_tqdm=False)


def last() -> object:
    return engines["last token"].embed(texts, use_tqdm=False)


def mean() -> object:
    return engines["mean"].embed(texts, use_tqdm=False)


# %%
print(describe_machine())
print(f"{arguments.model}: {len(texts)} texts, {tokens} tokens")
times = interleave({"prefill": prefill, "last token": last, "mean": mean}, rounds=arguments.rounds)
rows = [
    [
        name,
        f"{1e3 * each.median:.0f}",
        f"{tokens / each.median:.0f}",
        f"{each.median / times['prefill'].median:.2f}",
    ]
    for name, each in times.items()
]
print(markdown_table(["form", "ms", "tokens/s", "time over prefill"], rows))
for llm in engines.values():
    llm.close()
