"""The budget of one mask is counted in items of the parser, so the same text always ends at the same token."""

from __future__ import annotations

import pytest

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text import grammar
from xla_engine.text.grammar import Grammars
from xla_engine.text.token_mask import TokenMask

pytest.importorskip("llguidance")


def test_a_mask_beyond_its_items_ends_its_row_at_the_same_token_every_time(
    embedded: XlaBatchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of one mask is counted, not measured."""
    assert embedded.tokenizer is not None
    monkeypatch.setitem(grammar._LIMITS, "step_max_items", 300)
    (token,) = embedded.tokenizer.encode("a", add_special_tokens=False)
    constraint = StructuredOutputsParams(grammar='start: start start | "a"')
    ends = []
    for _ in range(2):
        matcher = Grammars(embedded.tokenizer, embedded.checkpoint.config.vocab_size, (0,)).matcher(
            constraint
        )
        for count in range(200):
            try:
                matcher.push(token)
                matcher.words()
            except InvalidRequestError as error:
                assert "Too many items" in str(error)
                ends.append(count)
                break
    assert len(ends) == 2 and ends[0] == ends[1] > 3


def test_a_constraint_that_turns_slow_is_known_to_be_in_all_its_rows(embedded: XlaBatchEngine) -> None:
    """They know it before one of them exhausts its budget; drafts and resets do not wait for such masks."""
    assert embedded.tokenizer is not None
    (token,) = embedded.tokenizer.encode("a", add_special_tokens=False)
    vocabulary = embedded.checkpoint.config.vocab_size
    grammars = Grammars(embedded.tokenizer, vocabulary, (0,))
    one, other = (
        TokenMask(
            vocabulary, matcher=grammars.matcher(StructuredOutputsParams(grammar='start: start start | "a"'))
        )
        for _ in range(2)
    )
    assert not one.may_be_slow
    first = one.words
    while not one.may_be_slow:
        one.push(token)
    assert other.may_be_slow and other.copy().may_be_slow and one.forced() == []
    one.take(token)
    assert one.is_behind
    one.reset()
    assert not one.is_behind and one.words is first
    one.push(token)
    other.push(token)
    assert (one.words == other.words).all()
