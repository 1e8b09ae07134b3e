# Measured at commit b2574150; runs at HEAD.
"""Does a model of 8 billion weights in four bits load and decode within 16 GiB, and how much more than its file is resident?

    python -m spikes.081_eight_billion write /tmp/eight.gguf [--layers 36]    # 4.7 GB of random Q4_0, block by block
    python -m spikes.081_eight_billion run /tmp/eight.gguf gguf-int8 [--tokens 12]

`run` prints one JSON line: the file, resident and peak memory after the start and after a generation, and rates.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np

HIDDEN, MIDDLE, HEADS, KEYS, WIDTH, VOCABULARY = 4096, 12288, 32, 8, 128, 151936  # Qwen3-8B


def write(path, layers):
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_0
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_key_length(WIDTH)
    writer.add_value_length(WIDTH)
    writer.add_rope_dimension_count(WIDTH)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("no_vocab")
    matrices = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    vectors = {"output_norm": HIDDEN}
    for layer in range(layers):
        name = f"blk.{layer}."
        matrices |= {
            name + "attn_q": (HEADS * WIDTH, HIDDEN),
            name + "attn_k": (KEYS * WIDTH, HIDDEN),
            name + "attn_v": (KEYS * WIDTH, HIDDEN),
            name + "attn_output": (HIDDEN, HEADS * WIDTH),
            name + "ffn_gate": (MIDDLE, HIDDEN),
            name + "ffn_up": (MIDDLE, HIDDEN),
            name + "ffn_down": (HIDDEN, MIDDLE),
        }
        vectors |= dict.fromkeys((name + "attn_norm", name + "ffn_norm"), HIDDEN)
        vectors |= dict.fromkeys((name + "attn_q_norm", name + "attn_k_norm"), WIDTH)
    sizes = {name: rows * width // 32 * 18 for name, (rows, width) in matrices.items()}
    for name, (rows, width) in matrices.items():
        shape = (rows, width // 32 * 18)
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.uint8), sizes[name], kind)
    for name, width in vectors.items():
        writer.add_tensor_info(f"{name}.weight", (width,), np.dtype(np.float32), 4 * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    stream = writer.fout[0]
    writer.write_padding(stream, stream.tell())
    blocks = np.random.default_rng(0).integers(0, 256, (1 << 20, 18), np.uint8)
    blocks[:, :2] = np.float16(0.004).view((np.uint8, 2))
    for name in matrices:
        left = sizes[name]
        while left:
            part = min(left, blocks.nbytes)
            stream.write(memoryview(blocks).cast("B")[:part])
            left -= part
        writer.write_padding(stream, sizes[name])
    for width in vectors.values():
        stream.write(np.ones(width, np.float32).tobytes())
        writer.write_padding(stream, 4 * width)
    writer.close()
    print(json.dumps({"weights": sum(r * w for r, w in matrices.values()), "bytes": os.path.getsize(path)}))


def memory():
    """Anonymous and mapped memory of this process in MB, and its peaks. What is mapped of a file can be dropped at any time."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmHWM", "VmRSS", "Rss"))
    }
    return {name: int(value) * 1024 // 10**6 for name, value in found.items()}


def run(path, quantization, tokens):
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.sampling_params import SamplingParams

    report = {"file": os.path.getsize(path) // 10**6, "before": memory()}
    begun = time.perf_counter()
    config = EngineConfig(
        max_num_seqs=2,
        max_model_len=512,
        quantization=quantization,
        enable_prefix_caching=False,
        self_check=False,
    )
    with XlaBatchEngine.from_pretrained(path, config) as engine:
        report |= {"start_seconds": round(time.perf_counter() - begun, 1), "started": memory()}
        prompt = [7 * place % 100000 + 5 for place in range(64)]
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        begun = time.perf_counter()
        (done,) = engine.drain()
        times = done.metrics.token_times
        report |= {
            "first_token_seconds": round(time.perf_counter() - begun - (times[-1] - times[0]), 2),
            "decode": round((tokens - 1) / (times[-1] - times[0]), 2),
            "tokens": list(done.outputs[0].token_ids),
            "after": memory(),
            "kv": engine.runner.kv_bytes_per_token * 2 * 512 // 10**6,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "run"))
    parser.add_argument("path")
    parser.add_argument("quantization", nargs="?")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--tokens", type=int, default=12)
    options = parser.parse_args()
    if options.what == "write":
        write(options.path, options.layers)
    else:
        run(options.path, options.quantization, options.tokens)
