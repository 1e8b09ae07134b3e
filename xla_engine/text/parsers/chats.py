"""Chat requests: the template's input, the tools, and how to parse the answer.

The formats of tool calls and reasoning are by default those that the source of the chat template shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from xla_engine.errors import ConfigError, InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from xla_engine.text.parsers.call_grammars import calls_grammar
from xla_engine.text.parsers.formats import first_call, forced, harmony, plain, think
from xla_engine.text.parsers.offered import Offered, take_offered, with_plain_inputs
from xla_engine.text.parsers.scan import Parser
from xla_engine.text.parsers.thoughts import THOUGHTS
from xla_engine.text.parsers.tool_calls import tool_calls
from xla_engine.text.parsers.tools import Tools, take_tools
from xla_engine.utils.json_size import is_longer
from xla_engine.utils.shown import shown

# Each makes parsers from the offered tools' schemas and, if they are at hand, `Tools.kinds`.
TOOL_PARSERS: dict[str, Callable[..., Parser]] = {
    **dict.fromkeys(
        ("hermes", "qwen3_coder", "glm", "llama3", "mistral", "deepseek", "kimi_k2", "gemma4", "json"),
        tool_calls,
    ),
    "harmony": lambda *tools: harmony(tools[0], partial(tool_calls, *tools)),
}
REASONING_PARSERS = (*THOUGHTS, "harmony")
_SIGNS = (
    ("harmony", "<|channel|>"),
    ("mistral", "[TOOL_CALLS]"),
    ("qwen3_coder", "<function="),
    ("glm", "<arg_key>"),
    ("hermes", "<tool_call>"),
    ("llama3", "<|python_tag|>"),
    ("llama3", '{"name": function name, "parameters":'),
    ("deepseek", "<｜tool▁calls▁begin｜>"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("gemma4", "<|tool_call>call:"),
)
_TOKENS = ("llama3", "mistral", "deepseek", "kimi_k2", "gemma4")  # their tags may be special tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Formats of a model. tools, reasoning: a format's name, or None."""

    tools: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, template: str, tools: str = "auto", reasoning: str = "auto") -> Dialect:
        """The given formats; "auto" infers one from the chat template, "none" disables it. The format of calls of an
        unknown template is "json"; calls are read in all forms, whatever the format."""
        found = next((name for name, sign in _SIGNS if sign in template), None)
        thinks = next((name for name, tags in THOUGHTS.items() if tags.opening in template), None)
        thinks = "harmony" if found == "harmony" else thinks
        return cls(
            tools=found or "json" if tools == "auto" else None if tools == "none" else tools,
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
_OPENINGS = tuple(tags.opening for tags in THOUGHTS.values())
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
    """How to parse the answer to a chat. tools: those it may call. dialect: formats of tool calls and reasoning.
    offered: how the client sent the tools. begun: the answer's constraint if the prompt ends inside reasoning; None if
    it is the same."""

    tools: Tools = field(default_factory=Tools)
    dialect: Dialect = field(default_factory=Dialect)
    offered: Offered = field(default_factory=Offered)
    begun: StructuredOutputsParams | None = None

    def sampling(self, params: SamplingParams, prompt: str | None) -> SamplingParams:
        """The sampling parameters of an answer to this prompt."""
        if self.begun is None or not opens_reasoning(prompt or ""):
            return params
        return replace(params, structured_outputs=self.begun)

    def parser(self, *, thinking: bool) -> Parser:
        """A parser for one choice. thinking: whether the prompt ended with the opening tag of reasoning."""
        if self.tools.is_forced:
            found = forced(self.tools.name)  # a grammar constrains the answer to a call
        else:
            found = self._parser(self.tools, thinking=thinking)
            found = found if self.tools.parallel else first_call(found)
        custom = self.offered.custom
        return found.changed(partial(with_plain_inputs, custom=custom)) if custom else found

    def reasoning_parser(self, *, thinking: bool) -> Parser | None:
        """A parser that separates reasoning only; None without a reasoning format. thinking: as in `parser`."""
        if self.tools.is_forced or self.dialect.reasoning is None:
            return None
        return self._parser(Tools(), thinking=thinking)

    def _parser(self, tools: Tools, *, thinking: bool) -> Parser:
        """A parser of the dialect. tools: those that may be called."""
        may_call = tools.choice == "auto" and self.dialect.tools is not None
        is_harmony = "harmony" in (self.dialect.tools, self.dialect.reasoning)
        if not may_call:
            rest = harmony() if is_harmony else plain()
        else:
            name = "harmony" if is_harmony else self.dialect.tools or ""
            rest = TOOL_PARSERS[name](tools.schemas, tools.kinds)
        if (tags := THOUGHTS.get(self.dialect.reasoning or "")) is not None and not is_harmony:
            return think(rest, begun=thinking, may_call=may_call, tags=tags)
        return rest

    def prepared(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters under which the text includes the tags that the parser needs."""
        tools, reasoning = self.dialect.tools, self.dialect.reasoning
        tags_are_tokens = "harmony" in (tools, reasoning) or tools in _TOKENS or reasoning in _TOKENS
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
    offered = take_offered(body)
    given, tools = body.get("tools") or [], Tools()
    if dialect is None and body.get("tool_choice") in (None, "none", "auto"):
        body.pop("tool_choice", None)
        if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
            raise InvalidRequestError(f"tools must be a list of objects, not {shown(given)}")
    else:
        tools = take_tools(body)
        given = list(tools.tools)
    if tools.is_forced and is_longer(tools.schemas, MAX_CONSTRAINT_CHARACTERS):
        raise InvalidRequestError(
            "tools: the schemas of forced tools have too many characters; at most "
            f"{MAX_CONSTRAINT_CHARACTERS}; make them smaller, or leave out tool_choice"
        )
    constraint, begun = _constraint(body, tools, dialect or Dialect())
    if constraint is not None:
        body["structured_outputs"] = constraint
    body.pop("tools", None)
    options = _template_options(body) | ({"tools": given} if given else {})
    if template is not None:
        options["chat_template"] = template
    reading = Reading(tools=tools, dialect=dialect or Dialect(), offered=offered, begun=begun)
    return Chat(messages=tuple(messages), options=options), reading


def _constraint(
    body: dict[str, Any], tools: Tools, dialect: Dialect
) -> tuple[StructuredOutputsParams | None, StructuredOutputsParams | None]:
    """The constraint of the answer's calls and of its `response_format`, which is then taken from the body; and that
    of an answer to a prompt that ends inside reasoning.

    `structured_outputs` is what the whole text must match, calls included, so nothing is added to it.
    """
    raw, wanted = body.get("structured_outputs"), body.get("response_format")
    answer = None if wanted is None else StructuredOutputsParams.from_response_format(wanted)
    if tools.is_forced:
        if raw or answer is not None:
            raise InvalidRequestError("tool_choice that forces a call and response_format exclude each other")
        return tools.constraint(), None
    if raw or (answer is None and tools.choice != "auto"):
        return None, None
    format_ = "harmony" if dialect.reasoning == "harmony" else dialect.tools
    tags = None if answer is None else THOUGHTS.get(dialect.reasoning or "")
    constraint = calls_grammar(tools, format_, answer, thought=tags)
    if constraint is not None:
        body.pop("response_format", None)
    if tags is None or constraint is None:
        return constraint, None
    return constraint, calls_grammar(tools, format_, answer, thought=tags, begun=True)


def _template_options(body: dict[str, Any]) -> dict[str, Any]:
    hints = {name: value for name in HINTS if (value := body.pop(name, None)) is not None}
    given = {name: body.pop(name, None) for name in TEMPLATE_FIELDS}
    options = {name: value for name, value in given.items() if value is not None}
    for name in TEMPLATE_FLAGS:
        if not isinstance(options.get(name, False), bool):
            raise InvalidRequestError(f"{name} must be true or false, not {shown(options[name])}")
    kwargs = options.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise InvalidRequestError(f"chat_template_kwargs must be an object, not {shown(kwargs)}")
    for name, value in hints.items():
        if not isinstance(value, str):
            raise InvalidRequestError(f"{name} must be a string, not {shown(value)}")
        options["chat_template_kwargs"] = {name: value, **options.get("chat_template_kwargs", {})}
    return options


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends with the opening tag of reasoning."""
    return prompt[-_TAIL:].rstrip().endswith(_OPENINGS)


def begins_thinking(output: RequestOutput, tokenizer: Any) -> bool:
    """Whether a chat's prompt ended with the opening tag of reasoning. tokenizer: decodes prompts given as ids."""
    text = output.prompt
    if text is None and tokenizer is not None:
        text = b"".join(map(tokenizer.token_bytes, output.prompt_token_ids[-_TAIL:])).decode(errors="ignore")
    return opens_reasoning(text or "")
