# Frozen: runs at commit 84bfb74.
"""What does it cost to score continuations of contexts that are alike, through the prefix cache and without?

python -m spikes.053_scoring
"""

# %%
from __future__ import annotations

import argparse
import random
from dataclasses import replace

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine import LLM, SamplingParams
from xla_engine.prompts import score_request

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()

# %%
llm = LLM(max_num_seqs=16, max_model_len=512)
vocabulary, draw = llm.engine.checkpoint.config.vocab_size, random.Random(0)
stem = [draw.randrange(1, vocabulary) for _ in range(240)]
choices = [
    [draw.randrange(1, vocabulary)] for _ in range(100)
]  # what a multiple-choice task asks, the worst case
questions = [[*stem[:200], *(draw.randrange(1, vocabulary) for _ in range(40))] for _ in range(25)]
pairs = [
    (question, [draw.randrange(1, vocabulary) for _ in range(4)]) for question in questions for _ in range(4)
]
generate = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def whole(contexts: list[list[int]], rests: list[list[int]]) -> None:
    """Scores of every prompt token, as without `logprobs_start`."""
    params = replace(score_request([1], [1], None)[1], logprobs_start=0)
    llm.generate([[*one, *two] for one, two in zip(contexts, rests, strict=True)], params, use_tqdm=False)


def scored(contexts: list[list[int]], rests: list[list[int]]) -> None:
    llm.engine.reset_prefix_cache()
    llm.score(contexts, rests, use_tqdm=False)


def generated(contexts: list[list[int]], rests: list[list[int]]) -> None:
    llm.engine.reset_prefix_cache()
    llm.generate([[*one, *two] for one, two in zip(contexts, rests, strict=True)], generate, use_tqdm=False)


# %%
jobs = {
    "100 prompts that share 240 of 241 tokens": ([stem] * 100, choices),
    "25 questions of 240 tokens, 4 answers of 4 each": ([one for one, _ in pairs], [two for _, two in pairs]),
}
print(describe_machine())
rows = []
for name, (contexts, rests) in jobs.items():
    forms = {
        form.__name__: (lambda form=form, contexts=contexts, rests=rests: form(contexts, rests))
        for form in (whole, scored, generated)
    }
    times = interleave(forms, rounds=arguments.rounds)
    rows.append([name, *(f"{1e3 * times[form].median:.0f}" for form in forms)])
    rows[-1].append(f"{times['whole'].median / times['scored'].median:.1f}")
print(
    markdown_table(
        ["job", "whole prompts, ms", "score, ms", "generate 1 token, ms", "whole over score"], rows
    )
)
llm.close()
