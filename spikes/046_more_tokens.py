# Frozen: runs at commit 84bfb74.
"""What does a request that goes on after its end wait for, and does it change a bit?

python -m spikes.046_more_tokens --rounds 9 --requests 300
"""

# %%
from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import replace

from spikes.support.timing import describe_machine, markdown_table
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.equivalence.schedule import run_alone
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=9)
arguments.add_argument("--requests", type=int, default=300)
options = arguments.parse_known_args()[0]

LENGTHS = (32, 128, 384)
CONFIG = EngineConfig(max_num_seqs=4, max_model_len=512, keep_finished=64)
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)


# %% Time to the first token behind those that were there, alone in the engine
def first_new_token(engine: XlaBatchEngine, had: int, begin: Callable[[], object]) -> float:
    """Milliseconds from `begin` to a token that was not there before."""
    start = time.perf_counter()
    begin()
    while True:
        for output in engine.step():
            if len(output.outputs[0].token_ids) > had:
                took = time.perf_counter() - start
                engine.drain()
                return took * 1e3


def one_round(engine: XlaBatchEngine, length: int, seed: int) -> list[float]:
    """In its slot; its slot taken over by others; its slot taken over and the prefix cache empty; submitted anew."""
    draw = random.Random(seed)
    vocabulary = engine.checkpoint.config.vocab_size

    def tokens() -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(length)]

    def ended(name: str) -> RequestOutput:
        engine.submit(tokens(), PARAMS, request_id=name)
        return engine.drain()[0]

    def others() -> None:
        for _ in range(4 * CONFIG.num_slots):
            engine.submit(tokens(), replace(PARAMS, max_tokens=2))
        engine.drain()

    found = []
    ended("a")
    found.append(first_new_token(engine, 16, lambda: engine.extend("a", 8)))
    ended("b")
    others()
    found.append(first_new_token(engine, 16, lambda: engine.extend("b", 8)))
    last = ended("c")
    prompt = [*last.prompt_token_ids, *last.outputs[0].token_ids]
    found.append(first_new_token(engine, 0, lambda: engine.fork("c")))
    engine.reset_prefix_cache()
    found.append(first_new_token(engine, 0, lambda: engine.submit(prompt, replace(PARAMS, max_tokens=8))))
    return found


rows = []
with XlaBatchEngine.from_pretrained(None, CONFIG) as engine:
    one_round(engine, 32, 0)
    for length in LENGTHS:
        rounds = [one_round(engine, length, seed) for seed in range(options.rounds)]
        columns = [sorted(column) for column in zip(*rounds, strict=True)]
        median = [column[len(column) // 2] for column in columns]
        cells = [
            f"{middle:.1f} ({column[0]:.1f}-{column[-1]:.1f})"
            for middle, column in zip(median, columns, strict=True)
        ]
        rows.append([length, *cells, f"{median[3] / median[0]:.1f}"])
print(describe_machine())
names = ["prompt tokens", "extend, slot there, ms", "extend, slot lost, ms", "fork, ms", "submit anew, ms"]
print(markdown_table([*names, "anew : slot there"], rows))

# %% Bits: each request whole and alone, and in pieces among others
found: dict[str, list[int]] = {}
for name, form in {"slots": {}, "blocks": {"num_blocks": 24}}.items():
    with XlaBatchEngine.from_pretrained(
        None, replace(CONFIG, **form, keep_finished=options.requests)
    ) as engine:
        cases = draw_cases(engine, options.requests, seed=46, every_field=True)
        alone = {case.request_id: run_alone(engine, case) for case in cases}
        draw, done, differing, extended = random.Random(46), 0, 0, 0
        left = {case.request_id: case for case in cases}
        new = list(left)
        while new or engine.has_unfinished:
            while new and draw.random() < 0.5:
                case = left[new.pop()]
                cap = draw.randint(max(1, case.params.min_tokens), case.params.token_limit)
                engine.submit(
                    case.prompt_token_ids, replace(case.params, max_tokens=cap), request_id=case.request_id
                )
            for output in engine.step():
                if not output.finished:
                    continue
                case, choice = left[output.request_id], output.outputs[0]
                more = case.params.token_limit - len(choice.token_ids)
                if choice.finish_reason == "length" and more:
                    engine.extend(case.request_id, draw.randint(1, more))
                    extended += 1
                    continue
                same = alone[case.request_id]
                differing += (choice.token_ids, choice.logprobs, choice.text, choice.finish_reason) != (
                    same.token_ids,
                    same.logprobs,
                    same.text,
                    same.finish_reason,
                )
                done += 1
        found[name] = [done, extended, differing]
print(
    markdown_table(
        ["", "requests", "times extended", "differ"], [[name, *row] for name, row in found.items()]
    )
)
