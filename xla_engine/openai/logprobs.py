"""The log-probabilities of an answer in the formats of the APIs: what each token of an answer shows besides its text.

Files, the server, its streams and its responses all take their records from here. A number that a token has in
`CompletionOutput` becomes visible to clients by a line in `ChatLogprobs.records` and one in `TextLogprobs.completion`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_engine.openai.requests import LineRequest
from xla_engine.outputs import CompletionOutput, Logprob, RequestOutput
from xla_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import Tokenizer

ENTRIES = 512  # log-probabilities between two pauses, about half a millisecond of work


class TextLogprobs:
    """Makes the completions API's logprobs blocks of parallel lists, with `token_ids` added, for tokens in order.

    `text_offset` is the number of characters before each token; a token that only begins a character has the offset
    of that character. `top_logprobs` has the most likely tokens and the chosen one. If two tokens have the same text,
    the likelier is kept.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, *, begin: int = 0) -> None:
        """begin: offset of the first token."""
        self.params, self._tokenizer, self._length = params, tokenizer, begin
        self._text = None if tokenizer is None else tokenizer.incremental(params.skip_special_tokens)

    def completion(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """The block of a completion's tokens; None without log-probabilities."""
        if completion.logprobs is None:
            return None
        return self._block(completion.token_ids, completion.logprobs, completion.top_logprobs)

    def prompt(self, output: RequestOutput, part: slice = slice(None)) -> dict[str, Any]:
        """The block of a prompt's tokens; null for the first token, which nothing predicts. part: the positions."""
        ids = output.prompt_token_ids[part]
        scores = (output.prompt_logprobs or (None,) * len(output.prompt_token_ids))[part]
        values = [
            None if found is None else found[token_id].logprob
            for token_id, found in zip(ids, scores, strict=True)
        ]
        return self._block(ids, values, scores if self.params.logprobs else None)

    def _block(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None],
        tops: Sequence[Mapping[int, Logprob] | None] | None,
    ) -> dict[str, Any]:
        return {
            "tokens": [_token_text(token_id, self._tokenizer) for token_id in token_ids],
            "token_logprobs": [None if value is None else _finite(value) for value in logprobs],
            "top_logprobs": None
            if tops is None
            else [None if found is None else _top_texts(found, self._tokenizer) for found in tops],
            "text_offset": None if self._text is None else list(map(self._offset, token_ids)),
            "token_ids": list(token_ids),
        }

    def _offset(self, token_id: int) -> int:
        assert self._text is not None
        offset = self._length
        self._length += len(self._text.push(token_id))
        return offset


class ChatLogprobs:
    """Makes the chat API's logprobs blocks with one record for each token, and `token_ids` added."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.params, self._tokenizer = params, tokenizer

    def completion(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """The block of a completion's tokens; None without log-probabilities."""
        if completion.logprobs is None:
            return None
        content = self.records(completion)
        return {"content": content, "refusal": None, "token_ids": list(completion.token_ids)}

    def records(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The record of each token, as chats and responses have it."""
        tops: Sequence[Mapping[int, Logprob]] = completion.top_logprobs or [{}] * len(completion.token_ids)
        most, logprobs = self.params.logprobs or 0, completion.logprobs or ()
        return [
            {
                **_token(token_id, _finite(value), self._tokenizer),
                "top_logprobs": [_token(*other, self._tokenizer) for other in _likeliest(top, most)],
            }
            for token_id, value, top in zip(completion.token_ids, logprobs, tops, strict=True)
        ]


def logprob_blocks(
    request: LineRequest, tokenizer: Tokenizer | None, *, begin: int = 0
) -> TextLogprobs | ChatLogprobs:
    """What makes the logprobs blocks of one choice. begin: as in `TextLogprobs`."""
    if request.is_chat:
        return ChatLogprobs(request.params, tokenizer)
    return TextLogprobs(request.params, tokenizer, begin=begin)


def _top_texts(found: Mapping[int, Logprob], tokenizer: Tokenizer | None) -> dict[str, float]:
    return {_token_text(token_id, tokenizer): value for token_id, value in reversed(_likeliest(found))}


def few_tokens(completion: CompletionOutput, params: SamplingParams) -> Iterator[CompletionOutput]:
    """A completion a few tokens at a time."""
    for part in token_parts(len(completion.token_ids), params.logprobs):
        yield completion.part(part)


def token_parts(tokens: int, logprobs: int | None) -> Iterator[slice]:
    """Slices of tokens with about `ENTRIES` log-probabilities each; at least one slice."""
    size = max(ENTRIES // (1 + (logprobs or 0)), 1)
    return (slice(begin, begin + size) for begin in range(0, max(tokens, 1), size))


def prompt_logprobs(output: RequestOutput, part: slice) -> list[dict[str, Any] | None]:
    """Prompt logprobs of some positions in vLLM's format: by token id, and null for the first token."""
    return [
        None if found is None else dict(map(_named, found.items()))
        for found in (output.prompt_logprobs or ())[part]
    ]


def _named(item: tuple[int, Logprob]) -> tuple[str, dict[str, Any]]:
    token_id, entry = item
    return str(token_id), {**entry._asdict(), "logprob": _finite(entry.logprob)}


def _likeliest(found: Mapping[int, Logprob], lowest_rank: float = math.inf) -> list[tuple[int, float]]:
    """Token ids and logprobs, most likely first, without impossible tokens."""
    ranked = sorted(found.items(), key=lambda item: item[1].rank)
    return [
        (token_id, entry.logprob)
        for token_id, entry in ranked
        if entry.rank <= lowest_rank and math.isfinite(entry.logprob)
    ]


def _token(token_id: int, logprob: float | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    raw = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
    return {"token": _token_text(token_id, tokenizer), "logprob": logprob, "bytes": raw}


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token's text, or its bytes in OpenAI's notation if they are part of a character."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
