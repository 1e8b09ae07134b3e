# Measured at commit e23fa38d; runs at HEAD.
"""What do prefill and decode of models with recurrent layers take, in this tree and in another?

    git worktree add ../before COMMIT
    python -m spikes.115_recurrent_layers ../before [--rounds 5] [--quantization int8]

One process for each tree, on the same core, which run in turns. Prints processor seconds, and the median of the ratios
of the rounds.
"""

import argparse
import sys
import time
from pathlib import Path

from spikes.support.two_trees import begin, compare

SLOTS, DECODED = 8, 64
SHAPES = ("Qwen3.5-0.8B", "Mamba-2")


def model(name):
    """Four layers of a published shape with few words, which no state knows."""
    from xla_engine.graphs.config import FULL, LINEAR, DeltaForm, MambaForm, ModelConfig

    shared = dict(
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
    )
    if name == "Mamba-2":  # heads of the published 370M, beside an MLP
        return ModelConfig(
            **shared | {"intermediate_size": 2048},
            layer_types=("mamba", "mamba", "mamba", FULL),
            mamba=MambaForm(
                value_heads=32, value_dim=64, key_heads=1, key_dim=128, kernel=4, norm_eps=1e-5
            ),
        )
    return ModelConfig(
        **shared,
        qk_norm="head",
        attn_output_gate=True,
        layer_types=(LINEAR, LINEAR, LINEAR, FULL),
        delta=DeltaForm(
            key_heads=16, value_heads=16, key_dim=128, value_dim=128, kernel=4, norm_eps=1e-6
        ),
    )


def work(options):
    """Measure a part for each line of standard input, and print its processor seconds."""
    import numpy as np

    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.model_loader.checkpoint import random_checkpoint
    from xla_engine.sampling_params import SamplingParams

    draw = np.random.default_rng(0)
    config = EngineConfig(
        max_num_seqs=SLOTS, max_model_len=4096, self_check=False, lag=0, quantization=options.quantization
    )
    engines = {name: XlaBatchEngine(random_checkpoint(model(name)), None, config) for name in SHAPES}
    print("ready", flush=True)
    for line in sys.stdin:
        name, what = line.strip().split()
        count, length, new = (1, options.prompt, 1) if what == "prefill" else (SLOTS, 8, DECODED)
        if what == "decode1":
            count = 1
        prompts = draw.integers(0, 2048, (count, length)).tolist()
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        began = time.process_time()
        for prompt in prompts:
            engines[name].submit(prompt, params)
        engines[name].drain()
        print(time.process_time() - began, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another tree of this repository")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--quantization", help="as in EngineConfig")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        begin(options.before, options.core)
        work(options)
        return
    parts = [f"{shape} {what}" for shape in SHAPES for what in ("prefill", "decode", "decode1")]
    command = ["spikes.115_recurrent_layers", *sys.argv[2:], "--work"]
    compare(options.before, command, parts, options.rounds, "{:7.3f} s".format)


if __name__ == "__main__":
    main()
