"""The mask of tokens that a request may sample next, as bits for the device."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.text.grammar import Matcher

TURN_S = 0.01  # the longest that a turn waits for masks; a mask that takes longer is slow


class _Made(NamedTuple):
    """The mask's words after the first `length` of `tokens`."""

    tokens: list[int]
    length: int
    words: np.ndarray


class TokenMask:
    """The allowed tokens of one sequence: those in `allowed_token_ids` and allowed by the constraint, without the
    last tokens of bad words.

    `take` records tokens, and `make` updates the words for them. `make` may run in any thread, also while `take`
    and `reset` are called in another.

    constrained: whether the words depend on the tokens so far, so that each step needs the previous token.
    seconds: CPU time of the latest `make`.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Sequence[int] | None = None,
        bad_words: Iterable[Sequence[int]] = (),
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """bad_words: token sequences. stop_ids: not allowed before `min_tokens` tokens, unless the constraint
        allows nothing else.

        Raises InvalidRequestError if no first token is allowed.
        """
        self._constant = pack_bits(np.arange(vocab_size) if allowed is None else allowed, vocab_size)
        sequences = [tuple(word) for word in bad_words]
        self._constant &= ~pack_bits((word[0] for word in sequences if len(word) == 1), vocab_size)
        self._sequences = [word for word in sequences if len(word) > 1]
        self._stops = pack_bits(stop_ids, vocab_size)
        self._min_tokens = min_tokens
        self._vocab_size = vocab_size
        self._matcher = matcher
        self.constrained = bool(self._sequences) or matcher is not None
        self.seconds = 0.0
        self._tokens: list[int] = []  # `reset` replaces the list
        self._matched = self._tokens  # the list of which the matcher has read the first `_count`
        self._count = 0
        self._lock = threading.Lock()  # held while the matcher works
        first = self._next(0)
        # For unconstrained rows the device itself enforces `min_tokens`.
        self._first = first if self.constrained else self._constant
        self._made = _Made(self._tokens, 0, self._first)
        if not first.any():
            raise InvalidRequestError(
                "allowed_token_ids, bad_words, structured_outputs and min_tokens together leave no token to sample; "
                "allow more"
            )

    @classmethod
    def received(cls, vocab_size: int, *, constrained: bool) -> TokenMask:
        """A mask whose words another process computes, for `set_words`."""
        mask = cls(vocab_size)
        mask.constrained = constrained
        return mask

    def set_words(self, words: np.ndarray) -> None:
        """Take words as they are, u32 `[ceil(V / 32)]`."""
        self._made = _Made(self._tokens, 0, words)

    @property
    def words(self) -> np.ndarray:
        """The latest mask, u32 `[ceil(V / 32)]`, in the format of `graphs.row_state.rows.Tables`. Read-only."""
        made = self._made
        return made.words if made.tokens is self._tokens else self._first

    @property
    def is_behind(self) -> bool:
        """Whether the words are not yet updated for the last token."""
        made = self._made
        return len(self._tokens) > (made.length if made.tokens is self._tokens else 0)

    @property
    def may_be_slow(self) -> bool:
        """Whether any mask of the same constraint was slow, in any row."""
        return self._matcher is not None and self._matcher.pace.slowest > TURN_S

    def copy(self) -> TokenMask:
        """An independent copy that shares constant parts. Waits while `make` runs."""
        with self._lock:
            other = copy.copy(self)
            other._lock = threading.Lock()
            other._tokens = list(self._tokens)
            if self._matched is self._tokens:
                other._matched = other._tokens
            if self._made.tokens is self._tokens:
                other._made = self._made._replace(tokens=other._tokens)
            other._matcher = None if self._matcher is None else self._matcher.copy()
        return other

    def take(self, token_id: int) -> None:
        """Record the sampled token."""
        if self.constrained:
            self._tokens.append(token_id)

    def make(self) -> None:
        """Compute the words for the position after the last token. Raises InvalidRequestError if no token is
        allowed."""
        with self._lock:
            start = time.thread_time()
            tokens = self._tokens
            if self._matched is not tokens:
                self._matched, self._count = tokens, 0
                if self._matcher is not None:
                    self._matcher.reset()
            for token_id in tokens[self._count :]:
                if self._matcher is not None:
                    self._matcher.push(token_id)
                self._count += 1
            words = self._next(self._count)
            if not words.any():
                raise InvalidRequestError(
                    f"after {self._count} tokens, allowed_token_ids, bad_words, structured_outputs and min_tokens "
                    "together leave none to sample; allow more"
                )
            self._made = _Made(tokens, self._count, words)
            self.seconds = time.thread_time() - start

    def push(self, token_id: int) -> None:
        """`take` and `make`. Raises InvalidRequestError if no token is allowed next."""
        self.take(token_id)
        if self.constrained:
            self.make()

    def reset(self) -> None:
        """Forget the tokens."""
        if self._tokens:
            self._tokens = []

    def forced(self) -> list[int]:
        """The tokens that the constraint forces next, in their canonical tokenization; empty if there is a choice."""
        if self._matcher is None or self.is_behind or self.may_be_slow:
            return []
        return self._matcher.forced()

    def ahead(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """The words after each of `tokens` if these came next, up to the first that is not allowed."""
        other, found = self.copy(), []
        for token_id in tokens:
            if _has(self._stops, token_id) or not _has(other.words, token_id):
                break
            try:
                other.push(token_id)
            except InvalidRequestError:
                break  # no token may follow; `make` raises if this one is sampled
            found.append(other.words)
        return found

    def _next(self, count: int) -> np.ndarray:
        """The words after the first `count` tokens, which the matcher has read.

        A text that the constraint forces has its canonical tokens, if these are allowed.
        """
        tokens = self._matched[:count]
        completing = [word[-1] for word in self._sequences if _ends_with(tokens, word[:-1])]
        if (forced := self._forced_first(count)) is not None and forced not in completing:
            return self._only(forced)
        words = self._constant if self._matcher is None else self._constant & self._matcher.words()
        if completing:
            words = words & ~pack_bits(completing, self._vocab_size)
        if count < self._min_tokens:
            held = words & ~self._stops
            words = words if self._matcher is not None and not held.any() else held
        return words

    def _forced_first(self, count: int) -> int | None:
        """The first canonical token of the text that the constraint forces, if it may be sampled."""
        if self._matcher is None or not self._matcher.canonical or not (forced := self._matcher.forced()):
            return None
        first = forced[0]
        held = count < self._min_tokens and _has(self._stops, first)
        return first if not held and _has(self._constant, first) and self._matcher.allows(first) else None

    def _only(self, token_id: int) -> np.ndarray:
        words = np.zeros_like(self._constant)
        words[token_id // 32] = 1 << (token_id % 32)
        return words


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return tuple(tokens[-len(end) :]) == end


def _has(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def pack_bits(token_ids: Iterable[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """A mask, u32 `[ceil(V / 32)]`, with the bits of `token_ids` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
