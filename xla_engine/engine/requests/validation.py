"""Every limit of model and engine that a request must keep, checked without the device.

An engine asks before it queues a request; a dry run asks without having an engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from xla_engine.errors import InvalidRequestError, TokenLimitError
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams
from xla_engine.scheduler import PRIORITIES, QueueFullError
from xla_engine.text.grammar import Grammars
from xla_engine.text.token_mask import TokenMask
from xla_engine.text.tokenizer import Tokenizer

LONGEST_PATIENCE_S = 10**9
_NORMALISER_SLACK = 4  # a tokenizer's normaliser shortens text by less than this


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestValidator:
    """The limits of one model in one engine.

    vocab_size, eos_token_ids: the model's.
    max_model_len: tokens of a request at most, prompt and generated.
    tokenizer: None where prompts can only be token ids.
    max_waiting: sequences that may wait at most, beyond those that free slots take; None is unbounded.
    max_num_seqs: slots.
    never_fits: says why a request of so many prompt and new tokens can never have enough memory; None if it can.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    tokenizer: Tokenizer | None
    max_waiting: int | None = None
    max_num_seqs: int = 0
    never_fits: Callable[[int, int], str | None] = lambda prompt_tokens, max_tokens: None
    _compiler: list[Grammars] = field(default_factory=list, init=False, repr=False)  # made when first needed

    def token_ids(
        self, prompt: str | Sequence[int], params: SamplingParams, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the prompt's token ids. Raises InvalidRequestError, or TokenLimitError where it does not fit."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequestError("the model has no tokenizer.json; pass the prompt as token ids")
            self._check_characters(prompt, self.tokenizer)
            token_ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        else:
            self._check_length(len(prompt), params)
            token_ids = tuple(prompt)
        if not token_ids:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        for token_id in token_ids:
            if (
                isinstance(token_id, bool)
                or not isinstance(token_id, int)
                or not 0 <= token_id < self.vocab_size
            ):
                raise InvalidRequestError(
                    f"prompt token id {token_id!r} is not an integer in 0..{self.vocab_size - 1}, "
                    "the model's vocabulary"
                )
        self._check_length(len(token_ids), params)
        if (why := self.never_fits(len(token_ids), _least_tokens(params))) is not None:
            raise TokenLimitError(
                f"prompt and max_tokens never fit: {why}; ask for less or give more num_blocks"
            )
        return token_ids

    def with_limit(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Return `params` with `max_tokens` as a number: where it is None, all that fit after the prompt."""
        if params.max_tokens is not None:
            return params
        room = range(1, self.max_model_len - prompt_tokens + 1)
        fits = bisect_left(room, True, key=lambda tokens: self.never_fits(prompt_tokens, tokens) is not None)
        return replace(params, max_tokens=fits)

    def check_queue(self, n: int, waiting: int, free: int) -> None:
        """Raise QueueFullError unless all n sequences of a request fit behind those that wait, and into free slots.

        Raises InvalidRequestError where they never will. For a request of one sequence the scheduler checks this.
        """
        if n == 1 or self.max_waiting is None:
            return
        if n > (most := self.max_num_seqs + self.max_waiting):
            raise InvalidRequestError(
                f"n is {n}, but an engine of {self.max_num_seqs} slots and max_waiting {self.max_waiting} never holds "
                f"more than {most}: lower n, or raise the bound"
            )
        if waiting + n > self.max_waiting + free:
            raise QueueFullError(
                f"{n} sequences were not taken: {max(waiting - free, 0)} wait and max_waiting is {self.max_waiting}; "
                "submit them again after a step, lower n, or raise the bound"
            )

    def check_options(
        self,
        priority: object = 0,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
        cache_salt: object = "",
    ) -> None:
        """Raise InvalidRequestError unless the values of `RequestOptions` are valid."""
        if not isinstance(cache_salt, str):
            raise InvalidRequestError(f"cache_salt must be a string, not {cache_salt!r}")
        if isinstance(priority, bool) or not isinstance(priority, int) or priority not in PRIORITIES:
            raise InvalidRequestError(
                f"priority must be an integer from {PRIORITIES[0]} (soonest) to {PRIORITIES[-1]}, not {priority!r}"
            )
        for name, seconds in (("deadline_s", deadline_s), ("queue_timeout_s", queue_timeout_s)):
            if seconds is not None and (
                isinstance(seconds, bool)
                or not isinstance(seconds, int | float)
                or not 0 < seconds <= LONGEST_PATIENCE_S
            ):
                raise InvalidRequestError(
                    f"{name} must be seconds above 0 and at most {LONGEST_PATIENCE_S}, not {seconds!r}"
                )

    def stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return every id that ends the request, the model's eos ids first; the device is told the first few.

        Raises InvalidRequestError.
        """
        if params.stop and self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, so stop strings cannot be seen; use stop_token_ids"
            )
        eos = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        for token_id in stop_ids:
            if token_id >= self.vocab_size:
                raise InvalidRequestError(f"stop token id {token_id} is not in 0..{self.vocab_size - 1}")
        if params.min_tokens and len(stop_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"{len(stop_ids)} stop ids with the model's {len(eos)} eos ids; with min_tokens at most "
                f"{MAX_STOP_TOKEN_IDS}: give fewer stop_token_ids, set ignore_eos, or leave out min_tokens"
            )
        return stop_ids

    def token_mask(self, params: SamplingParams, stop_ids: tuple[int, ...]) -> TokenMask | None:
        """Return the tokens a sequence may sample, None for all. Raises InvalidRequestError, also for bias ids."""
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            if ids and max(ids) >= self.vocab_size:
                raise InvalidRequestError(f"{name} names id {max(ids)}, not in 0..{self.vocab_size - 1}")
        constraint = params.structured_outputs
        if params.allowed_token_ids is None and not params.bad_words and constraint is None:
            return None
        return TokenMask(
            self.vocab_size,
            allowed=params.allowed_token_ids,
            bad_words=self._bad_words(params.bad_words),
            stop_ids=stop_ids,
            min_tokens=params.min_tokens,
            matcher=None if constraint is None else self._grammars().matcher(constraint),
        )

    def _grammars(self) -> Grammars:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, so structured_outputs cannot be followed; use allowed_token_ids"
            )
        if not self._compiler:
            self._compiler.append(Grammars(self.tokenizer, self.vocab_size, self.eos_token_ids))
        return self._compiler[0]

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return each word's tokens as it stands after a space, and as it stands alone."""
        if not words:
            return []
        if self.tokenizer is None:
            raise InvalidRequestError(
                "the model has no tokenizer.json, so bad_words cannot be tokenised; use logit_bias or "
                "allowed_token_ids"
            )
        forms = (prefix + word.lstrip() for word in words for prefix in ("", " "))
        found = {tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms}
        return sorted(found - {()})

    def _check_characters(self, prompt: str, tokenizer: Tokenizer) -> None:
        """Refuse text that cannot fit before spending seconds on tokenising it.

        No token is spelled longer than `longest_token`; normalisers may shorten text, hence the factor.
        """
        bound = _NORMALISER_SLACK * tokenizer.longest_token * self.max_model_len
        if len(prompt) > bound:
            raise TokenLimitError(
                f"the prompt has {len(prompt)} characters; no text of more than {bound} can fit into max_model_len "
                f"{self.max_model_len} tokens: shorten it or raise max_model_len"
            )

    def _check_length(self, prompt_tokens: int, params: SamplingParams) -> None:
        least = _least_tokens(params)
        total = prompt_tokens + least
        if total > self.max_model_len:
            raise TokenLimitError(
                f"prompt ({prompt_tokens} tokens) plus max_tokens ({least}) is {total}, more than "
                f"max_model_len {self.max_model_len}; shorten the prompt, lower max_tokens or raise max_model_len"
            )


def _least_tokens(params: SamplingParams) -> int:
    """New tokens that a request must have room for."""
    return max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
