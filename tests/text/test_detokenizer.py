"""The law of incremental detokenisation: pushed pieces and flush add up to `decode`."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers

from tests.support.odd_tokenizers import HELD_BACK, STREAMING, made, stream
from tests.support.profiles import examples
from tests.support.tiers import default
from tests.support.tokenizers import byte_level
from xla_engine.text.detokenizer import _byte_alphabet


@pytest.mark.parametrize("name", default([*STREAMING, *HELD_BACK], 8))
@settings(max_examples=examples(40, 120), deadline=None)
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
@settings(max_examples=examples(60, 200), deadline=None)
@given(text=st.binary(max_size=12), tail=st.lists(st.integers(0, 329), max_size=3), skip=st.booleans())
def test_runs_of_byte_tokens_add_up_to_decode(name: str, text: bytes, tail: list[int], skip: bool) -> None:
    tokenizer = made(name)
    ids = [3 + byte for byte in text] + tail  # ids 0..2 are special, 3..258 the bytes
    assert stream(tokenizer.incremental(skip), ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "sentencepiece_no_strip"])
@settings(max_examples=examples(30, 100), deadline=None)
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


@pytest.mark.parametrize("name", default([*STREAMING, *HELD_BACK], 8))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pushed_text_and_a_peek_are_decode_so_far(name: str, data: st.DataObject) -> None:
    """This holds at every token, unless the text ends within a character; and `peek` changes nothing."""
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
    """Therefore nothing of a run of bytes is final before its end."""
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
    began = time.thread_time()
    text = stream(tokenizer.incremental(), [bad] * 40_000)
    assert time.thread_time() - began < 20
    assert text == tokenizer.decode([bad] * 40_000)
