"""The token counts that an answer reports: prompt, cached, new and reasoning tokens, and drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_engine.batch.requests import LineRequest
from xla_engine.batch.token_text import TokenText
from xla_engine.outputs import RequestOutput
from xla_engine.text.parsers.scan import Reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """cached: prompt tokens read from the prefix cache. drafted, accepted: draft tokens, and the accepted ones."""

    prompt: int = 0
    cached: int = 0
    new: int = 0
    drafted: int = 0
    accepted: int = 0
    reasoning: int = 0

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput], *, new: int, reasoning: int) -> Usage:
        """The usage of a call with one output for each prompt."""
        found = list(outputs)
        return cls(
            prompt=sum(len(each.prompt_token_ids) for each in found),
            cached=sum(each.num_cached_tokens for each in found),
            new=new,
            drafted=sum(each.num_drafted_tokens for each in found),
            accepted=sum(each.num_accepted_tokens for each in found),
            reasoning=reasoning,
        )

    def as_completion(self) -> dict[str, Any]:
        """The usage object of completions and chats."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.new,
            "total_tokens": self.prompt + self.new,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": self._details(),
        }

    def as_response(self) -> dict[str, Any]:
        """The usage object of responses."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.new,
            "output_tokens_details": self._details(),
            "total_tokens": self.prompt + self.new,
        }

    def _details(self) -> dict[str, int]:
        return {
            "reasoning_tokens": self.reasoning,
            "accepted_prediction_tokens": self.accepted,
            "rejected_prediction_tokens": self.drafted - self.accepted,
        }


class ReasoningTokens:
    """Counts the reasoning tokens of one choice, including the opening tag."""

    def __init__(self, request: LineRequest, tokenizer: TokenText | None, *, thinking: bool) -> None:
        """thinking: whether the prompt ended with the opening tag."""
        reading = request.reading
        parser = None if reading is None else reading.reasoning_parser(thinking=thinking)
        self._parser = None if tokenizer is None else parser
        self._text = (
            tokenizer.incremental(request.params.skip_special_tokens) if tokenizer and parser else None
        )
        self._silent = 0  # tokens since the last one that produced an event
        self.count = 0

    def add(self, token_ids: Sequence[int]) -> int:
        """Read more tokens, and return the count so far."""
        if self._parser is None or self._text is None:
            return 0
        for token_id in token_ids:
            self._silent += 1
            for event in self._parser.feed(self._text.push(token_id)):
                self.count += self._silent if isinstance(event, Reasoning) else 0
                self._silent = 0
        return self.count
