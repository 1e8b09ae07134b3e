# Frozen: runs at commit 590d0eb.
"""Does llama.cpp read the tests' GGUF files as we do: the same greedy tokens in float32, the same token ids of a text?

The files are those of `tests/model_loader/test_gguf.py`: tiny models of every architecture, written by the gguf
library, with tokenizers of every kind. llama.cpp runs as a process of an interpreter that has llama-cpp-python
(findings/012 tells how to install it).

    python -m spikes.024_gguf_llama_cpp --python PATH
"""

# %%
from __future__ import annotations

import argparse
import ctypes
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path("tests/golden")
MODELS = {  # golden model -> architecture of llama.cpp
    "gqa_tied": "llama",
    "untied_odd_heads": "llama",
    "llama3_rope": "llama",
    "families/llama_linear": "llama",
    "families/llama_yarn": "llama",
    "families/mixtral": "llama",
    "families/smollm3": "smollm3",
    "families/qwen2": "qwen2",
    "families/qwen3": "qwen3",
    "families/olmo2": "olmo2",
    "families/granite": "granite",
    "families/granite_bias": "granite",
    "families/phi3_long": "phi3",
    "families/cohere": "command-r",
    "families/gemma": "gemma",
    "families/gemma2": "gemma2",
    "families/gemma3": "gemma3",
}
TOKENS, TEXTS = 48, 400
WORDS = [
    "the",
    "cat",
    "sat",
    "mat",
    "naïve",
    "café",
    "def",
    "append",
    "1234",
    "I'll",
    "DON'T",
    "(",
    ")",
    ":",
    "=",
]
LETTERS = "aehnstcd '\n\t.,世é🙂09ABC"


# %%
def text(draw: random.Random) -> str:
    """Words with odd spaces, or letters of all kinds."""
    if draw.random() < 0.5:
        return "".join(draw.choice(LETTERS) for _ in range(draw.randrange(1, 40)))
    return "".join(draw.choice([*WORDS, " ", "  ", "\n"]) for _ in range(draw.randrange(1, 14)))


def write_models(folder: Path) -> list[dict[str, Any]]:
    """Greedy tokens of our engine for each model, and where its file is."""
    import numpy as np

    from tests.support.gguf_files import write_gguf
    from xla_engine.config import EngineConfig
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.sampling_params import SamplingParams

    config = EngineConfig(
        max_num_seqs=8, max_model_len=256, dtype="float32", prefill_lanes=(2,), self_check=False
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = []
    for name, arch in MODELS.items():
        path = write_gguf(
            GOLDEN / name,
            folder / f"{name.replace('/', '_')}.gguf",
            arch=arch,
            extra={"vocab_size": 199},
        )
        prompts = np.load(GOLDEN / name / "golden.npz")["prompts"]
        prompt = [int(token) for token in prompts[0] if token >= 0]
        with XlaBatchEngine.from_pretrained(path, config) as engine:
            engine.submit(prompt, params)
            (output,) = engine.drain()
        tokens = list(output.outputs[0].token_ids)
        found.append({"name": f"{name} ({arch})", "path": str(path), "prompt": prompt, "tokens": tokens})
        print(f"{name}: {len(tokens)} tokens", file=sys.stderr)
    return found


def write_tokenizers(folder: Path) -> list[dict[str, Any]]:
    """Token ids of random texts for each kind of tokenizer."""
    from tests.model_loader import test_gguf_tokenizer as kinds

    byte_level, draw = kinds.byte_level(), random.Random(0)
    fills = {
        "SentencePiece": kinds.fill_sentencepiece(kinds.sentencepiece(True), prefix=True),
        "SentencePiece, no prefix": kinds.fill_sentencepiece(kinds.sentencepiece(False), prefix=False),
    }
    for pre in ("gpt-2", "llama-bpe", "qwen2", "smollm", "gpt-4o", "tekken", "dbrx", "refact", "starcoder"):
        fills[f"byte-level, {pre}"] = kinds.fill_byte_level(byte_level, pre)
    found = []
    for number, (name, fill) in enumerate(fills.items()):
        path = folder / f"tokenizer{number}.gguf"
        backend = kinds.rebuilt(path, fill)
        texts = [text(draw) for _ in range(TEXTS)]
        ids = [backend.encode(each, add_special_tokens=False).ids for each in texts]
        found.append({"name": name, "path": str(path), "texts": texts, "ids": ids})
    return found


# %%
def ask_llama_cpp() -> None:
    """In the other interpreter: JSON on standard input, equal counts on standard output."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    quiet = lib.llama_log_callback(lambda level, message, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    asked = json.load(sys.stdin)
    equal = {}
    for case in asked["models"]:
        model = lib.llama_model_load_from_file(case["path"].encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 512
        options.type_k = options.type_v = 0  # float32, and attention in it
        options.flash_attn_type = 0
        context = lib.llama_init_from_model(model, options)
        vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        batch, tokens, fresh, position = lib.llama_batch_init(512, 0, 1), [], case["prompt"], 0
        while len(tokens) < len(case["tokens"]):
            batch.n_tokens = len(fresh)
            for at, token in enumerate(fresh):
                batch.token[at], batch.pos[at], batch.logits[at] = token, position + at, at == len(fresh) - 1
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            assert lib.llama_decode(context, batch) == 0
            position += len(fresh)
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (vocabulary,))
            fresh = [int(logits.argmax())]
            tokens += fresh
        equal[case["name"]] = sum(a == b for a, b in zip(tokens, case["tokens"], strict=True))
        lib.llama_free(context)
        lib.llama_model_free(model)
    for case in asked["tokenizers"]:
        options = lib.llama_model_default_params()
        options.vocab_only = True
        model = lib.llama_model_load_from_file(case["path"].encode(), options)
        vocabulary, buffer = lib.llama_model_get_vocab(model), (ctypes.c_int32 * 1000)()
        same = 0
        for each, ids in zip(case["texts"], case["ids"], strict=True):
            raw = each.encode()
            count = lib.llama_tokenize(vocabulary, raw, len(raw), buffer, 1000, False, False)
            same += list(buffer[:count]) == ids
        equal[case["name"]] = same
    print(json.dumps(equal))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        ask_llama_cpp()
        return
    with tempfile.TemporaryDirectory() as name:
        asked = {"models": write_models(Path(name)), "tokenizers": write_tokenizers(Path(name))}
        command = [arguments.python or sys.executable, __file__, "--child"]
        answer = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True)
    equal = json.loads(answer.stdout.splitlines()[-1])
    from spikes.support.timing import markdown_table

    models = [[case["name"], f"{equal[case['name']]} of {TOKENS}"] for case in asked["models"]]
    print(markdown_table(["model", "greedy tokens equal"], models))
    texts = [[case["name"], f"{equal[case['name']]} of {TEXTS}"] for case in asked["tokenizers"]]
    print(markdown_table(["tokenizer", "texts with equal ids"], texts))
    worst = min(equal[case["name"]] / TOKENS for case in asked["models"])
    print(json.dumps({"spike": "024", "equal": worst == 1 and min(equal.values()) >= TOKENS}))


if __name__ == "__main__":
    main()
