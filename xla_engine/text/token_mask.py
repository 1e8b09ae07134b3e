"""Which tokens a request may sample next, as bits the device reads."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numpy as np

from xla_engine.errors import InvalidRequestError
from xla_engine.text.grammar import Matcher


class TokenMask:
    """The allowed tokens of one sequence: `allowed_token_ids` and what a constraint lets come, less bad words' ends.

    words: u32 `[ceil(V / 32)]`, as in `graphs.row_state.rows.Tables`; replaced, never written to, when a token is
    pushed.
    host_gated: whether the words depend on the tokens so far, so that each step needs the token before.
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
        """bad_words: token sequences. stop_ids may not be sampled before `min_tokens` tokens, unless a constraint
        lets nothing else come.

        Raises InvalidRequestError where no token is left to begin with.
        """
        self._constant = pack_bits(range(vocab_size) if allowed is None else allowed, vocab_size)
        sequences = [tuple(word) for word in bad_words]
        self._constant &= ~pack_bits((word[0] for word in sequences if len(word) == 1), vocab_size)
        self._sequences = [word for word in sequences if len(word) > 1]
        self._stops = pack_bits(stop_ids, vocab_size)
        self._min_tokens = min_tokens
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._matcher = matcher
        self.host_gated = bool(self._sequences) or matcher is not None
        first = self._next()
        # Where rows are not host-gated, the device forbids the stop ids itself, for as long as it should.
        self.words = first if self.host_gated else self._constant
        if not first.any():
            raise InvalidRequestError(
                "allowed_token_ids, bad_words, structured_outputs and min_tokens together leave no token to sample; "
                "allow more"
            )

    def copy(self) -> TokenMask:
        """A mask at the same place that goes on by itself; what never changes is shared."""
        other = copy.copy(self)
        other._tokens = list(self._tokens)
        other._matcher = None if self._matcher is None else self._matcher.copy()
        return other

    def push(self, token_id: int) -> None:
        """Take the sampled token. Raises InvalidRequestError where none may follow it."""
        if not self.host_gated:
            return
        self._tokens.append(token_id)
        if self._matcher is not None:
            self._matcher.push(token_id)
        self.words = self._next()
        if not self.words.any():
            raise InvalidRequestError(
                f"after {len(self._tokens)} tokens, allowed_token_ids, bad_words, structured_outputs and min_tokens "
                "together leave none to sample; allow more"
            )

    def reset(self) -> None:
        """Forget the tokens pushed."""
        if self.host_gated:
            self._tokens.clear()
            if self._matcher is not None:
                self._matcher.reset()
            self.words = self._next()

    def forced(self) -> list[int]:
        """Tokens of the text that a constraint lets come next, in the likeliest spelling, if it lets only one come."""
        return [] if self._matcher is None else self._matcher.forced()

    def ahead(self, tokens: Sequence[int]) -> list[np.ndarray]:
        """The words behind each of `tokens` if they came next, as far as they may. Nothing is pushed."""
        here, matcher, count = self.words, self._matcher, len(self._tokens)
        self._matcher = None if matcher is None else matcher.copy()
        found = []
        try:
            for token_id in tokens:
                if _has(self._stops, token_id) or not _has(self.words, token_id):
                    break
                self.push(token_id)
                found.append(self.words)
        except InvalidRequestError:
            pass  # nothing may follow: if it is sampled, `push` says so
        finally:
            self.words, self._matcher = here, matcher
            del self._tokens[count:]
        return found

    def _next(self) -> np.ndarray:
        words = self._constant if self._matcher is None else self._constant & self._matcher.words()
        completing = [word[-1] for word in self._sequences if self._ends_with(word[:-1])]
        if completing:
            words = words & ~pack_bits(completing, self._vocab_size)
        if len(self._tokens) < self._min_tokens:
            held = words & ~self._stops
            words = words if self._matcher is not None and not held.any() else held
        return words

    def _ends_with(self, prefix: tuple[int, ...]) -> bool:
        return tuple(self._tokens[-len(prefix) :]) == prefix


def _has(words: np.ndarray, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def pack_bits(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """A mask u32 `[ceil(V / 32)]` with the bits of `token_ids` set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    bits[np.fromiter(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
