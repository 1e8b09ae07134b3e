"""Compile grammars for a tokenizer, and compute which tokens they allow next (llguidance).

llguidance runs in this process, so a constraint is compiled here only after a successful trial in a worker process
(`trials`), and a request ends if its masks take too long.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.text.trials import ConstraintTrials
from xla_engine.utils.extras import install
from xla_engine.utils.shown import shown

# Limit on the CPU time of one sequence's masks: the first plus the second times the number of tokens, in seconds.
MASK_GRACE_S = 1.0
MASK_BUDGET_S = 0.02
MAX_DEPTH = 100  # of a schema
_LARGEST_INTEGER = 2**64  # in a schema
_KEPT = 32  # size of the cache of compiled constraints
# Fields of llguidance.LLParserLimits. A mask that needs more items ends its request. 10,000 items take less than
# 0.1 s; schemas with hundreds of properties need less than 2,000. The number depends on the text alone.
_LIMITS: dict[str, Any] = {"verbose_errors": False, "step_max_items": 10_000}


@dataclass(slots=True)
class Pace:
    """The longest CPU time of a token or mask of one constraint over all its requests, in seconds."""

    slowest: float = 0.0


class Matcher:
    """The state of one sequence in its constraint. pace: shared by all matchers of the constraint."""

    def __init__(self, state: Any, words: int, name: str, pace: Pace | None = None) -> None:
        """name: of the constraint, for messages."""
        self.pace = pace or Pace()
        self._state = state  # an llguidance.LLMatcher; it never raises, but may be in an error state
        self._words = words
        self._name = name
        self._tokens = 0
        self._left = MASK_GRACE_S

    def words(self) -> np.ndarray:
        """The mask of allowed tokens, u32 `[ceil(V / 32)]`; includes eos if the text may end. Raises
        InvalidRequestError."""
        start = time.thread_time()
        words = np.frombuffer(self._state.compute_bitmask(), np.uint32)[: self._words]
        self._spend(time.thread_time() - start)
        return words

    def push(self, token_id: int) -> None:
        """Advance by the sampled token. Raises InvalidRequestError."""
        start = time.thread_time()
        self._state.consume_token(token_id)
        self._tokens += 1
        self._left += MASK_BUDGET_S
        self._spend(time.thread_time() - start)

    def forced(self) -> list[int]:
        """The tokens that must follow, in their canonical tokenization; empty if there is a choice."""
        return list(self._state.compute_ff_tokens())

    def reset(self) -> None:
        """Return to the initial state."""
        self._state.reset()
        self._tokens, self._left = 0, MASK_GRACE_S
        self._check()

    def copy(self) -> Matcher:
        """An independent copy of the current state."""
        return Matcher(self._state.deep_copy(), self._words, self._name, self.pace)

    def _spend(self, seconds: float) -> None:
        self._left -= seconds
        self.pace.slowest = max(self.pace.slowest, seconds)
        self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise InvalidRequestError(f"structured_outputs: {_first_line(self._state.get_error())}")
        if self._left < 0:
            raise InvalidRequestError(
                f"structured_outputs: {self._name}: its masks take more than {MASK_GRACE_S:g} s and {MASK_BUDGET_S:g} "
                f"s a token of processor time, after {self._tokens} tokens; make it less ambiguous"
            )


class Grammars:
    """Compiles constraints for one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises InvalidRequestError if llguidance is not installed, or if the model has no eos id."""
        try:
            import llguidance
        except ImportError as error:
            raise InvalidRequestError(
                f"structured output needs llguidance: {install('structured')}"
            ) from error
        if not eos_token_ids:
            raise InvalidRequestError("the model has no eos id, so a constrained text could not end")
        self._library = llguidance
        self._words = -(-vocab_size // 32)
        text = tokenizer.to_json()
        self._tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        self._trials = ConstraintTrials(text, vocab_size, eos_token_ids, _LIMITS)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether the constraint is cached. Raises InvalidRequestError for an invalid constraint."""
        grammar = self._grammar(params)
        return (
            grammar in self._compiled
            or len(grammar) > MAX_CONSTRAINT_CHARACTERS
            or self._trials.knows(grammar)
        )

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher in its initial state. Raises InvalidRequestError for an invalid or too large constraint."""
        grammar = self._grammar(params)
        if len(grammar) > MAX_CONSTRAINT_CHARACTERS:
            raise InvalidRequestError(
                f"structured_outputs: {len(grammar)} characters; at most {MAX_CONSTRAINT_CHARACTERS}"
            )
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compile(grammar, f"{params.kind} {shown(getattr(params, params.kind))}")
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return compiled.copy()

    def _compile(self, grammar: str, name: str) -> Matcher:
        if (why := self._trials.why_not(grammar)) is not None:
            raise InvalidRequestError(f"structured_outputs: {name}: {_first_line(why)}")
        state = self._library.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        compiled = Matcher(state, self._words, name)
        compiled.words()
        compiled.pace = Pace()  # do not count the first mask, which builds tables for the others
        return compiled

    def _grammar(self, params: StructuredOutputsParams) -> str:
        build = self._library.LLMatcher
        if params.regex is not None:
            return build.grammar_from_regex(params.regex)
        if params.grammar is not None:
            return build.grammar_from_lark(as_lark(params.grammar))
        if params.choice is not None:
            return build.grammar_from_lark("start: " + " | ".join(map(json.dumps, params.choice)))
        schema: Any = {"type": "object"} if params.json_object else params.json
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            if len(text) <= MAX_CONSTRAINT_CHARACTERS:  # else it is rejected by its size later
                _check_bounds(json.loads(text))
            options: Any = {"whitespace_flexible": not params.disable_any_whitespace}
            return build.grammar_from_json_schema(text, overrides=options)
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"structured_outputs: json is not a schema: {error}") from error


def _check_bounds(schema: object) -> None:
    """Raise ValueError for a schema with too deep nesting or too large integers."""
    values = [(schema, 1)]
    while values:
        value, depth = values.pop()
        if isinstance(value, int) and abs(value) >= _LARGEST_INTEGER:
            raise ValueError(f"an integer of more than 64 bits, {shown(value)}; use a smaller one")
        if isinstance(value, dict | list) and depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}; make it flatter, for example with $ref")
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        values += [(each, depth + 1) for each in inner]


def _first_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines()[:4] if line.strip("<> \t"))


MAX_RULES = 256  # the converter takes quadratic time
MAX_CHARACTERS = 1 << 16
_ASSIGNS = "::="  # never in a Lark grammar, except inside strings


def as_lark(grammar: str) -> str:
    """Convert GBNF to Lark, and its first rule `root` to `start`. Returns a Lark grammar unchanged.

    Raises InvalidRequestError for GBNF that is invalid or exceeds the limits.
    """
    if _ASSIGNS not in grammar:
        return grammar
    rules = grammar.count(_ASSIGNS)
    if rules > MAX_RULES or len(grammar) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"structured_outputs: grammar has {rules} rules and {len(grammar)} characters; at most {MAX_RULES} and "
            f"{MAX_CHARACTERS} in GBNF. Write a larger one in Lark"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except RecursionError:
        raise InvalidRequestError(
            "structured_outputs: grammar is nested too deeply; make it flatter"
        ) from None
    except Exception as error:  # the converter raises plain Exceptions
        raise InvalidRequestError(f"structured_outputs: grammar is not GBNF: {error}") from error
