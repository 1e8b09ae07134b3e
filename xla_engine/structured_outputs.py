"""Structured output: text that must match a JSON schema, a regular expression, one of some choices, or a grammar.

Constraints are compiled and followed by llguidance (extra `structured`), which knows no torch: a bitmask per step.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from xla_engine.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

    from xla_engine.text.tokenizer import Tokenizer

MAX_CONSTRAINT_CHARACTERS = 1 << 18  # of a schema, an expression or a grammar, written out
MAX_CHOICES = 1024
_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_KEPT = 32  # compiled constraints kept for requests that bring the same
# Of vLLM's fields, those that are refused by name.
_UNSUPPORTED = frozenset(
    {"disable_additional_properties", "disable_fallback", "structural_tag", "whitespace_pattern"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """What the text must match; exactly one of the first five. Names are vLLM's.

    json: a JSON schema, as an object or as text.   json_object: any JSON object.
    regex: a regular expression, in the syntax of Rust's regex crate, for the whole text.
    choice: the text is one of these strings.   grammar: a Lark grammar with the rule `start`.
    disable_any_whitespace: JSON without blanks between its parts. True unless told otherwise, since models that may
        write blanks can do so for ever; vLLM's default is false.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = True

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(_KINDS)}, not {given or 'none'}"
            )
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"structured_outputs: {name} must be true or false, not {getattr(self, name)!r}"
                )
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequestError(f"structured_outputs: {name} must be text")
        if not isinstance(self.json, str | Mapping | None):
            raise InvalidRequestError("structured_outputs: json must be a schema, as an object or as text")
        if self.choice is not None:
            _check_choice(self.choice)
            object.__setattr__(self, "choice", tuple(self.choice))

    @classmethod
    def from_mapping(cls, values: object) -> StructuredOutputsParams:
        """Build from JSON-like fields; an unknown or unsupported one is an error that names it."""
        if not isinstance(values, Mapping):
            raise InvalidRequestError(f"structured_outputs must be an object, not {values!r}")
        known = {field.name for field in fields(cls)}
        for name in values:
            if name in _UNSUPPORTED:
                raise InvalidRequestError(
                    f"structured_outputs: {name!r} is not supported by this version; remove it"
                )
            if name not in known:
                raise InvalidRequestError(
                    f"structured_outputs: unknown field {name!r}; known: {', '.join(sorted(known))}"
                )
        return cls(**values)

    @classmethod
    def from_response_format(cls, value: object) -> StructuredOutputsParams | None:
        """OpenAI's `response_format`; None for type "text". Raises InvalidRequestError."""
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"response_format must be an object, not {value!r}")
        match value.get("type"):
            case "text":
                return None
            case "json_object":
                return cls(json_object=True)
            case "json_schema":
                described = value.get("json_schema")
                schema = described.get("schema") if isinstance(described, Mapping) else None
                if not isinstance(schema, Mapping):
                    raise InvalidRequestError("response_format: json_schema must be an object with a schema")
                return cls(json=schema)
            case kind:
                raise InvalidRequestError(
                    f'response_format: type must be "text", "json_object" or "json_schema", not {kind!r}'
                )


def _check_choice(choice: object) -> None:
    if isinstance(choice, (str, bytes)) or not isinstance(choice, Sequence):
        raise InvalidRequestError("structured_outputs: choice must be a list of strings")
    if not 0 < len(choice) <= MAX_CHOICES:
        raise InvalidRequestError(
            f"structured_outputs: {len(choice)} choices; give 1 to {MAX_CHOICES}, or a regex"
        )
    if not all(isinstance(each, str) and each for each in choice):
        raise InvalidRequestError("structured_outputs: a choice must be a string that is not empty")


class Matcher:
    """Follows one sequence through its constraint."""

    def __init__(self, state: Any, words: int) -> None:
        self._state = state  # an llguidance.LLMatcher; it raises nothing, but may stand in error
        self._words = words

    def words(self) -> np.ndarray:
        """What may come next, u32 `[ceil(V / 32)]`; an eos id where the text may end. Raises InvalidRequestError."""
        import numpy as np  # here: the command line reads this module before anybody asks for a mask

        words = np.frombuffer(self._state.compute_bitmask(), np.uint32)[: self._words]
        self._check()
        return words

    def push(self, token_id: int) -> None:
        """Take the sampled token. Raises InvalidRequestError."""
        self._state.consume_token(token_id)
        self._check()

    def reset(self) -> None:
        """Go back to the beginning."""
        self._state.reset()
        self._check()

    def copy(self) -> Matcher:
        """One that goes on from here by itself."""
        return Matcher(self._state.deep_copy(), self._words)

    def _check(self) -> None:
        if self._state.is_error():
            raise InvalidRequestError(f"structured_outputs: {_first_line(self._state.get_error())}")


class Grammars:
    """Compiles constraints for one model."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError where llguidance is not installed or the model has no eos id to end a text."""
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                "structured output needs llguidance: pip install 'xla-engine[structured]'"
            ) from error
        if not eos_token_ids:
            raise InvalidRequestError("the model names no eos id, so a constrained text could not end")
        self._library = llguidance
        self._words = -(-vocab_size // 32)
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher at its beginning. Raises InvalidRequestError for a constraint that is none or is too large."""
        grammar = self._grammar(params)
        if len(grammar) > MAX_CONSTRAINT_CHARACTERS:
            raise InvalidRequestError(
                f"structured_outputs: {len(grammar)} characters; at most {MAX_CONSTRAINT_CHARACTERS}"
            )
        if grammar not in self._compiled:
            state = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
            compiled = Matcher(state, self._words)
            compiled.words()
            self._compiled[grammar] = compiled
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return self._compiled[grammar].copy()

    def _grammar(self, params: StructuredOutputsParams) -> str:
        build = self._library.LLMatcher
        if params.regex is not None:
            return build.grammar_from_regex(params.regex)
        if params.grammar is not None:
            return build.grammar_from_lark(params.grammar)
        if params.choice is not None:
            return build.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
        schema: Any = {"type": "object"} if params.json_object else params.json
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            options: Any = {"whitespace_flexible": not params.disable_any_whitespace}
            return build.grammar_from_json_schema(text, overrides=options)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"structured_outputs: json is no schema: {error}") from error


def _first_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines()[:4] if line.strip("<> \t"))
