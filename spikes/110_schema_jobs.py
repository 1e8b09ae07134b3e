# Measured at commit 4654949c; runs at HEAD.
"""What does a JSON schema cost a job?

    python -m spikes.110_schema_jobs MODEL.gguf [--rounds 3] [--forms '{"schema": {}, "plain": {}}']

A job of 48 reviews on 16 slots, in turns: with a schema (an enum, an integer and short strings), and without, where each request
has as many tokens as its answer under the schema. Forms are engine options by name; every form that begins with "plain"
runs without the schema. The first form gives the number of tokens, and the answers that all forms with a schema must
repeat to the bit. Prints tokens a second and steps.
"""

import argparse
import json
import random
import statistics
import time

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.sampling_params import SamplingParams

TEXT = {"type": "string", "maxLength": 60}
SCHEMAS = {
    # some half of the tokens are forced: keys, and the rest of each enum
    "review": {
        "type": "object",
        "properties": {
            "sentiment": {"enum": ["positive", "negative", "mixed", "neutral"]},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
            "would_recommend_to_a_friend": {"type": "boolean"},
            "product": TEXT,
            "reason": TEXT,
        },
        "required": ["sentiment", "stars", "would_recommend_to_a_friend", "product", "reason"],
        "additionalProperties": False,
    },
    # hardly a token is forced
    "text": {
        "type": "object",
        "properties": {"text": {"type": "string", "maxLength": 200}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
THINGS = ("kettle", "pair of headphones", "rucksack", "desk lamp", "bicycle pump", "coffee grinder", "raincoat", "tent")
VIEWS = (
    "stopped working after two weeks and the shop did not answer",
    "is the best that I have had in ten years",
    "does what it should, but the manual is hard to read",
    "came in the wrong colour, yet I kept it because it is light",
    "was cheap and feels cheap",
    "arrived a day early and my children love it",
)


def prompts(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        review = f"The {draw.choice(THINGS)} {draw.choice(VIEWS)}, and it {draw.choice(VIEWS)}."
        yield (
            "<|im_start|>system\nYou read reviews and answer in JSON.<|im_end|>\n"
            f"<|im_start|>user\nDescribe this review: {review}<|im_end|>\n<|im_start|>assistant\n"
        )


def run(engine, texts, params):
    before = engine.stats()
    began = time.perf_counter()
    names = [engine.submit({"prompt": text}, each) for text, each in zip(texts, params, strict=True)]
    found = {}
    while engine.has_unfinished:
        for result in engine.step():
            if result.finished:
                found[result.request_id] = result.outputs[0]
    took = time.perf_counter() - began
    outputs = [found[name] for name in names]
    answers = [(tuple(each.token_ids), float(each.cumulative_logprob).hex()) for each in outputs]
    return took, answers, outputs, before, engine.stats()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--schema", default="review", choices=SCHEMAS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--quantization", default="gguf-int8")
    parser.add_argument("--forms", type=json.loads, default={"schema": {}, "plain": {}})
    asked = parser.parse_args()
    texts = list(prompts(asked.requests, 7))
    common = {"quantization": asked.quantization, "max_num_seqs": asked.slots, "max_model_len": 512}
    engines, made = {}, {}
    for name, options in asked.forms.items():
        key = json.dumps(options, sort_keys=True)
        if key not in made:
            made[key] = XlaBatchEngine.from_pretrained(asked.model, EngineConfig(**common | options))
        engines[name] = made[key]
    free = dict(temperature=asked.temperature, logprobs=0)
    limit = {"json": SCHEMAS[asked.schema]}
    rates, tokens, first = {name: [] for name in engines}, None, None
    for turn in range(asked.rounds + 1):  # the first one warms up
        order = list(engines)
        for name in order if not turn or turn % 2 else order[::-1]:
            engine = engines[name]
            if name.startswith("plain"):
                params = [
                    SamplingParams(max_tokens=count, ignore_eos=True, seed=at, **free) for at, count in enumerate(tokens)
                ]
            else:
                params = [
                    SamplingParams(max_tokens=120, structured_outputs=limit, seed=at, **free)
                    for at in range(len(texts))
                ]
            took, answers, outputs, before, after = run(engine, texts, params)
            engine.reset_prefix_cache()
            if first is None:
                first = answers
                tokens = [len(each.token_ids) for each in outputs]
                print(outputs[0].text)
                print(outputs[1].text)
            count = sum(len(each.token_ids) for each in outputs)
            if not name.startswith("plain") and answers != first:
                print(f"{name}: OTHER ANSWERS")
            if turn:
                rates[name].append((count / took, took, count, before, after))
    for name, seen in rates.items():
        rate, took, count, before, after = sorted(seen, key=lambda each: each[0])[len(seen) // 2]
        steps = after.steps - before.steps
        print(
            f"{name:12} {rate:7.1f} tok/s (of {min(each[0] for each in seen):.1f} to {max(each[0] for each in seen):.1f}),"
            f" {count} tokens, {took:.2f} s, {steps} steps"
        )
    base = statistics.median(each[0] for each in rates[next(iter(rates))])
    print({name: round(statistics.median(each[0] for each in seen) / base, 3) for name, seen in rates.items()})
    for engine in made.values():
        engine.close()


main()
