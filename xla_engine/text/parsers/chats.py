"""Chat requests: the template's input, the tools, and how to parse the answer.

The formats of tool calls and reasoning are by default those that the source of the chat template shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import StructuredOutputsParams
from xla_engine.text.parsers.calls import Schemas, tagged_xml, xml_call_events
from xla_engine.text.parsers.formats import first_call, forced, harmony, hermes, plain, think, whole
from xla_engine.text.parsers.scan import Parser, message_of
from xla_engine.text.parsers.tools import Tools, take_tools
from xla_engine.utils.shown import shown

TOOL_PARSERS: dict[str, Callable[[Schemas], Parser]] = {
    "hermes": lambda _: hermes(),
    "qwen3_coder": lambda schemas: hermes(partial(xml_call_events, schemas=schemas)),
    "llama3": lambda _: whole(("<|python_tag|>",), bare=True, separator=";"),
    "mistral": lambda _: whole(("[TOOL_CALLS]",)),
    "harmony": lambda _: harmony(),
}
REASONING_PARSERS = ("think", "harmony")
_SIGNS = (
    ("harmony", "<|channel|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("qwen3_coder", "<function="),
    ("hermes", "<tool_call>"),
    ("llama3", "<|python_tag|>"),
    ("llama3", '{"name": function name, "parameters":'),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Formats of a model. tools, reasoning: a format's name, or None."""

    tools: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, template: str, tools: str = "auto", reasoning: str = "auto") -> Dialect:
        """The given formats; "auto" infers one from the chat template, "none" disables it."""
        found = next((name for name, sign in _SIGNS if sign in template), None)
        thinks = "harmony" if found == "harmony" else "think" if "<think>" in template else None
        return cls(
            tools=found if tools == "auto" else None if tools == "none" else tools,
            reasoning=thinks if reasoning == "auto" else None if reasoning == "none" else reasoning,
        )

    @classmethod
    def named(cls, tools: str | None, reasoning: str | None) -> Dialect:
        """The formats with these names; None or "none" disables one. Raises ConfigError."""
        formats = (("tool_parser", tools, TOOL_PARSERS), ("reasoning_parser", reasoning, REASONING_PARSERS))
        for option, name, known in formats:
            if name not in (None, "none", *known):
                raise ConfigError(f"{option} must be none, {', '.join(known)}, not {name!r}")
        return cls.of("", tools or "none", reasoning or "none")

    @classmethod
    def take(cls, defaults: dict[str, Any]) -> Dialect | None:
        """Remove `tool_parser` and `reasoning_parser` from request defaults; returns None if neither is set."""
        names = [defaults.pop(key, None) for key in ("tool_parser", "reasoning_parser")]
        if names == [None, None]:
            return None
        return cls.named(*names)

    def as_defaults(self) -> dict[str, str]:
        """The inverse of `take`."""
        return {"tool_parser": self.tools or "none", "reasoning_parser": self.reasoning or "none"}


TEMPLATE_FLAGS = ("add_generation_prompt", "continue_final_message")
HINTS = ("reasoning_effort", "verbosity")  # hints to the model, passed to the template
TEMPLATE_FIELDS = (*TEMPLATE_FLAGS, "chat_template_kwargs")
OPENING = "<think>"
_TAIL = 32  # characters at the end of a prompt in which the opening tag is searched; blanks may follow it


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """Messages that the chat template turns into a prompt.

    options: keyword arguments of `render_chat` from the request.
    """

    messages: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to parse the answer to a chat. tools: those it may call. dialect: formats of tool calls and reasoning."""

    tools: Tools = field(default_factory=Tools)
    dialect: Dialect = field(default_factory=Dialect)

    def parser(self, *, thinking: bool) -> Parser:
        """A parser for one choice. thinking: whether the prompt ended with the opening tag of reasoning."""
        if self.tools.is_forced:
            return forced(self.tools.name)  # a grammar constrains the answer to a call
        found = self._parser(self.tools, thinking=thinking)
        return found if self.tools.parallel else first_call(found)

    def reasoning_parser(self, *, thinking: bool) -> Parser | None:
        """A parser that separates reasoning only; None without a reasoning format. thinking: as in `parser`."""
        if self.tools.is_forced or self.dialect.reasoning is None:
            return None
        return self._parser(Tools(), thinking=thinking)

    def _parser(self, tools: Tools, *, thinking: bool) -> Parser:
        """A parser of the dialect. tools: those that may be called."""
        if "harmony" in (self.dialect.tools, self.dialect.reasoning):
            return harmony()
        rest = plain()
        if tools.choice == "auto" and self.dialect.tools is not None:
            rest = TOOL_PARSERS[self.dialect.tools](tools.schemas)
        return think(rest, begun=thinking) if self.dialect.reasoning == "think" else rest

    def prepared(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters under which the text includes the tags that the parser needs."""
        tools, reasoning = self.dialect.tools, self.dialect.reasoning
        tags_are_tokens = "harmony" in (tools, reasoning) or tools in ("llama3", "mistral")
        if tags_are_tokens and not self.tools.is_forced:
            return replace(params, skip_special_tokens=False)
        return params


