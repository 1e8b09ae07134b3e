"""Whatever tokens spell a text that fits a constraint, its masks allow them, added tokens that are text included."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.format_models import format_tokenizer
from tests.support.tokenizers import byte_level, metaspace_unigram, sentencepiece
from xla_engine.model_loader.gguf.tokenizer import tokenizer_of
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.grammar import Grammars, Matcher
from xla_engine.text.lark import lark_parts
from xla_engine.text.token_mask import TokenMask
from xla_engine.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")

ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[X] y")
P = StructuredOutputsParams


def with_added(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED])
    return Tokenizer(backend)


FORMS: dict[str, Callable[[], Tokenizer]] = {
    "embedded": lambda: format_tokenizer("hermes"),
    "gguf": lambda: gguf(),
    "byte_level": lambda: with_added(byte_level()),
    "sentencepiece": lambda: with_added(sentencepiece()),
    "sentencepiece_no_strip": lambda: with_added(sentencepiece(False)),
    "unigram": lambda: with_added(metaspace_unigram()),
}


@dataclass(frozen=True, slots=True)
class Metadata:
    """A GGUF file's metadata."""

    values: dict[str, Any]
    path: Path = Path("x.gguf")

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)


def gguf() -> Tokenizer:
    """The embedded model's tokenizer as a GGUF file has it; added tokens that are text are of type 4."""
    state = json.loads(format_tokenizer("hermes")._backend.to_str())
    vocabulary = state["model"]["vocab"]
    kinds = {token["content"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
    }
    backend = tokenizer_of(cast("Any", Metadata(values)))
    assert backend is not None
    return Tokenizer(backend)


@cache
def form(name: str) -> tuple[Tokenizer, Grammars, dict[bytes, list[int]]]:
    """A tokenizer, its grammars, and the ids of each text token by its bytes."""
    tokenizer = FORMS[name]()
    special = tokenizer.special_token_ids
    ids: dict[bytes, list[int]] = {}
    for number in range(tokenizer.vocab_size):
        if number not in special and (data := tokenizer.token_bytes(number)):
            ids.setdefault(data, []).append(number)
    return tokenizer, Grammars(tokenizer, tokenizer.vocab_size + 7, sorted(special)), ids


def allowed(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def spelled(draw: st.DataObject, text: bytes, ids: dict[bytes, list[int]]) -> list[int] | None:
    """Any tokens of a text; None if it came to where none fits, for example inside a character."""
    found: list[int] = []
    longest = max(map(len, ids))
    while text:
        sizes = [size for size in range(1, min(longest, len(text)) + 1) if text[:size] in ids]
        if not sizes:
            return None
        size = draw.draw(st.sampled_from(sizes))
        found.append(draw.draw(st.sampled_from(ids[text[:size]])))
        text = text[size:]
    return found


def follow(matcher: Matcher, tokens: list[int], tokenizer: Tokenizer) -> None:
    for place, token in enumerate(tokens):
        assert token in allowed(matcher.words()), [
            tokenizer.token_string(each) for each in tokens[: place + 1]
        ]
        matcher.push(token)


PIECE = st.sampled_from([*ADDED, "a", "the cat", " ", "self", "é", '"', "\\", "<", "tool_call"])
TEXT = st.lists(PIECE, min_size=1, max_size=6).map("".join)
OPEN: Any = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]}


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(list(FORMS)),
    text=TEXT,
    kind=st.sampled_from(["choice", "regex", "json"]),
)
def test_a_text_that_fits_is_accepted_whatever_tokens_spell_it(
    data: st.DataObject, name: str, text: str, kind: str
) -> None:
    tokenizer, grammars, ids = form(name)
    if kind == "choice":
        params = P(choice=(text, text + "s", "no"))
    elif kind == "regex":
        params = P(regex=r"(.|\n)*")
    else:
        params, text = P(json=OPEN), json.dumps({"t": text}, ensure_ascii=False, separators=(",", ":"))
    space = tokenizer.drops_first_space and data.draw(st.booleans())
    tokens, canonical = spelled(data, b" " * space + text.encode(), ids), tokenizer.plain_ids(text)
    if tokenizer.decode(canonical) != text or tokenizer.special_token_ids.intersection(canonical):
        canonical = []  # it has characters that the tokenizer does not know
    for spelling in (tokens, canonical):
        if spelling:
            matcher = grammars.matcher(params)
            follow(matcher, spelling, tokenizer)
            assert tokenizer.special_token_ids.intersection(allowed(matcher.words()).tolist())  # it may end


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("text", ["<tool_call>", "a <tool_call> b", "<think>a</think>", '{"a":"[X] y"}'])
def test_a_text_that_must_follow_has_its_canonical_tokens(name: str, text: str) -> None:
    tokenizer, grammars, _ = form(name)
    if tokenizer.decode(tokenizer.plain_ids(text)) != text:
        return  # it has characters that the tokenizer does not know
    mask = TokenMask(tokenizer.vocab_size + 7, matcher=grammars.matcher(P(choice=(text,))))
    found: list[int] = []
    while not tokenizer.special_token_ids.intersection(choices := allowed(mask.words).tolist()):
        found.append(max(choices, key=lambda number: len(tokenizer.token_bytes(number))))
        mask.push(found[-1])
    assert tokenizer.decode(found) == text
    if not tokenizer.drops_first_space:  # else the space is optional
        assert found == tokenizer.plain_ids(text)


def test_a_bad_word_leaves_the_other_spellings_of_a_text() -> None:
    tokenizer, grammars, _ = form("embedded")
    (call,) = tokenizer.plain_ids("<tool_call>")
    mask = TokenMask(4103, bad_words=[(call,)], matcher=grammars.matcher(P(choice=("<tool_call>",))))
    assert call not in allowed(mask.words) and mask.words.any()


def test_ids_without_a_text_are_never_allowed() -> None:
    tokenizer, grammars, _ = form("embedded")
    words = grammars.matcher(P(regex=r"(.|\n)*")).words()
    beyond = set(range(tokenizer.vocab_size, tokenizer.vocab_size + 7))
    assert not beyond.intersection(allowed(words).tolist())
    assert tokenizer.special_token_ids <= set(allowed(words).tolist())  # all of them end a text here


def test_a_grammar_may_name_tokens_that_are_text() -> None:
    """As llguidance's documentation does for reasoning: `<think>` is the token, wherever text may come, too."""
    tokenizer, grammars, _ = form("embedded")
    grammar = 'start: <think> "\\n" /(.|\\n)*/ </think> "yes"'
    follow(grammars.matcher(P(grammar=grammar)), tokenizer.plain_ids("<think>\nabc</think>yes"), tokenizer)
    with pytest.raises(AssertionError):
        follow(grammars.matcher(P(grammar=grammar)), tokenizer.plain_ids("<think>\nabc</think>no"), tokenizer)


def test_names_of_tokens_are_replaced_outside_texts_only() -> None:
    ids = {"<a>": 5, "[B]": 7}
    text = 'start: <a> "<a> \\"<a>" /<a>\\/<a>/ <[B]> <[12-13]> <[*]> <c> // <a> %json {}\nx: %json {"<a>": "<[B]>"} '
    begin, schema, end = lark_parts(text, ids.get)
    assert (
        begin
        == text.partition(' {"<a>"')[0]
        .replace("start: <a>", "start: <[5]>")
        .replace(" <[B]> <[12", " <[7]> <[12")
        .replace(" <c> ", ' "<c>" ')
        + " "
    )
    assert (schema, end) == ({"<a>": "<[B]>"}, " ")
