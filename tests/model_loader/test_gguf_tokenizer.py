"""Tokenizers rebuilt from GGUF metadata tokenise text like the tokenizer.json they came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizers import byte_level, metaspace_unigram, sentencepiece
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.reader import GgufReader
from xla_engine.model_loader.gguf.tokenizer import tokenizer_of

_NORMAL, _CONTROL, _BYTE = 1, 3, 6
TEXTS = st.text(max_size=40) | st.text(alphabet="aehnstc ▁'\n\t.,世é🙂09", max_size=60)


def spelled(backend: tokenizers.Tokenizer) -> list[str]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    return sorted(vocabulary, key=lambda token: vocabulary[token])


def rebuilt(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> tokenizers.Tokenizer:
    writer = gguf.GGUFWriter(str(path), "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = tokenizer_of(GgufReader(path))
    assert found is not None
    return found


def fill_byte_level(
    backend: tokenizers.Tokenizer, pre: str, **extra: Any
) -> Callable[[gguf.GGUFWriter], None]:
    state = json.loads(backend.to_str())
    special = {token["content"] for token in state["added_tokens"] if token["special"]}

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(spelled(backend))
        writer.add_token_types([_CONTROL if token in special else _NORMAL for token in spelled(backend)])
        writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
        if extra.get("begin") is not None:
            writer.add_bos_token_id(extra["begin"])
            writer.add_add_bos_token(True)

    return fill


def fill_sentencepiece(backend: tokenizers.Tokenizer, *, prefix: bool) -> Callable[[gguf.GGUFWriter], None]:
    """Scores fall with the rank of the merge that makes a token, as SentencePiece's trainer writes them."""
    merges = json.loads(backend.to_str())["model"]["merges"]
    rank = {}
    for number, (left, right) in enumerate(merges):
        rank.setdefault(left + right, number)

    def fill(writer: gguf.GGUFWriter) -> None:
        tokens = spelled(backend)
        kinds = {"<unk>": 2, "<s>": _CONTROL, "</s>": _CONTROL}
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(rank.get(token, 10**6)) for token in tokens])
        writer.add_token_types(
            [kinds.get(token, _BYTE if token.startswith("<0x") else _NORMAL) for token in tokens]
        )
        writer.add_add_space_prefix(prefix)
        writer.add_add_bos_token(False)

    return fill


def fill_lines(backend: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    """As converters write Gemma 4's: merges are listed, as they are for byte-level BPE."""
    merges = json.loads(backend.to_str())["model"]["merges"]

    def fill(writer: gguf.GGUFWriter) -> None:
        tokens = spelled(backend)
        kinds = {"<unk>": 2, "<s>": _CONTROL, "</s>": _CONTROL}
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [kinds.get(token, _BYTE if token.startswith("<0x") else _NORMAL) for token in tokens]
        )
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_add_bos_token(False)

    return fill


