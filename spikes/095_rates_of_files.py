# Measured at commit c3560ea1; runs at HEAD.
"""How fast is a GGUF file in each form that an engine can keep it in? All engines in one process, in turns.

    python -m spikes.095_rates_of_files write qwen3-4b /tmp/four.gguf        # random Q4_0 of that shape, block by block
    python -m spikes.095_rates_of_files run FILE.gguf --forms bf16 gguf gguf-int8 [--batches 1 8 32] [--rounds 4]

`run` prints one JSON line: medians of decode and prefill tokens per second and their ratios to the first form, taken
turn by turn; what the machine reads per second, and the share of it that a decode step of one row reads of the file.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np

# hidden size, intermediate size, layers, heads, key and value heads, head size, vocabulary; both have tied heads
SHAPES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151936),
}


def write(shape, path):
    import gguf

    hidden, middle, layers, heads, keys, width, vocabulary = SHAPES[shape]
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(middle)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("no_vocab")
    matrices = {"token_embd": (vocabulary, hidden)}
    vectors = {"output_norm": hidden}
    for layer in range(layers):
        name = f"blk.{layer}."
        matrices |= {
            name + "attn_q": (heads * width, hidden),
            name + "attn_k": (keys * width, hidden),
            name + "attn_v": (keys * width, hidden),
            name + "attn_output": (hidden, heads * width),
            name + "ffn_gate": (middle, hidden),
            name + "ffn_up": (middle, hidden),
            name + "ffn_down": (hidden, middle),
        }
        vectors |= dict.fromkeys((name + "attn_norm", name + "ffn_norm"), hidden)
        vectors |= dict.fromkeys((name + "attn_q_norm", name + "attn_k_norm"), width)
    kind = gguf.GGMLQuantizationType.Q4_0
    sizes = {name: rows * columns // 32 * 18 for name, (rows, columns) in matrices.items()}
    for name, (rows, columns) in matrices.items():
        writer.add_tensor_info(
            f"{name}.weight", (rows, columns // 32 * 18), np.dtype(np.uint8), sizes[name], kind
        )
    for name, columns in vectors.items():
        writer.add_tensor_info(f"{name}.weight", (columns,), np.dtype(np.float32), 4 * columns)
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
    for columns in vectors.values():
        stream.write(np.ones(columns, np.float32).tobytes())
        writer.write_padding(stream, 4 * columns)
    writer.close()


def turn(engine, prompts, new):
    """Decode and prefill tokens per second of requests that come at once."""
    from xla_engine.sampling_params import SamplingParams

    began = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    finished = engine.drain()
    took = time.perf_counter() - began
    spans = [(each.metrics.token_times[0], each.metrics.token_times[-1]) for each in finished]
    last_first = max(first for first, _ in spans)
    end = max(last for _, last in spans)
    # tokens after the last first token, over their time: no prompt is read in it
    later = sum(sum(moment > last_first for moment in each.metrics.token_times) for each in finished)
    first_after = took - (end - last_first)
    return later / (end - last_first), sum(map(len, prompts)) / first_after


def run(path, forms, batches, rounds, prompt, new):
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.tools.bench import limits

    engines = {}
    for form in forms:
        config = EngineConfig(
            max_num_seqs=max(batches),
            max_model_len=-(-(prompt + new) // 64) * 64,
            quantization=None if form == "bf16" else form,
            enable_prefix_caching=False,
            self_check=False,
        )
        engines[form] = XlaBatchEngine.from_pretrained(path, config)
    draw = np.random.default_rng(0)
    report = {"file": os.path.basename(path), "megabytes": os.path.getsize(path) / 1e6}
    report["read_gb_s"] = round(limits.read_bandwidth(2), 1)
    for batch in batches:
        prompts = draw.integers(5, 40000, (batch, prompt)).tolist()
        found = {form: [] for form in forms}
        for form in forms:
            turn(engines[form], prompts, 4)
        others = []
        for number in range(rounds):
            for form in forms if number % 2 == 0 else reversed(forms):
                time.sleep(0.2)
                began, busy, own = time.perf_counter(), limits.busy_seconds(), time.process_time()
                found[form].append(turn(engines[form], prompts, new))
                took = time.perf_counter() - began
                taken = limits.busy_seconds() - busy - (time.process_time() - own)
                others.append(max(taken, 0) / took / limits.core_count())
        for form in forms:
            decode, prefill = zip(*found[form], strict=True)
            against = list(zip(*found[forms[0]], strict=True))
            report[f"{form} B={batch}"] = {
                "decode": round(statistics.median(decode), 1),
                "decode_ratio": round(statistics.median(np.divide(decode, against[0])), 3),
                "prefill": round(statistics.median(prefill)),
                "prefill_ratio": round(statistics.median(np.divide(prefill, against[1])), 3),
                "file_read_share": round(
                    statistics.median(decode) / batch * report["megabytes"] / 1e3 / report["read_gb_s"], 3
                ),
            }
        report[f"others B={batch}"] = round(max(others), 3)
        print(json.dumps(report), flush=True)
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("write", "run"))
    parser.add_argument("words", nargs="+")
    parser.add_argument("--forms", nargs="+", default=["bf16", "gguf", "gguf-int8"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=48)
    options = parser.parse_args()
    if options.what == "write":
        write(*options.words)
    else:
        run(options.words[0], options.forms, options.batches, options.rounds, options.prompt, options.new)
