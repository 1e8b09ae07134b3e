"""Kimi's file of tokens: ids are those of tiktoken's algorithm, written here once more."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tokenizers import byte_level
from xla_engine.errors import CheckpointError
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.tiktoken_model import KIMI_WORDS, read_tiktoken
from xla_engine.text.tokenizer import Tokenizer

NAMED = {"content": "<|im_end|>", "special": True}
CALL = {"content": "<|tool_call_begin|>", "special": False}


def tokens_of(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The tokens of byte-level BPE in the order of their merges, without the special ones."""
    state = json.loads(backend.to_str())
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    byte_of = dict(zip(sorted(letters, key=_byte_order), _printable_first(), strict=True))
    texts = [*sorted(letters), *("".join(pair) for pair in state["model"]["merges"])]
    return list(dict.fromkeys(bytes(byte_of[letter] for letter in text) for text in texts))


def _byte_order(letter: str) -> int:
    return ord(letter)


def _printable_first() -> list[int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*printable, *(byte for byte in range(256) if byte not in printable)]


def write_model(
    folder: Path, tokens: list[bytes], named: Mapping[str, Any] | None = None, kind: str = "TikTokenTokenizer"
) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": kind, "added_tokens_decoder": dict(named or {})})
    )
    return folder


def tiktoken_ids(text: str, ranks: Mapping[bytes, int]) -> list[int]:
    """tiktoken's `byte_pair_encode` of each word: a word that is a token is one, in others the two neighbours that
    make the first token of the list become it, the leftmost of several."""
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(KIMI_WORDS), "isolated")
    ids = []
    for word, _ in words.pre_tokenize_str(text):
        parts = [word.encode()] if word.encode() in ranks else [bytes([byte]) for byte in word.encode()]
        while True:
            joined = [
                (ranks[left + right], at)
                for at, (left, right) in enumerate(pairwise(parts))
                if left + right in ranks
            ]
            if not joined:
                break
            at = min(joined)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[tokenizers.Tokenizer, dict[bytes, int]]:
    tokens = tokens_of(byte_level())
    first = len(tokens)
    folder = write_model(tmp_path_factory.mktemp("kimi"), tokens, {str(first): NAMED, str(first + 3): CALL})
    found = read_tiktoken(folder)
    assert found is not None
    return found, {token: rank for rank, token in enumerate(tokens)}


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40) | st.text(alphabet="aehnstcAT '\n\t.,世é🙂09", max_size=60))
def test_ids_are_those_of_tiktoken(text: str, model: tuple[tokenizers.Tokenizer, dict[bytes, int]]) -> None:
    backend, ranks = model
    ids = backend.encode(text).ids
    assert ids == tiktoken_ids(text, ranks)
    assert backend.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_lie_behind_the_others(
    model: tuple[tokenizers.Tokenizer, dict[bytes, int]],
) -> None:
    backend, ranks = model
    first = len(ranks)
    text = f"the<|im_end|><|tool_call_begin|><|reserved_token_{first + 255}|>"
    ids = backend.encode(text).ids
    assert ids[-3:] == [first, first + 3, first + 255] and backend.get_vocab_size() == first + 256
    assert backend.decode(ids) == "the<|tool_call_begin|>"  # a mark of calls is text, as the file says


def test_a_folder_has_it_if_it_has_no_tokenizer_json(tmp_path: Path) -> None:
    tokens = tokens_of(byte_level())
    folder = write_model(tmp_path, tokens)
    found = Tokenizer.of_model(open_model(folder))
    assert found is not None and found.decode(found.encode("the cat sat")) == "the cat sat"
    byte_level().save(str(folder / "tokenizer.json"))
    found = Tokenizer.of_model(open_model(folder))
    assert found is not None and "<|begin|>" in found.decode(
        found.encode("<|begin|>"), skip_special_tokens=False
    )


def test_words_of_other_models_with_such_a_file_are_not_known(tmp_path: Path) -> None:
    assert read_tiktoken(write_model(tmp_path, tokens_of(byte_level()), kind="QWenTokenizer")) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("AA== 0\n", "tokens are missing"),
        ("AA== zero\n", "not a list of tokens"),
        ("AA==\n", "not a list of tokens"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_broken_file_is_refused_by_name(content: str, words: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, tokens_of(byte_level()))
    (folder / "tiktoken.model").write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_tiktoken(folder)
    assert "tiktoken.model" in str(caught.value)


@pytest.mark.parametrize("entry", [{"content": 3}, "x", {"content": "<|reserved_token_{next}|>"}], ids=str)
def test_special_tokens_without_a_text_of_their_own_are_refused(entry: Any, tmp_path: Path) -> None:
    tokens = tokens_of(byte_level())
    if isinstance(entry, dict) and isinstance(entry["content"], str):
        entry = {"content": entry["content"].format(next=len(tokens) + 1)}
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        read_tiktoken(write_model(tmp_path, tokens, {str(len(tokens)): entry}))
