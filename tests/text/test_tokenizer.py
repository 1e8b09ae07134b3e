"""Tokenisation: texts to ids, invalid inputs, and files that are no tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from tests.support.odd_tokenizers import FALLBACK, FUSE, ODD_TOKENS, REPLACE, STREAMING, made, stream, words
from tests.support.tokenizers import byte_level
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.text.tokenizer import Tokenizer


def test_begin_token_is_added_unless_told_otherwise() -> None:
    tokenizer = made("byte_level")
    with_begin, without = tokenizer.encode("the cat"), tokenizer.encode("the cat", add_special_tokens=False)
    assert (
        with_begin[1:] == without
        and tokenizer.decode(with_begin[:1], skip_special_tokens=False) == "<|begin|>"
    )
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat"
    assert Tokenizer.from_pretrained(tmp_path).encode(text) == made("byte_level").encode(text)


def test_vocab_size_is_above_every_id() -> None:
    assert made("byte_level").vocab_size == byte_level().get_vocab_size()
    assert made("odd_no_decoder").vocab_size == 2 * (len(ODD_TOKENS) - 1) + 1  # ids with gaps
    assert Tokenizer(tokenizers.Tokenizer(models.BPE())).vocab_size == 0


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff", None, 3, b"bytes", ["list"], ("a", "b")])
def test_what_is_no_text_is_an_invalid_request(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be tokenised"):
        made("byte_level").encode(text)


def test_a_lone_surrogate_is_reported_with_its_place() -> None:
    with pytest.raises(InvalidRequestError, match="position 5"):
        made("byte_level").encode("fine \ud800")


def test_a_panic_of_the_library_is_an_invalid_request() -> None:
    """A regular expression that backtracks without end makes the library panic, with no Exception."""
    backend = byte_level()
    backend.normalizer = normalizers.Replace(Regex("(a+)+$"), "b")
    tokenizer = Tokenizer(backend)
    with pytest.raises(InvalidRequestError, match="cannot be tokenised"):
        tokenizer.encode("a" * 60 + "!")
    assert tokenizer.encode("the cat") == made("byte_level").encode("the cat")


def test_a_panic_while_decoding_is_an_invalid_request() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a" * 60 + "!": 0, "b": 1}, unk_token="b"))
    backend.decoder = decoders.Sequence([decoders.Replace(Regex("(a+)+$"), "c")])
    tokenizer = Tokenizer(backend)
    with pytest.raises(InvalidRequestError):
        tokenizer.decode([0])
    with pytest.raises(InvalidRequestError):
        tokenizer.incremental().push(0)
    assert tokenizer.incremental().push(1) == "b"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_pass_through(stop: type[BaseException]) -> None:
    class Interrupted:
        def encode(self, *_: Any, **__: Any) -> None:
            raise stop

    tokenizer = Tokenizer(byte_level())
    tokenizer._backend = Interrupted()  # type: ignore[assignment]
    with pytest.raises(stop):
        tokenizer.encode("the cat")


@pytest.mark.parametrize("bad", [-1, 2**32, 10**30, "3", None, 1.5])
def test_what_is_no_id_is_an_invalid_request(bad: Any) -> None:
    for name in ("byte_level", "sentencepiece", "odd_ctc"):
        with pytest.raises(InvalidRequestError):
            made(name).decode([1, bad])
        with pytest.raises(InvalidRequestError):
            made(name).incremental().push(bad)


# Files


def test_a_directory_without_tokenizer_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*token ids.*AutoTokenizer"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Tokenizer.from_pretrained(tmp_path / "absent")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"\xff",
        b"null",
        b'{"model": {"type": "Pickle"}}',
        b"[" * 100_000,
        b'{"version": "9.0"}',
    ],
)
def test_a_broken_tokenizer_file_is_a_checkpoint_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer"):
        Tokenizer.from_pretrained(tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 3), st.binary(max_size=3)), min_size=1, max_size=3
    )
)
def test_fuzzed_tokenizer_files(tmp_path_factory: pytest.TempPathFactory, edits: list[Any]) -> None:
    directory = tmp_path_factory.mktemp("fuzz", numbered=True)
    content = words(decoders.Sequence([REPLACE, FALLBACK, FUSE]))().to_str().encode()
    for start, deleted, inserted in edits:
        start %= len(content)
        content = content[:start] + inserted + content[start + deleted :]
    (directory / "tokenizer.json").write_bytes(content)
    try:
        tokenizer = Tokenizer.from_pretrained(directory)
        ids = tokenizer.encode("a b")
        assert stream(tokenizer.incremental(), ids) == tokenizer.decode(ids)
    except (CheckpointError, InvalidRequestError):
        pass


def test_a_saved_tokenizer_is_read_back(tmp_path: Path) -> None:
    for name in ("byte_level", "sentencepiece", "metaspace_unigram"):
        STREAMING[name]().save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.from_pretrained(tmp_path)
        ids = tokenizer.encode("naïve 世界 cat")
        assert stream(tokenizer.incremental(), ids) == tokenizer.decode(ids)
        assert ids == made(name).encode("naïve 世界 cat")


def test_added_tokens_may_be_special_or_not() -> None:
    backend = byte_level()
    backend.add_tokens([AddedToken("<tool>", special=True), AddedToken("<plain>", special=False)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a<tool>b<plain>c")
    assert stream(tokenizer.incremental(True), ids) == tokenizer.decode(ids) == "ab<plain>c"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_no_strip"])
def test_bytes_of_tokens_add_up_to_the_text(name: str) -> None:
    """Also of tokens that are parts of characters; a special token's bytes are its name."""
    tokenizer = made(name)
    text = "naïve 日本 👩‍👩‍👧 cat\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [tokenizer.token_bytes(token_id) for token_id in ids]
    assert b"".join(parts).removeprefix(b" ") == text.encode()
    assert any(part.decode(errors="replace") != part.decode(errors="ignore") for part in parts)
    assert tokenizer.token_bytes(10**6) == b""
