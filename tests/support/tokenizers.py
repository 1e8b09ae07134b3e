"""Small tokenizers of every kind, trained here."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "def push(self, item):\n    self.items.append(item)\n",
    "naïve café, Grüße, 世界 and 🙂👩‍👩‍👧 together",
    "the cat sat on the mat and the hat",
] * 5


def trained_once(train: Callable[..., tokenizers.Tokenizer]) -> Callable[..., tokenizers.Tokenizer]:
    """A fresh copy of one training per process: the trainers break ties differently every time."""
    train_json = cache(lambda *options: train(*options).to_str())
    return lambda *options: tokenizers.Tokenizer.from_str(train_json(*options))


@trained_once
def byte_level(added: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """As in Llama 3, SmolLM2 and the embedded model."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=sorted(alphabet)))
    backend.add_special_tokens(["<|begin|>", "<|end|>"])
    backend.add_tokens(list(added))
    begin = backend.token_to_id("<|begin|>")
    backend.post_processor = processors.TemplateProcessing("<|begin|> $A", None, [("<|begin|>", begin)])
    return backend


@trained_once
def sentencepiece(strip: bool = True) -> tokenizers.Tokenizer:
    """As in Llama 2 and TinyLlama; without the strip as in Gemma."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special + bytes_, limit_alphabet=24)
    backend.train_from_iterator(TEXTS, trainer)
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in special
    state["added_tokens"] = [token for token in state["added_tokens"] if token["special"]]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return backend


@trained_once
def metaspace_unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>"]
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>")
    )
    return backend
