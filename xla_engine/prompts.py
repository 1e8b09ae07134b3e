"""What may stand for a prompt: text, token ids, or one of vLLM's dicts around either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar

from xla_engine.errors import InvalidRequestError
from xla_engine.utils.plain import plain
from xla_engine.utils.shown import shown

T = TypeVar("T")


class TextPrompt(TypedDict):
    """vLLM's dict around a prompt's text.

    cache_salt: as in `xla_engine.engine.protocol.SharedOptions`.
    """

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """vLLM's dict around a prompt's token ids.

    prompt: the text that the output shows; it is not tokenised.
    cache_salt: as in `xla_engine.engine.protocol.SharedOptions`.
    """

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are tokenised as one: a query and a document, for a classifier that scores them."""

    first: str
    second: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | TextPair


class PromptParts(NamedTuple):
    """A prompt taken apart.

    content: what is computed. text: what the output shows, None where there is none.
    cache_salt: None where the prompt names none.
    """

    content: str | Sequence[int] | TextPair
    text: str | None
    cache_salt: str | None = None


def prompt_parts(prompt: Prompt) -> PromptParts:
    """Take a prompt apart. Raises InvalidRequestError for a mapping that is no prompt."""
    if isinstance(prompt, str):
        return PromptParts(prompt, prompt)
    if isinstance(prompt, TextPair):
        return PromptParts(prompt, prompt.first + prompt.second)
    if isinstance(prompt, Mapping):
        return _of_mapping({name: value for name, value in prompt.items() if value is not None})
    return PromptParts(token_ids_of(prompt), None)


def content_of(prompt: Prompt) -> str | Sequence[int]:
    """Text or token ids of a prompt. Raises InvalidRequestError."""
    content = prompt_parts(prompt).content
    if isinstance(content, TextPair):
        raise InvalidRequestError("a pair of texts is for models that score documents; give one text")
    return content


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. Columns of pandas and of datasets, and arrays of token ids, are taken too."""
    prompts = plain(prompts)
    if isinstance(prompts, str | Mapping | TextPair):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Iterable):
        raise InvalidRequestError(
            f"prompts must be text, token ids, or a list of either, not {shown(prompts)}"
        )
    items = list(prompts)
    if items and all(isinstance(plain(item), int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _of_mapping(fields: Mapping[str, Any]) -> PromptParts:
    if unknown := sorted(map(str, fields.keys() - {"prompt", "prompt_token_ids", "cache_salt"})):
        raise InvalidRequestError(
            f"a prompt's dict has 'prompt' or 'prompt_token_ids', and 'cache_salt'; remove {shown(unknown[0])}"
        )
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"'prompt' of a prompt's dict must be text, not {shown(text)}")
    if token_ids is not None:
        return PromptParts(token_ids_of(token_ids), text, fields.get("cache_salt"))
    if text is None:
        raise InvalidRequestError("a prompt's dict needs 'prompt' (text) or 'prompt_token_ids'")
    return PromptParts(text, text, fields.get("cache_salt"))


def token_ids_of(prompt: object) -> tuple[int, ...]:
    """A sequence, array or tensor of integers as token ids. Raises InvalidRequestError."""
    token_ids = plain(prompt)
    if isinstance(token_ids, str | bytes | Mapping) or not isinstance(token_ids, Iterable):
        raise InvalidRequestError(f"a prompt must be text or token ids, not {shown(prompt)}")
    return tuple(token_id if type(token_id) is int else plain(token_id) for token_id in token_ids)


def per_prompt(name: str, given: T | Sequence[T], kind: type[T], count: int) -> list[T]:
    """One of `given` for each of so many prompts. Raises InvalidRequestError where there are more, or fewer."""
    if isinstance(given, kind) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InvalidRequestError(f"{len(given)} {name} for {count} prompts; give one or {count}")
    return list(given)
