"""Choose the formats of tool calls and reasoning, by default from the source of the chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.text.parsers.formats import FirstCall, Forced, Harmony, Hermes, Plain, Think, Whole
from xla_engine.text.parsers.scan import Parser
from xla_engine.text.parsers.tools import Tools
from xla_engine.text.parsers.xml_calls import Schemas, xml_call_events

TOOL_PARSERS: dict[str, Callable[[Schemas], Parser]] = {
    "hermes": lambda _: Hermes(),
    "qwen3_coder": lambda schemas: Hermes(partial(xml_call_events, schemas=schemas)),
    "llama3": lambda _: Whole(("<|python_tag|>",), bare=True, separator=";"),
    "mistral": lambda _: Whole(("[TOOL_CALLS]",)),
    "harmony": lambda _: Harmony(),
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
        return cls(
            tools=None if tools == "none" else tools, reasoning=None if reasoning == "none" else reasoning
        )

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

    @property
    def needs_special_tokens(self) -> bool:
        """Whether tags may be special tokens, so that these must not be skipped in the text."""
        return "harmony" in (self.tools, self.reasoning) or self.tools in ("llama3", "mistral")

    def parser(self, *, tools: Tools, thinking: bool) -> Parser | None:
        """A parser for one answer; None if all of it is content.

        tools: those that may be called. thinking: whether the prompt ended with the opening tag of reasoning.
        """
        found = self._parser(tools, thinking=thinking)
        return FirstCall(found) if found is not None and not tools.parallel else found

    def _parser(self, tools: Tools, *, thinking: bool) -> Parser | None:
        if "harmony" in (self.tools, self.reasoning):
            return Harmony()
        rest = None
        if tools.choice == "auto" and self.tools is not None:
            rest = TOOL_PARSERS[self.tools](tools.schemas)
        if self.reasoning == "think":
            return Think(rest or Plain(), begun=thinking)
        return rest


def forced(name: str | None) -> Parser:
    """A parser for an answer that a grammar constrains to a tool call."""
    return Forced(name)
