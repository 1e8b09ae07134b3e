"""Compile grammars for a tokenizer, and compute which tokens they allow next (llguidance).

llguidance runs in this process, so a constraint is compiled here only after a successful trial in a worker process
(`trials`), and a request ends if its masks take too long.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from xla_engine.text.constraint_forms import (
    ConstraintError,
    ConstraintForm,
    accepted_form,
    constraint_text,
)
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.text.trial_worker import mask_tokenizer
from xla_engine.text.trials import PROCESS, TRIAL_ENDED, ConstraintTrials
from xla_engine.text.worker_process import WorkerProcess
from xla_engine.utils.extras import install
from xla_engine.utils.shown import shown

_log = logging.getLogger("xla_engine.constraints")
T = TypeVar("T")

# Limit on the CPU time of one sequence's masks: the first plus the second times the number of tokens, in seconds.
MASK_GRACE_S = 1.0
MASK_BUDGET_S = 0.02
_KEPT = 32  # size of the cache of compiled constraints
_REFUSED = 1024  # size of the cache of refused constraints
_CHECKED = 4096  # constraints of which it is known that `check` accepts them
_LOGGED = 4096  # constraints of which it is known what was logged
# Fields of llguidance.LLParserLimits. A mask that needs more items ends its request. 10,000 items take less than
# 0.1 s; schemas with hundreds of properties need less than 2,000. The number depends on the text alone.
_LIMITS: dict[str, Any] = {"verbose_errors": False, "step_max_items": 10_000}
_SPELLINGS = 1024  # size of the cache of forced texts
_MANY = 8  # more tokens than this for each byte of a text are no spellings of it
_NO_FORCING = re.compile(r'%llguidance\s*\{[^}]*"no_forcing"\s*:\s*true')
# By itself llguidance allows only the canonical spelling of a text that must follow.
_BEGIN = '%llguidance {"no_forcing": true}\nstart: '


@dataclass(slots=True)
class Pace:
    """The longest CPU time of a token or mask of one constraint over all its requests, in seconds."""

    slowest: float = 0.0


class Matcher:
    """The state of one sequence in its constraint.

    The masks allow every spelling of a text that fits, whatever tokens it is made of.

    canonical: whether text that must follow is better written in its canonical tokens (`forced`). left: what the
    constraint leaves to the client, such as keywords of its schema. pace: shared by
    all matchers of the constraint.
    spellings: the canonical tokens of texts that had to follow, by text and token before it; shared in the same way.
    """

    def __init__(
        self,
        state: Any,
        tokenizer: Any,
        words: int,
        name: str,
    ) -> None:
        """state: an llguidance.LLMatcher. tokenizer: its LLTokenizer. name: of the constraint, for messages."""
        self.canonical = True
        self.left: tuple[str, ...] = ()
        self.pace = Pace()
        self.spellings: dict[tuple[bytes, int | None], list[int]] = {}
        self._state = state  # it never raises, but may be in an error state
        self._tokenizer = tokenizer
        self._words = words
        self._name = name
        self._left = MASK_GRACE_S
        self._tokens = 0
        self._last: int | None = None
        self._mask: np.ndarray | None = None  # of the current state

    def words(self) -> np.ndarray:
        """The mask of allowed tokens, u32 `[ceil(V / 32)]`; includes eos if the text may end. Raises
        InvalidRequestError."""
        if self._mask is None:
            start = time.thread_time()
            self._mask = np.frombuffer(self._state.compute_bitmask(), np.uint32)[: self._words]
            self._spend(time.thread_time() - start)
        return self._mask

    def push(self, token_id: int) -> None:
        """Advance by the sampled token. Raises InvalidRequestError."""
        start = time.thread_time()
        self._state.consume_token(token_id)
        self._last, self._mask = token_id, None
        self._tokens += 1
        self._left += MASK_BUDGET_S
        self._spend(time.thread_time() - start)

    def allows(self, token_id: int) -> bool:
        """Whether the mask allows a token other than eos; computes no mask."""
        return bool(self._state.validate_tokens([token_id]))

    def forced(self) -> list[int]:
        """The canonical tokens of the text that must follow; empty if there is a choice."""
        text = self._state.compute_ff_bytes()
        if not text:
            return []
        key = text, self._last
        if (tokens := self.spellings.get(key)) is None:
            if len(self.spellings) >= _SPELLINGS:
                self.spellings.clear()
            last = None if self._last is None else [self._last]
            tokens = self.spellings[key] = list(self._tokenizer.tokenize_partial(text, last)[0])
        return tokens or self._whole_token(text)

    def reset(self) -> None:
        """Return to the initial state."""
        self._state.reset()
        self._tokens, self._left, self._last, self._mask = 0, MASK_GRACE_S, None, None
        self._check()

    def copy(self) -> Matcher:
        """An independent copy of the current state."""
        made = copy.copy(self)
        made._state, made._tokens, made._left = self._state.deep_copy(), 0, MASK_GRACE_S
        return made

    def _whole_token(self, text: bytes) -> list[int]:
        """The first canonical token of a forced text that some token of the vocabulary continues, unless the grammar
        allows such a token, too."""
        words = self.words()
        if np.bitwise_count(words).sum() > _MANY * len(text):
            return []
        some = np.flatnonzero(words)
        bits = np.unpackbits(words[some].view(np.uint8), bitorder="little").reshape(-1, 32)
        allowed = np.add.outer(32 * some, np.arange(32))[bits.view(np.bool_)]
        if any(len(self._tokenizer.decode_bytes([number])) > len(text) for number in allowed.tolist()):
            return []
        return list(self._tokenizer.tokenize_bytes(text)[:1])

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

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        process: WorkerProcess = PROCESS,
    ) -> None:
        """process: tries constraints.

        Raises InvalidRequestError if llguidance is not installed, or if the model has no eos id.
        """
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
        self._id_of = tokenizer.id_of
        self._begin = _BEGIN + ('" "? ' if tokenizer.drops_first_space else "")
        tokens = tokenizer.bytes_of_all(vocab_size)
        special = sorted(tokenizer.special_token_ids.union(eos_token_ids))
        self._make_tokenizer: Callable[[], Any] | None = partial(
            mask_tokenizer, tokens, special, eos_token_ids, tokenizer.inner_ids
        )
        self._tokenizer: Any = None  # made for the first mask
        self._trials = ConstraintTrials(tokens, special, eos_token_ids, _LIMITS, process=process)
        self._limits = llguidance.LLParserLimits(**_LIMITS)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()  # by constraint_text
        self._refused: OrderedDict[str, str] = OrderedDict()  # why
        self._checked: OrderedDict[str, None] = OrderedDict()  # digests of constraints that `check` accepts
        self._logged: OrderedDict[str, None] = OrderedDict()  # digests of constraints

    def knows(self, params: StructuredOutputsParams) -> bool:
        """Whether `matcher` returns or raises at once, because the constraint is cached, refused or too large."""
        key = constraint_text(params)
        return key in self._compiled or key in self._refused or len(key) > MAX_CONSTRAINT_CHARACTERS

    def left(self, params: StructuredOutputsParams) -> tuple[str, ...]:
        """What a constraint leaves to the client; nothing if it is not compiled."""
        compiled = self._compiled.get(constraint_text(params))
        return () if compiled is None else compiled.left

    def check(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError if `matcher` does, after a trial without what only masks need.

        Slices of the vocabulary (`mask_tokenizer`) are only for masks, so `matcher` still makes a trial with them.
        """
        key = self._key(params)
        digest = _digest(key)
        with self._lock:
            if digest in self._checked:
                return
        self._accepted(params, key, slices=False)
        with self._lock:
            _keep(self._checked, digest, None, _CHECKED)

    def matcher(self, params: StructuredOutputsParams) -> Matcher:
        """A matcher in its initial state. Raises InvalidRequestError for an invalid or too large constraint."""
        key = self._key(params)
        with self._lock:
            compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compile(params, key)
        with self._lock:
            _keep(self._compiled, key, compiled, _KEPT)
            return compiled.copy()

    def _mask_tokenizer(self) -> Any:
        """The vocabulary as llguidance needs it for masks, which takes half a second for 150,000 tokens."""
        with self._lock:
            if self._make_tokenizer is not None:
                self._tokenizer, self._make_tokenizer = self._make_tokenizer(), None
            return self._tokenizer

    def _key(self, params: StructuredOutputsParams) -> str:
        """The constraint's text. Raises InvalidRequestError for one that was refused before, or is too large."""
        key = constraint_text(params)
        if len(key) > MAX_CONSTRAINT_CHARACTERS:
            raise InvalidRequestError(
                f"structured_outputs: {len(key)} characters; at most {MAX_CONSTRAINT_CHARACTERS}"
            )
        with self._lock:
            refusal = self._refused.get(key)
        if refusal is not None:
            raise InvalidRequestError(refusal)
        return key

    def _accepted(self, params: StructuredOutputsParams, key: str, *, slices: bool) -> ConstraintForm:
        """The first form of a constraint that llguidance accepts. Raises InvalidRequestError.

        slices: as in `ConstraintTrials.why_not`.
        """
        name = self._name(params)
        try:
            return accepted_form(params, self._id_of, partial(self._why_not, slices=slices))
        except ConstraintError as error:
            why = str(error)
            refusal = (
                f"structured_outputs: {'' if why.startswith('json is') else f'{name}: '}{_first_line(why)}"
            )
            if not why.startswith(TRIAL_ENDED[1]):  # which may have another reason
                with self._lock:
                    _keep(self._refused, key, refusal, _REFUSED)
            raise InvalidRequestError(refusal) from error

    def _compile(self, params: StructuredOutputsParams, key: str) -> Matcher:
        """Compile the first form of a constraint that llguidance accepts."""
        form, name = self._accepted(params, key, slices=True), self._name(params)
        grammar, tokenizer = self._grammar(form), self._mask_tokenizer()
        state = self._library.LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        compiled = Matcher(state, tokenizer, self._words, name)
        compiled.words()
        compiled.pace = Pace()  # do not count the first mask, which builds tables for the others
        compiled.canonical = not (params.grammar and _NO_FORCING.search(params.grammar))
        warnings = (warning.partition(" not fully supported")[0] for warning in state.get_grammar_warnings())
        compiled.left = tuple(dict.fromkeys([*form.left, *warnings]))
        if compiled.left and self._is_news(key):
            _log.warning("%s: left to the client: %s", name, ", ".join(compiled.left))
        return compiled

    def _is_news(self, key: str) -> bool:
        """Whether nothing was logged about a constraint, which is compiled again after others took its place."""
        digest = _digest(key)
        with self._lock:
            is_news = digest not in self._logged
            _keep(self._logged, digest, None, _LOGGED)
        return is_news

    def _name(self, params: StructuredOutputsParams) -> str:
        """A constraint in messages."""
        return f"{params.kind} {shown(getattr(params, params.kind))}"

    def _why_not(self, form: ConstraintForm, *, slices: bool) -> str | None:
        return self._trials.why_not(self._grammar(form), slices=slices)

    def _grammar(self, form: ConstraintForm) -> str:
        """A form in llguidance's format."""
        start = {"lark_grammar": f"{self._begin}@body"}
        return json.dumps({"grammars": [start, {**form.body, "name": "body"}]})


def _digest(key: str) -> str:
    """A constraint's text, which may have 256 Ki characters, in few bytes."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _keep(cache: OrderedDict[str, T], key: str, value: T, most: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > most:
        cache.popitem(last=False)


def _first_line(message: str) -> str:
    return " ".join(line.strip() for line in message.splitlines()[:4] if line.strip("<> \t"))