def fill_unigram(backend: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    model = json.loads(backend.to_str())["model"]

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_token_list([token for token, _ in model["vocab"]])
        writer.add_token_scores([score for _, score in model["vocab"]])
        kinds = {"<unk>": 2, "<s>": _CONTROL}
        writer.add_token_types([kinds.get(token, _NORMAL) for token, _ in model["vocab"]])

    return fill


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """The original tokenizer and the one rebuilt from its metadata, by kind."""
    directory = tmp_path_factory.mktemp("gguf")
    originals = {"byte_level": byte_level(), "sentencepiece": sentencepiece(True)}
    originals |= {"sentencepiece_no_prefix": sentencepiece(False), "unigram": metaspace_unigram()}
    spaces = originals["sentencepiece_no_prefix"]
    spaces.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    originals["gemma4"] = spaces
    begin = originals["byte_level"].token_to_id("<|begin|>")
    fills = {
        "byte_level": fill_byte_level(originals["byte_level"], "gpt-2", begin=begin),
        "sentencepiece": fill_sentencepiece(originals["sentencepiece"], prefix=True),
        "sentencepiece_no_prefix": fill_sentencepiece(spaces, prefix=False),
        "gemma4": fill_lines(spaces),
        "unigram": fill_unigram(originals["unigram"]),
    }
    return {
        name: (originals[name], rebuilt(directory / f"{name}.gguf", fill)) for name, fill in fills.items()
    }


@pytest.mark.parametrize(
    "name", ["byte_level", "sentencepiece", "sentencepiece_no_prefix", "gemma4", "unigram"]
)
@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_ids_and_text_are_the_originals(name: str, text: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    original, found = pairs[name]
    ids = original.encode(text).ids
    assert found.encode(text).ids == ids
    assert found.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_special_tokens_are_found_in_a_text(name: str, pairs: dict[str, tuple[Any, Any]]) -> None:
    original, found = pairs[name]
    text = "the cat<|end|> sat<|begin|>" if name == "byte_level" else "the cat</s> sat<s>"
    ids = original.encode(text, add_special_tokens=False).ids
    assert found.encode(text, add_special_tokens=False).ids == ids
    assert {token.content for token in found.get_added_tokens_decoder().values() if token.special} >= {
        "<|end|>" if name == "byte_level" else "</s>"
    }


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "I'LL 1234 naïve\n\n cats!", ["I", "'LL", " ", "123", "4", " naïve", "\n\n", " cats", "!"]),
        ("qwen35", "se\u0323e 12\n x", ["se\u0323e", " ", "1", "2", "\n", " x"]),
        ("qwen2", "see 123\n x", ["see", " ", "1", "2", "3", "\n", " x"]),
        ("gpt-4o", "HelloWorld isn't 1234", ["Hello", "World", " isn't", " ", "123", "4"]),
        ("tekken", "HelloWorld isn't 12", ["Hello", "World", " isn", "'t", " ", "1", "2"]),
        ("deepseek-v3", "see #foo 1234世界x", ["see", " #", "foo", " ", "123", "4", "世界", "x"]),
        ("deepseek-llm", "naïve #foo 12 世界\n ", [  # its range of punctuation has ASCII's letters, too
            "na", "ï", "ve", " #", "foo", " ", "1", "2", " ", "世界", "\n", " "
        ]),
        ("kimi-k2", "HelloWorld isn't 1234 a世界b。\n", [
            "Hello", "World", " isn't", " ", "123", "4", " a", "世界", "b", "。\n"
        ]),
        ("deepseek-coder", "a b12, 世界\n", ["a", " b", "1", "2", ",", " ", "世界", "\n"]),
        ("command-r", "in 12 it's", ["in", " ", "1", "2", " it", "'s"]),
        ("glm4", "1234 cats\n", ["123", "4", " cats", "\n"]),
        ("seed-coder", "a,\n12", ["a", ",", "\n", "1", "2"]),
        ("minicpm5", "1234 cats", ["123", "4", " cats"]),
    ],
)  # fmt: skip
def test_words_are_cut_as_the_models_cut_them(pre: str, text: str, words: list[str], tmp_path: Path) -> None:
    found = rebuilt(tmp_path / "m.gguf", fill_byte_level(byte_level(), pre))
    assert [text[start:end] for _, (start, end) in found.pre_tokenizer.pre_tokenize_str(text)] == words


def test_digits_stand_alone_in_smollm(tmp_path: Path) -> None:
    found = rebuilt(tmp_path / "m.gguf", fill_byte_level(byte_level(), "smollm"))
    pieces = found.pre_tokenizer.pre_tokenize_str("in 1999 it's")
    assert ["in 1999 it's"[a:b] for _, (a, b) in pieces] == ["in", " ", "1", "9", "9", "9", " it", "'s"]


def test_a_whole_tokenizer_json_in_the_metadata_goes_before_the_rest(tmp_path: Path) -> None:
    original = sentencepiece(True)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_string("tokenizer.huggingface.json", original.to_str())
        writer.add_tokenizer_model("rwkv")

    assert rebuilt(tmp_path / "m.gguf", fill).to_str() == original.to_str()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pre": "klingon"}, "'klingon'"),
        ({"model": "rwkv"}, "'rwkv'"),
        ({"tokens": ["a", "a"]}, "have the same text"),
        ({"tokens": ["a"]}, "another length"),
        ({"tokens": [1, 2]}, "not a list of str"),
        ({"merges": ["a b c"]}, "not a pair"),
        ({"merges": ["nowhere found"]}, "contradicts itself"),
        ({"bos": 10**6}, "has no text"),
    ],
)
def test_what_cannot_be_exact_asks_for_a_tokenizer_json(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": [], "bos": 0} | change

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(fields["model"])
        writer.add_tokenizer_pre(fields["pre"])
        writer.add_array("tokenizer.ggml.tokens", fields["tokens"])
        writer.add_token_types([_NORMAL, _NORMAL])
        if fields["merges"]:
            writer.add_token_merges(fields["merges"])
        writer.add_bos_token_id(fields["bos"])
        writer.add_add_bos_token(True)

    with pytest.raises(CheckpointError) as caught:
        rebuilt(tmp_path / "m.gguf", fill)
    assert words in str(caught.value) and "tokenizer.json next to" in str(caught.value)
