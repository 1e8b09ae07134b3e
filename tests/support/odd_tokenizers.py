"""Tokenizers of every kind of decoder, and awkward tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models

from tests.support.tokenizers import byte_level, metaspace_unigram, sentencepiece
from xla_engine.text.detokenizer import IncrementalDetokenizer
from xla_engine.text.tokenizer import Tokenizer

ODD_TOKENS = [
    *"ab .",
    "",
    "▁",
    "▁▁",
    "▁a",
    "##b",
    "a▁",
    "<0x41>",
    "<0xE2>",
    "<0x82>",
    "<0xAC>",
    "<0xff>",
    "<0x+5>",
]
ODD_TOKENS += ["<0x4>", "<0x414>", "�", "€", " b", "  ", "b</w>", "<s>", "<pad>", "|"]


def words(decoder: Any) -> Callable[[], tokenizers.Tokenizer]:
    """A handful of awkward tokens with any decoder."""

    def make() -> tokenizers.Tokenizer:
        vocabulary = {token: 2 * number for number, token in enumerate(ODD_TOKENS)}  # odd ids have no token
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
        if decoder is not None:
            backend.decoder = decoder
        backend.add_special_tokens(["<s>"])
        return backend

    return make


REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
STREAMING: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_added": lambda: byte_level(("naïve words", "é", "▁x", "<tool>")),  # "é" decodes to a bad byte
    "sentencepiece": sentencepiece,
    "sentencepiece_no_strip": lambda: sentencepiece(False),
    "metaspace_unigram": metaspace_unigram,
    "odd_byte_level": words(decoders.ByteLevel()),
    "odd_no_decoder": words(None),
    "odd_fallback": words(FALLBACK),
    "odd_fuse": words(FUSE),
    "odd_llama2": words(decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)])),
    "odd_strip_three": words(decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 3, 0)])),
    "odd_strip_letters": words(decoders.Sequence([FUSE, decoders.Strip("a", 2, 0)])),
    "odd_nested": words(
        decoders.Sequence([decoders.Sequence([REPLACE, FALLBACK]), decoders.Sequence([FUSE])])
    ),
    "odd_two_replaces": words(
        decoders.Sequence([REPLACE, decoders.Replace(Regex("a+"), "<0x41>"), FALLBACK])
    ),
    "odd_metaspace": words(decoders.Metaspace()),
    "odd_metaspace_never": words(decoders.Metaspace(prepend_scheme="never")),
    "odd_metaspace_fallback": words(decoders.Sequence([decoders.Metaspace(), FALLBACK, FUSE])),
    "odd_wordpiece": words(decoders.WordPiece()),
    "odd_wordpiece_plain": words(decoders.WordPiece(cleanup=False)),
}

HELD_BACK: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "odd_bpe_suffix": words(decoders.BPEDecoder()),
    "odd_ctc": words(decoders.CTC()),
    "odd_replace_after_fuse": words(decoders.Sequence([FUSE, decoders.Replace("ab", "c")])),
    "odd_strip_per_token": words(decoders.Sequence([decoders.Strip(" ", 1, 0), FUSE])),
    "odd_byte_level_then_strip": words(decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])),
}

_MADE: dict[str, Tokenizer] = {}


def made(name: str) -> Tokenizer:
    if name not in _MADE:
        _MADE[name] = Tokenizer((STREAMING | HELD_BACK)[name]())
    return _MADE[name]


def stream(detokenizer: IncrementalDetokenizer, ids: list[int]) -> str:
    return "".join([detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()])
