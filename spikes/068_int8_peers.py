# Measured at commit 5b291c3; runs at HEAD.
"""What does llama.cpp lose on the tokens of a file of logits, from GGUF files of several types?

    python -m spikes.068_int8_peers quality MODEL.gguf BASE.logits [--bos ID]
    python -m spikes.068_int8_peers rewrite MODEL.gguf TYPE OUT.gguf      (TYPE: Q8_0, BF16)

Needs `pip install cyllama==0.7.0`, a wheel with llama.cpp inside, beside the engine.
"""

import argparse
import json
import os

import numpy as np


def opened(path, positions):
    import cyllama.llama.llama_cpp as llama

    params = llama.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = positions, 512, 512, 1
    params.n_threads = params.n_threads_batch = 1
    model = llama.LlamaModel(path)
    return llama.LlamaContext(model, params), llama.LlamaBatch(n_tokens=512, embd=0, n_seq_max=1)


def quality(path, base_path, bos=None):
    """Figures of `xla-engine perplexity`, over the windows that the file of logits has."""
    from xla_engine.perplexity.figures import Comparison, Perplexity, divergence, log_softmax
    from xla_engine.perplexity.logits_file import LogitsFile

    found = []
    with LogitsFile(base_path) as base:
        windows, size = base.tokens.shape
        context, batch = opened(path, size)
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
    print(
        json.dumps(
            {**Perplexity.of(nll).to_json(), "against": Comparison.of(nll, base_nll, kld, same).to_json()}
        )
    )


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("quality", "rewrite"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--bos", type=int)
    given = parser.parse_args()
    if given.command == "quality":
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what llama.cpp prints of each tensor
        quality(*given.files, given.bos)
    else:
        rewrite(*given.files)
