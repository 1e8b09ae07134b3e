# Measured at commit fc088121; rewritten since, runs at HEAD.
"""What do saved states of recurrent layers save, and what do they cost where nothing hits?

    python -m spikes.085_recurrent_prefix_cache [--prefix 2048] [--rounds 5] [--prefixes 6]

Prints the time to the first token of a prompt with a common prefix of whole intervals and 16 tokens of its own, by the
clock and of the processor: without states, with states that are saved beside slots and beside blocks, and read from
files; and the time of prompts without a common prefix. Rounds take turns. Then requests with several prefixes come in
turn, to slots and to a pool of blocks in the same memory: the share of prompt tokens that each finds.
"""

import argparse
import random
import statistics
import tempfile
import time

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import FULL, LINEAR, DeltaForm, ModelConfig
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.sampling_params import SamplingParams

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
    delta=DeltaForm(key_heads=16, value_heads=16, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6),
)
PARAMS = SamplingParams(temperature=0, max_tokens=1, logprobs=0)


SLOTS, LENGTH, BLOCK = 4, 4096, 64


def opened(mode, **options):
    config = EngineConfig(
        max_num_seqs=SLOTS, max_model_len=LENGTH, self_check=False, lag=0, mamba_cache_mode=mode, **options
    )
    return XlaBatchEngine(random_checkpoint(MODEL), None, config)


def timed(engine, prompt):
    """Milliseconds by the clock and of the processor, and the output."""
    began, of_cores = time.perf_counter(), time.process_time()
    engine.submit(prompt, PARAMS)
    (output,) = engine.drain()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.process_time() - of_cores), output


def shown(values):
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def first_tokens(engines, tokens, size, rounds):
    """Print the time to the first token of a prompt whose first `size` tokens are known."""
    prefix = tokens(size)
    for name, engine in engines.items():
        for _ in range(
            1 if name == "no states" else 2
        ):  # files are written when a second prompt begins with a state
            timed(engine, [*prefix, *tokens(16)])
    engines["files"].state.prefixes.storage.flush()
    times, bits = {}, {}
    for turn in range(rounds):
        shared, alone = [*prefix, *tokens(16)], tokens(size + 16)
        cases = [
            (name, engine, shared, 0 if name == "no states" else size) for name, engine in engines.items()
        ]
        cases.append(("blocks, nothing found", engines["blocks"], alone, 0))
        for name, engine, prompt, cached in random.Random(turn).sample(cases, len(cases)):
            if name == "files":
                engine.reset_prefix_cache()
            clock, processor, output = timed(engine, prompt)
            assert output.num_cached_tokens == cached, (name, output)
            times.setdefault(name, []).append((clock, processor))
            if prompt is shared:
                bits.setdefault(turn, output.outputs[0])
                assert bits[turn] == output.outputs[0], "a bit differs"
    for name, found in times.items():
        clock, processor = zip(*found, strict=True)
        print(f"first token, {name}: {shown(clock)} ms, of the processor {shown(processor)} ms", flush=True)


def shares(engines, tokens, prefixes, rounds):
    """Print how many prompt tokens are found if requests with several prefixes of one interval come in turn."""
    stems = [tokens(1024) for _ in range(prefixes)]
    found = {name: [] for name in ("slots", "blocks")}
    for name in found:
        engines[name].reset_prefix_cache()
    for turn in range(rounds + 1):
        for stem in stems:
            prompt = [*stem, *tokens(16)]
            for name, cached in found.items():
                _, processor, output = timed(engines[name], prompt)
                if turn:
                    cached.append((output.num_cached_tokens / len(prompt), processor))
    for name, cached in found.items():
        share, processor = (statistics.fmean(column) for column in zip(*cached, strict=True))
        print(
            f"{prefixes} prefixes in turn, {name}: {share:.0%} found, {processor:.0f} ms a request",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefixes", type=int, default=6)
    options = parser.parse_args()
    draw = random.Random(1)

    def tokens(count):
        return [draw.randrange(MODEL.vocab_size) for _ in range(count)]

    pool = {"num_blocks": SLOTS * LENGTH // BLOCK, "block_size": BLOCK}
    with (
        tempfile.TemporaryDirectory() as directory,
        opened("none") as off,
        opened("align") as slots,
        opened("align", **pool) as blocks,
        opened("align", **pool, prefix_cache_dir=directory) as files,
    ):
        engines = {"no states": off, "slots": slots, "blocks": blocks, "files": files}
        first_tokens(engines, tokens, options.prefix, options.rounds)
        shares(engines, tokens, options.prefixes, min(options.rounds, 2))


main()
