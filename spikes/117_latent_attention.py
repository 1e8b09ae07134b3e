# Measured at commit 0b01cd4c; runs at HEAD.
"""What do prefill and decode of a model with latent attention take, in this tree and in another?

    git worktree add ../before COMMIT
    python -m spikes.117_latent_attention ../before [--rounds 5] [--keys 1024 4096]

Four layers of DeepSeek-V2-Lite's shape, all with a dense MLP, with random weights and few words. One process for each
tree, on the same core, which run in turns. Prints the processor time of a prompt, and of a
step (the median of a run), and the median of the ratios of the rounds.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from spikes.support.two_trees import begin, compare

SLOTS, DECODED, LAYERS = 8, 32, 4
CONFIG = {  # of deepseek-ai/DeepSeek-V2-Lite, but for vocabulary, layers and experts
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 2048,
    "hidden_size": 2048,
    "intermediate_size": 2816,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(directory):
    """A checkpoint of CONFIG, with random weights of standard deviation 0.02."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    c, draw, tensors = CONFIG, np.random.default_rng(0), {}
    width, heads, latent = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    query = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    shapes = {
        "self_attn.q_proj": (heads * query, width),
        "self_attn.kv_a_proj_with_mqa": (latent + c["qk_rope_head_dim"], width),
        "self_attn.kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), latent),
        "self_attn.o_proj": (width, heads * c["v_head_dim"]),
        "mlp.gate_proj": (c["intermediate_size"], width),
        "mlp.up_proj": (c["intermediate_size"], width),
        "mlp.down_proj": (width, c["intermediate_size"]),
    }

    def add(name, shape):
        values = np.ones(shape) if len(shape) == 1 else 0.02 * draw.standard_normal(shape)
        tensors[f"{name}.weight"] = values.astype(ml_dtypes.bfloat16)

    for name in ("model.embed_tokens", "lm_head"):
        add(name, (c["vocab_size"], width))
    add("model.norm", (width,))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            add(f"model.layers.{layer}.{name}", shape)
        add(f"model.layers.{layer}.self_attn.kv_a_layernorm", (latent,))
        for name in ("input_layernorm", "post_attention_layernorm"):
            add(f"model.layers.{layer}.{name}", (width,))
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(c), "utf-8")


def work(options):
    """Measure a part for each line of standard input, and print its processor seconds."""
    import numpy as np

    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.model_loader.checkpoint import load_weights
    from xla_engine.model_loader.describe import describe
    from xla_engine.model_loader.model_files import open_model
    from xla_engine.sampling_params import SamplingParams

    config = EngineConfig(max_num_seqs=SLOTS, max_model_len=4608, self_check=False, lag=0)
    described = describe(open_model(options.model), config)
    engine = XlaBatchEngine(load_weights(described), None, config)
    draw = np.random.default_rng(0)

    def run(count, length, new):
        """Processor seconds after each step."""
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        for prompt in draw.integers(2, 2048, (count, length)).tolist():
            engine.submit(prompt, params)
        times = [time.process_time()]
        while engine.has_unfinished:
            engine.step()
            times.append(time.process_time())
        return times

    print("ready", flush=True)
    for line in sys.stdin:
        what, keys = line.split()
        if what == "prefill":
            times = run(1, int(keys), 1)
            print(times[-1] - times[0], flush=True)
            continue
        count = int(what.removeprefix("decode"))
        prompts = -(-count * int(keys) // config.call_positions)  # steps that have some
        times = run(count, int(keys), prompts + DECODED)
        steps = [after - before for before, after in pairwise(times[prompts + 1 : prompts + DECODED])]
        print(statistics.median(steps), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="another tree of this repository")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 4096], help="tokens of a prompt")
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        begin(options.before, options.core)
        work(options)
        return
    parts = [f"{what} {keys}" for keys in options.keys for what in ("prefill", "decode1", f"decode{SLOTS}")]
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        command = ["spikes.117_latent_attention", "--core", str(options.core), "--model", directory]
        compare(
            options.before, command, parts, options.rounds, lambda seconds: f"{1000 * seconds:7.1f} ms"
        )


if __name__ == "__main__":
    main()
