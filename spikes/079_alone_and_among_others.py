# Measured at commit 4a605f9e; runs at HEAD.
"""Does a greedy request have the same tokens and log-probabilities alone and among 29 others, here and in llama.cpp?

    python -m spikes.079_alone_and_among_others ours MODEL.gguf            (writes prompts.json)
    python spikes/079_alone_and_among_others.py llama.cpp MODEL.gguf       (reads it; `pip install cyllama numpy`)

30 short prompts, 24 new tokens each. A hash is SHA-256 over a request's token ids and the bits of their
log-probabilities (float32).
"""

import argparse
import hashlib
import json
import os

import numpy as np

TOKENS, FILE = 24, "prompts.json"
THINGS = (
    "capital of France",
    "boiling point of water",
    "largest planet",
    "author of Hamlet",
    "speed of light",
)
FORMS = (
    "The {} is",
    "What is the {}?",
    "Tell me about the {}.",
    "Q: Name the {}.\nA:",
    "Everybody knows the {},",
    "- {}:",
)
PROMPTS = [form.format(thing) for form in FORMS for thing in THINGS]


def digest(tokens, logprobs):
    content = np.array(tokens, np.int64).tobytes() + np.array(logprobs, np.float32).tobytes()
    return hashlib.sha256(content).hexdigest()[:8]


def ours(path):
    from xla_engine import LLM, SamplingParams

    with LLM(path, max_num_seqs=32, max_model_len=512) as llm:
        prompts = [list(llm.get_tokenizer().encode(text)) for text in PROMPTS]
        with open(FILE, "w") as file:
            json.dump(prompts, file)
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)

        def run(some):
            found = llm.generate([{"prompt_token_ids": each} for each in some], params, use_tqdm=False)
            return [(list(each.outputs[0].token_ids), list(each.outputs[0].logprobs)) for each in found]

        return [run([each])[0] for each in prompts], run(prompts)


def llama_cpp(path):
    import cyllama.llama.llama_cpp as llama

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what it prints of each tensor
    with open(FILE) as file:
        prompts = json.load(file)
    params = llama.LlamaContextParams()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 32 * 512, 2048, 512, 32
    params.n_threads = params.n_threads_batch = 1
    context = llama.LlamaContext(llama.LlamaModel(path), params)
    batch = llama.LlamaBatch(n_tokens=2048, embd=0, n_seq_max=32)

    def run(some):
        context.kv_cache_clear()
        found = [([], []) for _ in some]
        fed = [list(enumerate(each)) for each in some]
        for _ in range(TOKENS):
            batch.clear()
            ends, count = [], 0
            for row, tokens in enumerate(fed):
                for place, token in tokens:
                    batch.add(token, place, [row], place == tokens[-1][0])
                count += len(tokens)
                ends.append(count - 1)
            assert context.decode(batch) == 0
            for row, end in enumerate(ends):
                logits = np.array(context.get_logits_ith(end), np.float32)
                wide = logits.astype(np.float64) - logits.max()
                token = int(logits.argmax())
                found[row][0].append(token)
                found[row][1].append(wide[token] - np.log(np.exp(wide).sum()))
                fed[row] = [(fed[row][-1][0] + 1, token)]
        return found

    return [run([each])[0] for each in prompts], run(prompts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("who", choices=("ours", "llama.cpp"))
    parser.add_argument("model")
    given = parser.parse_args()
    who, model = given.who, given.model
    alone, together = {"ours": ours, "llama.cpp": llama_cpp}[who](model)
    pairs = [(digest(*one), digest(*other)) for one, other in zip(alone, together, strict=True)]
    words = [one[0] != other[0] for one, other in zip(alone, together, strict=True)]
    print(f"{who}: {PROMPTS[0]!r}: alone {pairs[0][0]}, among 29 others {pairs[0][1]}")
    print(
        f"{who}: of 30 requests {sum(a != b for a, b in pairs)} have other hashes, {sum(words)} other tokens"
    )
