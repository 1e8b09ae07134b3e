"""The tokenizers and models of tests/support/format_models.py have the tokens of their formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.format_models import FORMATS, format_model, format_tokenizer
from xla_engine.model_loader.model_files import open_model
from xla_engine.text.parsers.chats import Dialect
from xla_engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", FORMATS)
def test_each_token_of_a_format_is_one_id(name: str, tmp_path: Path) -> None:
    tokenizer, tokens = format_tokenizer(name), FORMATS[name]
    for token in (*tokens.special, *tokens.text):
        (number,) = tokenizer.plain_ids(token)
        assert tokenizer.token_string(number) == token
        assert tokenizer.decode([number]) == ("" if token in tokens.special else token)
    model = format_model(name, tmp_path / "model")
    assert Tokenizer.from_pretrained(model).has_tokens_of(tokenizer)
    template = open_model(model).chat_template()
    assert template is not None
    assert Dialect.of(str(template.sources)).tools == name
