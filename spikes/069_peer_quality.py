# Measured at commit d9d3a8af; runs at HEAD.
"""What do peers lose on the tokens of a file of logits, in the forms that the benchmark times?

    python -m spikes.069_peer_quality BASE.logits PYTHON llama.cpp MODEL.gguf [WINDOWS]
    python -m spikes.069_peer_quality BASE.logits PYTHON openvino DIRECTORY [WINDOWS]

PYTHON is an interpreter with llama-cpp-python, or with openvino. BASE.logits: `xla-engine perplexity --save-logits`.
"""

import argparse
import json
import subprocess
import sys

import numpy as np


def main(base_path, python, kind, path, windows=None):
    from xla_engine.perplexity.figures import Comparison, Perplexity, divergence, log_softmax
    from xla_engine.perplexity.logits_file import LogitsFile

    found = []
    with LogitsFile(base_path) as base:
        count, size = base.tokens.shape
        count = min(count, int(windows or count))
        peer = subprocess.Popen(
            [python, __file__, "serve", kind, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for window in range(count):
            tokens = base.tokens[window].astype(np.int64)
            peer.stdin.write(np.int64(size).tobytes() + tokens.tobytes())
            peer.stdin.flush()
            (vocabulary,) = np.frombuffer(peer.stdout.read(8), np.int64)
            rows = size - 1 - size // 2
            logits = np.frombuffer(peer.stdout.read(4 * rows * vocabulary), np.float32).reshape(
                rows, vocabulary
            )
            for place in range(size // 2, size - 1):
                target = int(tokens[place + 1])
                own = log_softmax(logits[place - size // 2])
                row = base.row(window, place - size // 2, target)
                found.append((-own[target], row.nll, divergence(row.log_probs, own), own.argmax() == row.top))
        peer.stdin.close()
        peer.wait()
    nll, base_nll, kld, same = np.array(found).T
    print(
        path,
        json.dumps(
            Perplexity.of(nll).to_json() | {"against": Comparison.of(nll, base_nll, kld, same).to_json()}
        ),
    )


def serve(kind, path):
    """Answers tokens on standard input with logits of the second half of their places."""
    import os

    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    forward = {"llama.cpp": llama, "openvino": openvino_model}[kind](path)
    while head := sys.stdin.buffer.read(8):
        (size,) = np.frombuffer(head, np.int64)
        tokens = np.frombuffer(sys.stdin.buffer.read(8 * size), np.int64)
        logits = np.ascontiguousarray(forward(tokens), np.float32)
        out.write(np.int64(logits.shape[1]).tobytes() + logits.tobytes())
        out.flush()


def llama(path):
    import ctypes

    import llama_cpp as cpp

    cpp.llama_backend_init()
    model = cpp.llama_model_load_from_file(path.encode(), cpp.llama_model_default_params())
    options = cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.n_seq_max, options.n_threads, options.n_threads_batch = 1, 2, 2
    context = cpp.llama_init_from_model(model, options)
    memory = cpp.llama_get_memory(context)
    vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    batch = cpp.llama_batch_init(512, 0, 1)

    def forward(tokens):
        size = len(tokens)
        cpp.llama_memory_seq_rm(memory, 0, -1, -1)
        for at, token in enumerate(tokens.tolist()):
            batch.token[at], batch.pos[at] = token, at
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            batch.logits[at] = size // 2 <= at < size - 1
        batch.n_tokens = size
        assert cpp.llama_decode(context, batch) == 0
        rows = size - 1 - size // 2
        pointer = ctypes.cast(cpp.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (rows, vocabulary))

    return forward


def openvino_model(path):
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 2}
    if "int" in path:
        hints["KV_CACHE_PRECISION"] = "u8"
    request = openvino.Core().compile_model(f"{path}/openvino_model.xml", "CPU", hints).create_infer_request()

    def forward(tokens):
        size = len(tokens)
        request.reset_state()
        given = {"input_ids": tokens[None], "attention_mask": np.ones((1, size), np.int64)}
        given |= {"position_ids": np.arange(size)[None], "beam_idx": np.zeros(1, np.int32)}
        logits = request.infer(given)["logits"][0]
        return logits[size // 2 : size - 1]

    return forward


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", help="as above")
    first, *others = parser.parse_args().words
    if first == "serve":
        serve(*others)
    else:
        main(first, *others)
