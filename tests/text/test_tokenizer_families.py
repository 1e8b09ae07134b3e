"""Small tokenizers of every family's kind: streams add up to `decode`, and stop strings end them as defined.

The parts and their order are those of the families' own files; only vocabularies are small.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.support.stop_strings import by_definition
from tests.support.tiers import default
from xla_engine.model_loader.gguf.tokenizer import _WORDS
from xla_engine.text.stop_strings import GeneratedText
from xla_engine.text.tokenizer import Tokenizer

TEXTS = [
    "def push(self, item):\n    self.items.append(item)\n",
    "naïve café, Grüße, 世界 and 🙂👩‍👩‍👧 together",
    "the cat sat on the mat and the hat in 1999",
] * 5
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()


def byte_level(pre: Any, *, normalizer: Any = None, ignore_merges: bool = False) -> tokenizers.Tokenizer:
    """BPE over bytes: Llama 3, Qwen, gpt-oss, SmolLM, Command R."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return backend


def split(expressions: Iterable[str]) -> Any:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def sentencepiece(normalizer: Any, pre: Any, decoder: Any) -> tokenizers.Tokenizer:
    """BPE over characters with single bytes for the rest: Llama 2, Mistral, Gemma, Phi-3."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre is not None:
        backend.pre_tokenizer = pre
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special + BYTES, limit_alphabet=24)
    backend.train_from_iterator(TEXTS, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoder
    return backend


def unigram(decoder: Any, *, byte_fallback: bool) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    backend.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>")
    )
    if byte_fallback:
        state = json.loads(backend.to_str())
        state["model"]["vocab"] += [[byte, -20.0] for byte in BYTES]
        state["model"]["byte_fallback"] = True
        backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoder
    return backend


def chat(backend: tokenizers.Tokenizer, special: list[str], plain: list[str], begin: str | None) -> Any:
    """Added tokens of both kinds, and the token that begins a text."""
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    if begin is not None:
        number = backend.token_to_id(begin)
        backend.post_processor = processors.TemplateProcessing([begin, "$A"], None, [(begin, number)])
    return backend


DUMMY_PREFIX = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
NO_PREFIX = [REPLACE, FALLBACK, FUSE]
GPT2_DIGITS = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
)
STRIPPED = decoders.Sequence([*NO_PREFIX, decoders.Strip(" ", 1, 0)])

FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "llama3": lambda: chat(
        byte_level(split(_WORDS["llama-bpe"]), ignore_merges=True),
        ["<|begin_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"],
        [],
        "<|begin_of_text|>",
    ),
    "qwen3": lambda: chat(
        byte_level(split(_WORDS["qwen2"]), normalizer=normalizers.NFC()),
        ["<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<think>"],
        None,
    ),
    "gpt_oss": lambda: chat(byte_level(split(_WORDS["gpt-4o"])), ["<|channel|>", "<|return|>"], [], None),
    "smollm2": lambda: chat(byte_level(GPT2_DIGITS), ["<|im_start|>", "<|im_end|>"], [], None),
    "command_r": lambda: chat(
        byte_level(GPT2_DIGITS, normalizer=normalizers.NFC()), ["<BOS_TOKEN>"], [], "<BOS_TOKEN>"
    ),
    "llama2": lambda: chat(sentencepiece(DUMMY_PREFIX, None, STRIPPED), [], [], "<s>"),
    "mistral": lambda: chat(
        sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), STRIPPED),
        ["[INST]", "[/INST]"],
        ["[TOOL_CALLS]"],
        "<s>",
    ),
    "gemma": lambda: chat(
        sentencepiece(
            normalizers.Replace(" ", "▁"),
            pre_tokenizers.Split(" ", "merged_with_previous"),
            decoders.Sequence(NO_PREFIX),
        ),
        ["<bos>", "<start_of_turn>"],
        ["\n\n", "▁▁", "<unused0>"],
        "<bos>",
    ),
    "phi3": lambda: chat(
        sentencepiece(DUMMY_PREFIX, None, STRIPPED), ["<|user|>", "<|end|>"], ["<|placeholder1|>"], None
    ),
    "unigram": lambda: chat(unigram(decoders.Metaspace(), byte_fallback=False), ["<extra>"], [], "<s>"),
    "unigram_bytes": lambda: chat(unigram(STRIPPED, byte_fallback=True), [], ["<plain>"], "<s>"),
}


@cache
def made(name: str) -> Tokenizer:
    return Tokenizer(FAMILIES[name]())


@cache
def interesting(name: str) -> list[int]:
    """Ids of single bytes, valid UTF-8 or not, added tokens and the rest of a small vocabulary's odd members."""
    tokenizer = made(name)
    raw = [number for number in range(tokenizer.vocab_size) if _is_byte(tokenizer, number)]
    return raw + list(range(3)) + list(range(tokenizer.vocab_size - 8, tokenizer.vocab_size + 2))


