"""Finding 068: precisions of this engine, and llama.cpp beside it, on a GGUF file and what is made of it.

    python -m spikes.068_int8_peers ours MODEL.gguf
    python -m spikes.068_int8_peers quality MODEL.gguf BASE.logits [--bos ID]
    python -m spikes.068_int8_peers rates MODEL.gguf
    python -m spikes.068_int8_peers rewrite MODEL.gguf TYPE OUT.gguf      (TYPE: Q8_0, BF16)

Needs `pip install cyllama==0.7.0`, a wheel with llama.cpp inside, beside the engine.
"""

import json
import os
import resource
import subprocess
import sys
import time

import numpy as np


def opened(path, positions, sequences=1, threads=2):
    import cyllama.llama.llama_cpp as llama

    params = llama.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = positions * sequences, 512, 512, sequences
    params.n_threads = params.n_threads_batch = threads
    model = llama.LlamaModel(path)
    return llama.LlamaContext(model, params), llama.LlamaBatch(n_tokens=512, embd=0, n_seq_max=sequences)


def quality(path, base_path, bos=None):
    """Figures of `xla-engine perplexity`, over the windows that the file of logits has."""
    from xla_engine.perplexity.figures import Comparison, Perplexity, divergence, log_softmax
    from xla_engine.perplexity.logits_file import LogitsFile

    found = []
    with LogitsFile(base_path) as base:
        windows, size = base.tokens.shape
        context, batch = opened(path, size, threads=1)
        for window in range(windows):
            tokens = base.tokens[window].tolist()
            fed = tokens if bos is None else [int(bos), *tokens[1:]]
            context.kv_cache_clear()
            batch.clear()
            for place, token in enumerate(fed):
                batch.add(token, place, [0], size // 2 <= place < size - 1)
            assert context.decode(batch) == 0
            for place in range(size // 2, size - 1):
                target = tokens[place + 1]
                own = log_softmax(np.array(context.get_logits_ith(place), np.float32))
                row = base.row(window, place - size // 2, target)
                found.append((-own[target], row.nll, divergence(row.log_probs, own), own.argmax() == row.top))
    nll, base_nll, kld, same = np.array(found).T
    print(json.dumps({**Perplexity.of(nll).to_json(), "against": Comparison.of(nll, base_nll, kld, same).to_json()}))


PRECISIONS = {"bf16": None, "int8": "int8", "gguf": "gguf", "float32": None}


def serve(path, precision, rows, prompt=16, new=48):
    """A process of `ours`: one job of `rows` requests for each line of input."""
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.sampling_params import SamplingParams

    rows = int(rows)
    dtype = "float32" if precision == "float32" else "bfloat16"
    sizes = EngineConfig(max_num_seqs=rows, max_model_len=128, enable_prefix_caching=False, self_check=False,
                         dtype=dtype, quantization=PRECISIONS[precision])
    engine = XlaBatchEngine.from_pretrained(path, sizes)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(10, 400, prompt).tolist() for _ in range(rows)]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    print("ready", flush=True)
    for _ in sys.stdin:
        for each in prompts:
            engine.submit(each, params)
        began = time.perf_counter()
        while engine.has_unfinished:
            engine.step(only_finished=True)
        seconds = time.perf_counter() - began
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, flush=True)


def ours(path, widths="1,8,32", rounds=5, new=48):
    """New tokens a second of whole jobs, prompts of 16 tokens: medians (least-most) of interleaved rounds."""
    for rows in map(int, widths.split(",")):
        processes = {}
        for name in PRECISIONS:
            words = [sys.executable, "-m", __spec__.name, "serve", path, name, str(rows)]
            processes[name] = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for each in processes.values():
            assert each.stdout.readline() == "ready\n"
        found = {name: [] for name in processes}
        for turn in range(rounds + 1):
            for name, each in processes.items():
                each.stdin.write("\n")
                each.stdin.flush()
                seconds, peak = map(float, each.stdout.readline().split())
                if turn:
                    found[name].append((rows * new / seconds, peak))
        for name, each in processes.items():
            each.stdin.close()
            speeds, peaks = zip(*found[name], strict=True)
            print(f"B = {rows}, {name}: {np.median(speeds):.0f} tok/s ({min(speeds):.0f}-{max(speeds):.0f}), "
                  f"peak {max(peaks):.0f} MiB", flush=True)


def rates(path, prompt=16, new=48):
    """Decoded tokens a second of 1, 8 and 32 sequences, the best of three jobs; peak memory in MiB."""
    draw = np.random.default_rng(0)
    for rows in (1, 8, 32):
        context, batch = opened(path, 128, rows)
        best = 0.0
        for _ in range(3):
            context.kv_cache_clear()
            batch.clear()
            for row in range(rows):
                for place in range(prompt):
                    batch.add(int(draw.integers(10, 400)), place, [row], place + 1 == prompt)
            assert context.decode(batch) == 0
            began = time.perf_counter()
            for step in range(new):
                batch.clear()
                for row in range(rows):
                    batch.add(int(draw.integers(10, 400)), prompt + step, [row], True)
                assert context.decode(batch) == 0
            best = max(best, rows * new / (time.perf_counter() - began))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"B = {rows}: {best:.0f} tok/s, peak {peak:.0f} MiB", flush=True)


def rewrite(path, name, out):
    """The file's own weights in another type, as far as they are matrices."""
    import gguf
    from gguf.quants import dequantize, quantize

    kind = gguf.GGMLQuantizationType[name]
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value_type, *inner = field.types
        writer.add_key_value(field.name, field.contents(), value_type, inner[-1] if inner else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command in ("quality", "rates"):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what llama.cpp prints of each tensor
    {"ours": ours, "serve": serve, "quality": quality, "rates": rates, "rewrite": rewrite}[command](*[word for word in words if word != "--bos"])
