"""Fill-in-the-middle prompts: the text before and after a gap, joined by a model's own tokens.

The order is prefix, suffix, middle (Bavarian et al., "Efficient Training of Language Models to Fill in the Middle",
section 3), or suffix, prefix for models without a token for the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from xla_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from xla_engine.text.tokenizer import Tokenizer

_NAMES = (  # of prefix, suffix and middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM-4.5
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")  # Codestral
_ENDS = (  # tokens that models write after the middle
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<repo_name>",
    "▁<EOT>",
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """A prompt of the text before and after a gap, which the model fills. token_ids: of the prompt, if known."""

    before: str
    after: str
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class FillInTokens:
    """Ids of a model's tokens for prompts of this kind. middle: None if the suffix comes first.
    ends: those that end the answer."""

    prefix: int
    suffix: int
    middle: int | None
    ends: tuple[int, ...]


@lru_cache(maxsize=8)
def fill_in_tokens(tokenizer: Tokenizer) -> FillInTokens:
    """The tokens of a model. Raises InvalidRequestError if it has none."""
    own: list[int] | None = None
    for names in (*_NAMES, _SUFFIX_FIRST):
        ids = [tokenizer.id_of(name) for name in names]
        if None not in ids:
            own = [each for each in ids if each is not None]
            break
    if own is None:
        raise InvalidRequestError(
            "suffix: the model has no fill-in-the-middle tokens such as <|fim_prefix|>; leave it out, or use a model "
            "of code that has them"
        )
    ends = tuple(each for name in _ENDS if (each := tokenizer.id_of(name)) is not None)
    if len(own) == 3:
        return FillInTokens(own[0], own[1], own[2], (*own, *ends))
    return FillInTokens(own[1], own[0], None, (*own, *ends))


def fill_in_ids(prompt: FillIn, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> tuple[int, ...]:
    """The token ids of a prompt. Raises InvalidRequestError."""
    if prompt.token_ids is not None:
        return prompt.token_ids
    tokens = fill_in_tokens(tokenizer)
    begin = tokenizer.encode("") if add_special_tokens else []
    before = [tokens.prefix, *tokenizer.encode(prompt.before, add_special_tokens=False)]
    inner = tokenizer.inner_ids if tokenizer.drops_first_space else tokenizer.plain_ids
    after = [tokens.suffix, *inner(prompt.after)]
    if tokens.middle is None:
        return (*begin, *after, *before)
    return (*begin, *before, *after, tokens.middle)
