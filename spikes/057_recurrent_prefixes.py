# Frozen: runs at commit 84bfb74.
"""What would a prefix cache for a model with recurrent layers hold, find and save?

python -m spikes.057_recurrent_prefixes
python -m spikes.057_recurrent_prefixes found
"""

# %%
from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import jax

from spikes.support.timing import describe_machine, markdown_table
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import FULL, LINEAR, DeltaForm, ModelConfig
from xla_engine.graphs.delta_net.layer import make_state
from xla_engine.graphs.kv_cache.footprint import tree_bytes
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.sampling_params import SamplingParams

DELTA = DeltaForm(key_heads=16, value_heads=16, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6)
# Four of the layers of Qwen3.5-0.8B, one of them attention, as in the whole model; few words, which no state knows.
MODEL = ModelConfig(
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=256,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    tie_word_embeddings=True,
    qk_norm="head",
    attn_output_gate=True,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    delta=DELTA,
)


# %% How long a state takes to come back, and to be computed
def until_token(engine: XlaBatchEngine, had: int) -> float:
    """Milliseconds until a request has more than `had` tokens."""
    began = time.perf_counter()
    while not any(len(output.outputs[0].token_ids) > had for output in engine.step()):
        pass
    return 1e3 * (time.perf_counter() - began)


def times(rounds: int) -> list[list[str]]:
    """By prompt length: ms to prefill it and get a token, to go to the host and back and get one, and to get one."""
    config = EngineConfig(
        max_num_seqs=2, max_model_len=2048, self_check=False, lag=0, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    draw, table = random.Random(0), []
    with XlaBatchEngine(random_checkpoint(MODEL), None, config) as engine:
        for length in (256, 1024, 1792):
            found: list[list[float]] = []
            for _ in range(rounds):
                name = engine.submit([draw.randrange(2048) for _ in range(length)], params)
                prefill, plain = until_token(engine, 0), until_token(engine, 2)
                assert engine.preempt(name, how="park")
                found.append([prefill, until_token(engine, 3), plain])
                engine.abort(name)
                engine.drain()
            medians = (statistics.median(values) for values in zip(*found, strict=True))
            table.append([str(length), *(f"{value:.1f}" for value in medians)])
    return table


# %% What is found again, by where states are kept
BLOCK = 64  # tokens
LAYERS = 24  # of the whole model, a quarter of them attention
STATE = 3 * LAYERS // 4 * tree_bytes(jax.eval_shape(lambda: make_state(DELTA, 1)))
KEYS = LAYERS // 4 * 2 * MODEL.num_key_value_heads * MODEL.head_dim * 2  # bytes of a token


def prompts(apps: int, sessions: int, turns: int) -> Iterator[tuple[list[tuple[int, ...]], int]]:
    """Blocks of each prompt and its answer, and how many are the prompt's: conversations that take turns, 64 of them
    at a time, each behind the 2,048 tokens of one of `apps`, with 192 tokens of question and 192 of answer a turn."""
    draw, live = random.Random(0), []
    for number in range(sessions):
        live.append((number, draw.randrange(apps), 0))
        while len(live) == 64 or (number == sessions - 1 and live):
            name, app, turn = live.pop(draw.randrange(len(live)))
            blocks = [(-1 - app, at) for at in range(2048 // BLOCK)]
            blocks += [(name, at) for at in range(6 * turn + 6)]
            yield blocks, len(blocks) - 3
            if turn + 1 < turns:
                live.append((name, app, turn + 1))


def found(memory: float, keep: Callable[[int, int, int], bool], *, state: int = STATE) -> float:
    """Share of prompt tokens that a cache of so many bytes has, the least recently used block going first.

    keep: whether a state is kept behind a block: (place, blocks of the prompt, blocks with the answer).
    """
    cache: OrderedDict[tuple[int, ...], int] = OrderedDict()  # a block, and its bytes
    used = hits = asked = 0
    for blocks, prompt in prompts(apps=16, sessions=1500, turns=5):
        have = next((at for at, block in enumerate(blocks) if block not in cache), len(blocks))
        with_state = [
            at + 1 for at in range(min(have, prompt)) if state == 0 or cache[blocks[at]] > KEYS * BLOCK
        ]
        hits, asked = hits + max(with_state, default=0), asked + prompt
        for at in reversed(range(len(blocks))):
            block = blocks[at]
            size = KEYS * BLOCK + (state if keep(at + 1, prompt, len(blocks)) else 0)
            size = max(size, cache.pop(block, 0))
            cache[block] = size
        used = sum(cache.values())
        while used > memory:
            used -= cache.popitem(last=False)[1]
    return hits / asked


WAYS: dict[str, Callable[[int, int, int], bool]] = {
    "at every block of 64 tokens": lambda at, prompt, end: True,
    "at every 1,024 tokens": lambda at, prompt, end: at % 16 == 0,
    "at the end of the answer": lambda at, prompt, end: at == end,
    "both": lambda at, prompt, end: at % 16 == 0 or at == end,
}


def shares() -> list[list[str]]:
    memories = (1, 4, 16)
    table = [["keys and values only, as if no layer were recurrent"]]
    table[0] += [f"{found(gib * 2**30, lambda *_: False, state=0):.0%}" for gib in memories]
    for name, keep in WAYS.items():
        table.append([name, *(f"{found(gib * 2**30, keep):.0%}" for gib in memories)])
    return table


# %%
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["times", "found"], nargs="?", default="times")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.question == "found":
        print(f"a state is {STATE / 2**20:.1f} MiB, keys and values of {STATE / KEYS:.0f} tokens")
        print(markdown_table(("where states are kept", "1 GiB", "4 GiB", "16 GiB"), shares()))
        return
    print(describe_machine())
    head = ("prompt tokens", "prefill, ms", "to the host and back, ms", "a token without, ms")
    print(markdown_table(head, times(options.rounds)))


if __name__ == "__main__":
    main()
