# Measured at commit 7ddc236f; runs at HEAD.
"""What does the host do in a run of many short requests, by its thread's own processor time?

python -m spikes.073_throughput [--requests 1000] [--profile]
"""

import argparse
import cProfile
import pstats
import random
import time
from pydoc_data.topics import topics

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams


def requests(count):
    """Log-normal prompts (characters, median 67) and answers (tokens, median 15)."""
    text, draw = "\n".join(topics[name] for name in sorted(topics)), random.Random(0)
    for number in range(count):
        length = int(min(max(draw.lognormvariate(4.2, 0.7), 8), 400))
        start = draw.randrange(len(text) - 500)
        most = int(min(max(draw.lognormvariate(2.7, 0.6), 2), 64))
        yield text[start : start + length], SamplingParams(max_tokens=most, temperature=0.8, seed=number)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--profile", action="store_true")
    words = parser.parse_args()
    config = EngineConfig(max_num_seqs=32, max_model_len=512, phase_timers=True)
    with XlaBatchEngine.from_pretrained(None, config) as engine:
        profile = cProfile.Profile(time.thread_time)
        began, cpu = time.perf_counter(), time.thread_time()
        if words.profile:
            profile.enable()
        given, left = requests(words.requests), words.requests
        while left or engine.has_unfinished:
            while left and engine.num_waiting < 32:
                engine.submit(*next(given))
                left -= 1
            engine.step(only_finished=True)
        profile.disable()
        print(
            f"{time.perf_counter() - began:.2f} s, of the thread {time.thread_time() - cpu:.2f} s",
            engine.stats().phases,
        )
        if words.profile:
            pstats.Stats(profile).sort_stats("cumtime").print_stats(45)


if __name__ == "__main__":
    main()
