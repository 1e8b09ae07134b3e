# Frozen: runs at commit a8802fc.
"""A request that lost its slot: what do parking, prefilling again and replaying cost, by its length?

python -m spikes.027_parking
"""

# %%
from __future__ import annotations

import argparse
import random
from dataclasses import replace

import jax

from spikes.support.timing import SMOLLM2_135M, describe_machine, interleave, markdown_table
from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.scheduler import Swap

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 128, 256, 512, 960])
options = arguments.parse_known_args()[0]

MODEL = replace(SMOLLM2_135M, max_position_embeddings=1024)
ENGINE = XlaBatchEngine(
    random_checkpoint(MODEL, scale=0.04, eos_token_ids=(0,)),
    None,
    EngineConfig(max_model_len=1024, enable_prefix_caching=False),
)
RUNNER = ENGINE.runner
draw = random.Random(0)


# %%
def there_and_back(length: int) -> None:
    """Slot 0 to the host and back, alone on the device."""
    from xla_engine.scheduler import Slot

    swap = Swap(slot=Slot(index=0, epoch=0), request_id="x", length=length)
    moves = RUNNER._moves
    moves.park(RUNNER._state.held, swap)
    RUNNER._parked.settle("x")
    RUNNER._state.held = moves.resume(RUNNER._state.held, swap)
    jax.block_until_ready(RUNNER._state.held)


def prefill(length: int) -> None:
    """All `length` tokens again, and nobody else's in the calls."""
    prompt = [draw.randrange(1, MODEL.vocab_size) for _ in range(length)]
    ENGINE.submit(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    ENGINE.drain()


def replay(length: int) -> None:
    """A quarter of the tokens as a prompt, the others sampled again, alone in the batch."""
    prompt = [draw.randrange(1, MODEL.vocab_size) for _ in range(length // 4)]
    ENGINE.submit(prompt, SamplingParams(temperature=0, max_tokens=length - length // 4, ignore_eos=True))
    ENGINE.drain()


# %%
if __name__ == "__main__":
    rows = []
    for length in options.lengths:
        ways = {"park": there_and_back, "recompute": prefill} | ({"replay": replay} if length <= 128 else {})
        times = interleave(
            {name: lambda way=way, length=length: way(length) for name, way in ways.items()}, options.rounds
        )
        cells = [
            times[name].milliseconds() if name in times else "-" for name in ("park", "recompute", "replay")
        ]
        rows.append([length, *cells, f"{times['recompute'].median / times['park'].median:.1f}"])
    print(describe_machine())
    print(markdown_table(["tokens", "park, ms", "recompute, ms", "replay, ms", "recompute : park"], rows))