def _is_byte(tokenizer: Tokenizer, number: int) -> bool:
    found = tokenizer.token_bytes(number)
    return len(found) == 1 and found[0] >= 0x80


def ids_of(name: str) -> st.SearchStrategy[list[int]]:
    """Any ids; with many bytes that are parts of characters or of none; or a text and then any ids."""
    tokenizer = made(name)
    anything = st.integers(0, tokenizer.vocab_size + 1)
    odd = st.lists(st.sampled_from(interesting(name)) | anything, max_size=16)
    texts = st.text(alphabet="aetn <s>世é🙂\n▁", max_size=16).map(tokenizer.encode)
    return st.one_of(
        st.lists(anything, max_size=16), odd, st.tuples(texts, odd).map(lambda two: two[0] + two[1])
    )


@pytest.mark.parametrize("name", default(FAMILIES, 4))
@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_deltas_add_up_to_decode_and_break_no_character(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = made(name)
    ids = data.draw(ids_of(name))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer, seen = tokenizer.incremental(skip), ""
    for number in ids:
        seen += detokenizer.push(number)
        assert whole.startswith(seen)
    assert "".join(tokenizer.incremental(skip).push_all(ids)) == seen
    assert seen + detokenizer.flush() == whole


@pytest.mark.parametrize("name", default(FAMILIES, 4))
@settings(max_examples=40, deadline=None)
@given(data=st.data(), include=st.booleans())
def test_stop_strings_end_a_stream_where_the_text_so_far_has_one(
    name: str, data: st.DataObject, include: bool
) -> None:
    """Compare with the definition: after each token, decode the whole text again and search it."""
    tokenizer = made(name)
    ids = data.draw(ids_of(name))
    whole = tokenizer.decode(ids)
    pieces = [whole[a:b] for a, b in itertools.combinations(range(min(len(whole), 12) + 1), 2)]
    strings = [piece for piece in pieces if "\ufffd" not in piece] or ["x"]
    stop = tuple(data.draw(st.lists(st.sampled_from(strings), min_size=1, max_size=3)))
    text, found = GeneratedText(tokenizer.incremental(), stop, include_stop=include), None
    for count, number in enumerate(ids, 1):
        found = text.push(number)
        expected, match = by_definition(tokenizer.decode(ids[:count]), stop, include)
        assert found == match
        if found is not None:
            assert text.text == expected
            return
    text.end()
    assert text.text == whole


@pytest.mark.parametrize("name", default(FAMILIES, 4))
@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=20))
def test_a_text_comes_back(name: str, text: str) -> None:
    """This holds for texts whose characters can all be encoded, up to normalisation."""
    tokenizer = made(name)
    if name == "unigram":
        text = "".join(character for character in text if character in "catmh")
    if name in ("qwen3", "command_r"):
        text = normalizers.NFC().normalize_str(text)
    if name.startswith("unigram"):
        text = text.strip()
    decoded = tokenizer.decode(tokenizer.encode(text))
    assert decoded == text or (name == "mistral" and decoded == text.removeprefix(" "))


@pytest.mark.parametrize(
    ("name", "text", "special", "plain"),
    [
        ("llama3", "a<|eot_id|>b", ["<|eot_id|>"], []),
        ("qwen3", "<think>a</tool_call><|im_end|>", ["<|im_end|>"], ["<think>", "</tool_call>"]),
        ("mistral", "[INST]a[/INST][TOOL_CALLS]", ["[INST]", "[/INST]"], ["[TOOL_CALLS]"]),
        ("gemma", "<start_of_turn>a\n\nb<unused0>", ["<start_of_turn>"], ["\n\n", "<unused0>"]),
        ("phi3", "<|user|>a<|end|>", ["<|user|>", "<|end|>"], []),
    ],
)
def test_added_tokens_are_one_id_each_and_special_ones_are_skipped(
    name: str, text: str, special: list[str], plain: list[str]
) -> None:
    tokenizer = made(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    spelled = [tokenizer.decode([number], skip_special_tokens=False) for number in ids]
    assert all(spelled.count(token) == 1 for token in special + plain)
    shown = tokenizer.decode(ids)
    assert not any(token in shown for token in special) and all(token in shown for token in plain)
    for token in special:
        (number,) = tokenizer.encode(token, add_special_tokens=False)[-1:]
        assert tokenizer.token_bytes(number) == token.encode()


def test_the_dummy_prefix_is_there_or_not_as_the_family_has_it() -> None:
    for name, first in (("llama2", "▁"), ("phi3", "▁"), ("mistral", "▁"), ("gemma", "")):
        backend = made(name)._backend
        token = backend.id_to_token(made(name).encode("cat", add_special_tokens=False)[0])
        assert token is not None and token.startswith("▁") == bool(first), name


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_of_a_whole_vocabulary_are_those_of_its_tokens(name: str) -> None:
    tokenizer = made(name)
    count = tokenizer.vocab_size + 3
    assert tokenizer.bytes_of_all(count) == [tokenizer.token_bytes(number) for number in range(count)]
