"""Tokenisation, and the law of incremental detokenisation: pushed pieces and flush add up to `decode`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tests.support.tokenizers import byte_level, metaspace_unigram, sentencepiece
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.text.detokenizer import IncrementalDetokenizer, _byte_alphabet
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


# The law


@pytest.mark.parametrize("name", [*STREAMING, *HELD_BACK])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_pushes_and_flush_add_up_to_decode_for_any_ids(name: str, data: st.DataObject) -> None:
    tokenizer = made(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=24))
    skip = data.draw(st.booleans())
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert stream(tokenizer.incremental(skip), ids) == whole
    detokenizer, cut = tokenizer.incremental(skip), data.draw(st.integers(0, len(ids)))
    parts = [*detokenizer.push_all(ids[:cut]), *detokenizer.push_all(ids[cut:]), detokenizer.flush()]
    assert "".join(parts) == whole


@pytest.mark.parametrize("name", ["sentencepiece", "sentencepiece_no_strip"])
@settings(max_examples=200, deadline=None)
@given(text=st.binary(max_size=12), tail=st.lists(st.integers(0, 329), max_size=3), skip=st.booleans())
def test_runs_of_byte_tokens_add_up_to_decode(name: str, text: bytes, tail: list[int], skip: bool) -> None:
    tokenizer = made(name)
    ids = [3 + byte for byte in text] + tail  # ids 0..2 are special, 3..258 the bytes
    assert stream(tokenizer.incremental(skip), ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_no_strip"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_streamed_text_is_always_a_prefix_without_broken_characters(name: str, text: str) -> None:
    tokenizer = made(name)
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    detokenizer, seen = tokenizer.incremental(), ""
    for token_id in ids:
        seen += detokenizer.push(token_id)
        assert whole.startswith(seen)
        assert seen.count("\ufffd") <= text.count("\ufffd")
    assert seen + detokenizer.flush() == whole


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_no_strip"])
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=30))
def test_encode_then_decode_is_the_text(name: str, text: str) -> None:
    tokenizer = made(name)
    whole = tokenizer.decode(tokenizer.encode(text))
    assert whole == (text if name == "byte_level" or not text else " " + text)


@pytest.mark.parametrize("name", [*STREAMING, *HELD_BACK])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pushed_text_and_a_peek_are_decode_so_far(name: str, data: st.DataObject) -> None:
    """At every token, unless the end is a part of a character; and looking changes nothing."""
    tokenizer = made(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    detokenizer, seen = tokenizer.incremental(), ""
    for count, token_id in enumerate(ids, 1):
        seen += detokenizer.push(token_id)
        so_far = tokenizer.decode(ids[:count])
        assert detokenizer.peek() == detokenizer.peek()
        assert seen + detokenizer.peek() == so_far or "\ufffd" in so_far[len(seen) :]
    assert seen + detokenizer.flush() == tokenizer.decode(ids)


def test_a_split_character_waits_for_its_last_byte() -> None:
    tokenizer = made("byte_level")
    ids = [token_of_byte(byte) for byte in "€".encode()]
    detokenizer = tokenizer.incremental()
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "€"]
    assert tokenizer.decode(ids) == "€"


def token_of_byte(byte: int) -> int:
    """Id of the byte-level token of one byte."""
    (character,) = (c for c, b in _byte_alphabet().items() if b == byte)
    found = byte_level().token_to_id(character)
    assert found is not None
    return found


def test_the_byte_alphabet_is_the_librarys() -> None:
    assert set(_byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    library = decoders.ByteLevel()
    assert all(library.decode([c]) == chr(b) for c, b in _byte_alphabet().items() if b < 128)


def test_one_bad_byte_spoils_the_whole_run_as_in_the_library() -> None:
    """Why nothing of a byte run is final before its end."""
    tokenizer = made("sentencepiece")
    euro, bad = [3 + byte for byte in "€".encode()], 3 + 0xFF
    letter = tokenizer.encode("a", add_special_tokens=False)[-1]
    good = tokenizer.incremental()
    assert [good.push(t) for t in euro] == ["", "", ""]
    assert good.push(letter).startswith("€")
    spoilt = tokenizer.incremental()
    assert [spoilt.push(t) for t in [*euro, bad]] == [""] * 4
    assert spoilt.flush() == "\ufffd" * 4 == tokenizer.decode([*euro, bad])


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = made("byte_level")
    ids = tokenizer.encode("the <|end|> cat")
    assert stream(tokenizer.incremental(True), ids) == "the  cat"
    assert stream(tokenizer.incremental(False), ids) == "<|begin|>the <|end|> cat"


def test_flush_ends_the_stream_once() -> None:
    for name in (*STREAMING, *HELD_BACK):
        detokenizer = made(name).incremental()
        detokenizer.push(0)
        detokenizer.flush()
        assert detokenizer.flush() == ""


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "odd_ctc"])
def test_cost_of_a_push_does_not_grow(name: str) -> None:
    """40,000 tokens of the worst kind (invalid bytes for ever): quadratic work would take minutes."""
    tokenizer = made(name)
    bad = {"byte_level": token_of_byte(0xFF), "sentencepiece": 3 + 0xFF, "odd_ctc": 0}[name]
    began = time.perf_counter()
    text = stream(tokenizer.incremental(), [bad] * 40_000)
    assert time.perf_counter() - began < 5
    assert text == tokenizer.decode([bad] * 40_000)


# Encoding


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
