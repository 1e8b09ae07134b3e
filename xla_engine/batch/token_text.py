"""The text of single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import IncrementalDetokenizer


class TokenText(Protocol):
    """The part of the tokenizer that gives the text of single tokens."""

    def token_bytes(self, token_id: int) -> bytes: ...
    def incremental(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer: ...
