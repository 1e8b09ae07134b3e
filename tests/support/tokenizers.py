"""Small tokenizers of every kind, trained here."""

from __future__ import annotations

import base64
import json
import zlib
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


# SentencePiece's table of these replacements: the ligature fi by two letters, wide F and t by narrow ones, tabs, line
# ends and the wide space by a space.
_TABLE = (
    "c-ke?36Kv|90%~X|H-u5Of%$Yrd-JtO31w^a-S(t?r5`&GiR6oD)-Iij&iJ)Rf{65bLGgo%TXxQ(1a*QuJZZo&3xwj=Dpu<=FPnK"
    "!UG|Mq9G(Cgz!+V5F62)5D6&{TQiR)Mnd%I5HjMe*;gJ-lM$IJAC!4C<t8tWke_@!N&z<N&B}>{$ITz35CthhVV?N^2;oVJQG()>"
    "q9jjInzEF^aY8xD^9&VumP%BlGS5+!DpaQ$HK{=@5~)LNUf_A^QJ4C>NJARXm_{_E3C(FnOIq*}t$3N%wBZ%n@+z;<j`qAxM>^1%"
    "PIRRU-FSmH>CRgukxUPI(Uab>n$$?>EBnx&e!R^91~HH!3}zTZd6##1pZ6Hf2c*O<oevqoNIqgTqZrE=#xstIOkgsTn93BUGmVc)"
    "WhOJ2%`E0JhfkQt0_O7>pR$OBEMYNANh6)lS<W(6kinOH!Ade&%__d;E7r1xb$r7H*2mr>S!`w#TiHT3+xV94>|_VK*~K2dV=p=E"
    "XCDVSz+n#Y1K)F$BOK=#Kk*|cIl<4I;xxZ-mNWduubku0__*-9JkKAon#{OxQC^7cafvHj=5PMu8dtf&b#C$xx4Fe#?(iS~-v4_I"
    "LQ=9Plbs&!0UK+Ls{"
)


@trained_once
def xlm_roberta() -> tokenizers.Tokenizer:
    """Unigram with a table of normalisation, over words that spaces divide."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Precompiled(zlib.decompress(base64.b85decode(_TABLE)))
    words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>")
    )
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    return backend