def take_chat(body: dict[str, Any], dialect: Dialect | None, template: str | None) -> tuple[Chat, Reading]:
    """Remove the chat's fields from a body, so that sampling fields remain; `render_chat` checks the messages.

    dialect: if None, only forced tool calls are parsed; others stay text. template: replaces the checkpoint's.
    Raises InvalidRequestError.
    """
    messages = body.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError('"messages" must be a list of at least one {"role": ..., "content": ...}')
    shown, tools = body.get("tools") or [], Tools()
    if dialect is None and body.get("tool_choice") in (None, "none", "auto"):
        body.pop("tool_choice", None)
        if not isinstance(shown, list) or not all(isinstance(tool, dict) for tool in shown):
            raise InvalidRequestError(f"tools must be a list of objects, not {shown!r}")
    else:
        tools = take_tools(body)
        shown = list(tools.tools)
    constrained = body.get("structured_outputs") or body.get("response_format") not in (
        None,
        {"type": "text"},
    )
    if tools.is_forced and constrained:
        raise InvalidRequestError("tool_choice that forces a call and response_format exclude each other")
    constraint = tools.constraint()
    if tools.choice == "auto" and tools.strict and dialect is not None and not constrained:
        constraint = _strict(tools, dialect)
    if constraint is not None:
        body["structured_outputs"] = constraint
    body.pop("tools", None)
    options = _template_options(body) | ({"tools": shown} if shown else {})
    if template is not None:
        options["chat_template"] = template
    return Chat(messages=tuple(messages), options=options), Reading(tools=tools, dialect=dialect or Dialect())


def _strict(tools: Tools, dialect: Dialect) -> StructuredOutputsParams | None:
    """A constraint that makes tool calls fit their schemas; None if tool calls are not parsed."""
    if dialect.tools is None:
        return None
    if dialect.tools == "qwen3_coder":
        return tagged_xml(tools)
    if dialect.tools != "hermes":
        raise InvalidRequestError(
            f"tools: strict: true is not supported for calls in the format {dialect.tools} of this model; leave "
            f"strict "
            'out, or give tool_choice "required" or a function'
        )
    return tools.tagged()


def _template_options(body: dict[str, Any]) -> dict[str, Any]:
    hints = {name: value for name in HINTS if (value := body.pop(name, None)) is not None}
    given = {name: body.pop(name, None) for name in TEMPLATE_FIELDS}
    options = {name: value for name, value in given.items() if value is not None}
    for name in TEMPLATE_FLAGS:
        if not isinstance(options.get(name, False), bool):
            raise InvalidRequestError(f"{name} must be true or false, not {options[name]!r}")
    kwargs = options.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise InvalidRequestError(f"chat_template_kwargs must be an object, not {kwargs!r}")
    for name, value in hints.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, not {shown(value)}")
        options["chat_template_kwargs"] = {name: value, **options.get("chat_template_kwargs", {})}
    return options


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag of reasoning."""
    return prompt[-_TAIL:].rstrip().endswith(OPENING)


def begins_thinking(output: RequestOutput, tokenizer: Any) -> bool:
    """Whether a chat's prompt ended with the opening tag of reasoning. tokenizer: decodes prompts given as ids."""
    text = output.prompt
    if text is None and tokenizer is not None:
        text = b"".join(map(tokenizer.token_bytes, output.prompt_token_ids[-_TAIL:])).decode(errors="ignore")
    return opens_reasoning(text or "")


def part_message(choice: dict[str, Any], parser: Parser, name: str) -> None:
    """Split a choice's text into content, reasoning and tool calls. The ids of calls are derived from `name`."""
    message = choice["message"]
    found = message_of(parser, message["content"])
    message["content"] = found.content or (None if found.calls else "")
    if found.reasoning:
        message |= {"reasoning_content": found.reasoning, "reasoning": found.reasoning}
    if found.calls:
        message["tool_calls"] = [
            {
                "id": "call_" + hashlib.blake2b(f"{name}/{number}".encode(), digest_size=12).hexdigest(),
                "type": "function",
                "function": {"name": function, "arguments": arguments},
            }
            for number, (function, arguments) in enumerate(found.calls)
        ]
        if choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
