"""Grammars compiled for a tokenizer, and which tokens they allow next (llguidance)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from xla_engine.text.tokenizer import Tokenizer

_KEPT = 32  # compiled constraints kept for requests that bring the same


class Matcher:
    """Follows one sequence through its constraint."""

    def __init__(self, state: Any, words: int) -> None:
        self._state = state  # an llguidance.LLMatcher; it raises nothing, but may stand in error
        self._words = words

    def words(self) -> np.ndarray:
        """What may come next, u32 `[ceil(V / 32)]`; an eos id where the text may end. Raises InvalidRequestError."""
        import numpy as np  # here: most imports of this module never ask for a mask

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
