# Measured at commit fc088121; runs at HEAD.
"""What do saved states of recurrent layers save, and what do they cost where nothing hits?

    python -m spikes.085_recurrent_prefix_cache [--prefix 2048] [--rounds 5]

Prints the time to the first token of a prompt with a common prefix of whole intervals and 16 tokens of its own, with
states that are saved and without, and the time of prompts without a common prefix; rounds take turns.
"""

import argparse
import random
import statistics
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


def opened(mode):
    config = EngineConfig(max_num_seqs=4, max_model_len=4096, self_check=False, lag=0, mamba_cache_mode=mode)
    return XlaBatchEngine(random_checkpoint(MODEL), None, config)


def timed(engine, prompt):
    began = time.perf_counter()
    engine.submit(prompt, PARAMS)
    (output,) = engine.drain()
    return 1e3 * (time.perf_counter() - began), output


def shown(values):
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefix", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    draw = random.Random(1)

    def tokens(count):
        return [draw.randrange(MODEL.vocab_size) for _ in range(count)]

    prefix = tokens(options.prefix)
    with opened("none") as off, opened("align") as on:
        timed(on, [*prefix, *tokens(16)])
        hit, miss, without, bits = [], [], [], {}
        for turn in range(options.rounds):
            shared, alone = [*prefix, *tokens(16)], tokens(options.prefix + 16)
            for found, engine, prompt, cached in random.Random(turn).sample(
                [
                    (hit, on, shared, options.prefix),
                    (without, off, shared, 0),
                    (miss, on, alone, 0),
                ],
                3,
            ):
                took, output = timed(engine, prompt)
                assert output.num_cached_tokens == cached, output
                found.append(took)
                if prompt is shared:
                    bits.setdefault(turn, output.outputs[0])
                    assert bits[turn] == output.outputs[0], "a bit differs"
        print(f"first token in ms: found {shown(hit)}, not found {shown(miss)}, no states {shown(without)}")


main()
