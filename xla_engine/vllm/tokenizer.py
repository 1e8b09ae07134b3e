"""The tokenizer of `LLM.get_tokenizer()`, with the methods of transformers' tokenizers that scripts call."""

from collections.abc import Mapping, Sequence
from typing import Any

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.open_engine import EngineClient
from xla_engine.prompts import Prompt, TextPair, prompt_parts
from xla_engine.text import tokenizer
from xla_engine.text.fill_in import FillIn

_TRUNCATIONS = (True, "longest_first")


class Encoding(dict[str, Any]):
    """`input_ids` and `attention_mask`, also as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class VllmTokenizer:
    """An engine's tokenizer and chat template; methods and meaning are transformers'.

    Raises ConfigError where the model has no tokenizer.
    """

    def __init__(self, engine: EngineClient) -> None:
        if engine.tokenizer is None:
            raise ConfigError("the model has no tokenizer.json; prompts are token ids")
        self._engine, self._own = engine, engine.tokenizer
        eos = engine.validator.eos_token_ids
        self.eos_token_id: int | None = eos[0] if eos else None
        self.eos_token = None if not eos else self._own.token_string(eos[0])
        special = {} if engine.chat_template is None else engine.chat_template.special_tokens
        for kind in ("bos", "pad", "unk"):
            token = special.get(f"{kind}_token")
            setattr(self, f"{kind}_token", token)
            setattr(self, f"{kind}_token_id", None if token is None else self._own.plain_ids(token)[0])
        self.vocab_size = self._own.vocab_size
        self.model_max_length = engine.max_model_len
        self.is_fast = True

    def __len__(self) -> int:
        return self.vocab_size

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the engine's tokenizer: `incremental`, `to_json`, ..."""
        if name.startswith("_"):  # while a copy is made
            raise AttributeError(name)
        return getattr(self._own, name)

    @property
    def chat_template(self) -> str | None:
        """The default template's jinja2 source."""
        template = self._engine.chat_template
        return None if template is None else template.sources.get("default")

    def encode(
        self, text: str, text_pair: str | None = None, *, add_special_tokens: bool = True, **kwargs: Any
    ) -> list[int]:
        """Token ids of a text. kwargs: `truncation` and `max_length`. Raises InvalidRequestError."""
        ids = self._own.encode(text, text_pair, add_special_tokens=add_special_tokens)
        return cut(ids, kwargs, side="right")

    def __call__(self, text: str | Sequence[str], text_pair: str | None = None, **kwargs: Any) -> Encoding:
        """The same of one text or of many, unpadded, with a mask of ones."""
        if isinstance(text, str):
            ids = self.encode(text, text_pair, **kwargs)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        many = [self.encode(each, text_pair, **kwargs) for each in text]
        return Encoding(input_ids=many, attention_mask=[[1] * len(ids) for ids in many])

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._own.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], **options: Any) -> list[str]:
        """Text of each sequence."""
        return [self.decode(each, **options) for each in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation, or of each of several: token ids, or text without `tokenize`.

        variables: further ones of the template. Raises InvalidRequestError, ChatTemplateError.
        """
        if conversation and not isinstance(conversation[0], Mapping):
            shared = {"tools": tools, "chat_template": chat_template, "tokenize": tokenize, **variables}
            shared |= {"continue_final_message": continue_final_message}
            shared |= {"add_generation_prompt": add_generation_prompt}
            return [self.apply_chat_template(each, **shared) for each in conversation]
        if variables.pop("return_tensors", None) is not None or variables.pop("return_dict", False):
            raise InvalidRequestError(
                "token ids are returned as a list; leave return_tensors and return_dict out"
            )
        text = self._engine.render_chat(
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables,
        )
        return self._own.plain_ids(text) if tokenize else text


def tokenised(
    prompts: Sequence[Prompt], own: tokenizer.Tokenizer | None, kwargs: Mapping[str, Any] | None, *, side: str
) -> list[Prompt]:
    """`prompts` as vLLM's `tokenization_kwargs` want them; side: the end that is cut off where they do not say.

    kwargs: `add_special_tokens`, `truncate_prompt_tokens` (-1: what an engine takes anyway), `truncation`,
        `max_length` and `truncation_side`. Raises InvalidRequestError for others.
    """
    if not kwargs:
        return list(prompts)
    left = dict(kwargs)
    special, side = left.pop("add_special_tokens", True), left.pop("truncation_side", side)
    found: list[Prompt] = []
    for prompt in prompts:
        content, text, salt, pictures, placed = prompt_parts(prompt)
        if pictures or placed:
            raise InvalidRequestError("tokenization_kwargs are for texts without pictures; leave them out")
        if isinstance(content, str):
            if own is None:
                raise InvalidRequestError("the model has no tokenizer.json; give token ids")
            ids = own.encode(content, add_special_tokens=special)
        elif isinstance(content, TextPair | FillIn):
            raise InvalidRequestError("tokenization_kwargs are for single texts; leave them out")
        else:
            ids = list(content)
        made = {"prompt_token_ids": cut(ids, left, side=side), "prompt": text, "cache_salt": salt}
        found.append(made)  # type: ignore[arg-type]
    return found


def cut(ids: list[int], kwargs: Mapping[str, Any], *, side: str) -> list[int]:
    """The first or last of `ids` as `truncation` and `max_length`, or `truncate_prompt_tokens`, say."""
    known = {"truncation", "max_length", "truncate_prompt_tokens"}
    if unknown := sorted(kwargs.keys() - known):
        raise InvalidRequestError(
            f"unknown tokenizer argument {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )
    most = kwargs.get("truncate_prompt_tokens")
    if kwargs.get("truncation") in _TRUNCATIONS:
        most = kwargs.get("max_length")
    if most is None or most < 0 or len(ids) <= most:
        return ids
    return ids[:most] if side == "right" else ids[len(ids) - most :]
