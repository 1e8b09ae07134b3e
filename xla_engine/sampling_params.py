"""What a request asks of the sampler. Names and meaning are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from xla_engine.errors import InvalidRequestError

MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 1 << 14  # of all stop strings of a request together
MAX_STOP_TOKEN_IDS = 8  # width of the device's per-row stop table, eos ids included

# Known elsewhere, not here: refused by name, so that nothing is ever ignored silently.
UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "echo",
        "frequency_penalty",
        "guided_decoding",
        "length_penalty",
        "logit_bias",
        "min_tokens",
        "n",
        "presence_penalty",
        "prompt_logprobs",
        "repetition_penalty",
        "response_format",
        "stream",
        "structured_outputs",
        "suffix",
        "tool_choice",
        "tools",
        "use_beam_search",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends.

    temperature: 0 is greedy (lowest id on ties); otherwise logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all. Ties at the threshold are all kept.
    top_p: keep the smallest set of most likely tokens whose probability reaches top_p, after top_k and min_p.
    min_p: drop tokens less likely than min_p times the most likely one.
    seed: noise is a pure function of (seed, position); None derives one from the engine's seed and the request's
        id, so that a request still does not depend on its neighbours.
    max_tokens: new tokens at most, the stop token included.
    stop: end where one of these strings is complete in the text (one string, or a list). The text is cut before it.
    include_stop_str_in_output: cut the text after the stop string instead, and show stop tokens.
    stop_token_ids: end after any of these, beside the model's eos ids.
    ignore_eos: the model's eos ids do not end the request.
    logprobs: 0 or None. 0 returns the chosen token's log-probability under the raw (unscaled) distribution.
    skip_special_tokens: special tokens do not appear in the text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _finite("temperature", self.temperature)
        if self.temperature < 0:
            raise InvalidRequestError(f"temperature must be >= 0 (0 is greedy), not {self.temperature}")
        if 0 < self.temperature < 1e-2:
            raise InvalidRequestError(
                f"temperature {self.temperature} is too small to divide by; use 0 for greedy or at least 0.01"
            )
        _integer("top_k", self.top_k, low=-1)
        _finite("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(
                f"top_p must be in (0, 1], not {self.top_p}; use temperature 0 for greedy"
            )
        _finite("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise InvalidRequestError(f"min_p must be in [0, 1], not {self.min_p}")
        if self.seed is not None:
            _integer("seed", self.seed, low=-(2**63), high=2**64 - 1)
        _integer("max_tokens", self.max_tokens, low=1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, low=0)
            if self.logprobs > 0:
                raise InvalidRequestError(
                    "logprobs above 0 (top-N) is not supported yet; 0 returns the chosen token's"
                )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if isinstance(self.stop_token_ids, (str, bytes)) or not isinstance(self.stop_token_ids, Sequence):
            raise InvalidRequestError(
                f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"{len(self.stop_token_ids)} stop_token_ids given; at most {MAX_STOP_TOKEN_IDS}, eos ids included"
            )
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids entry", token_id, low=0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from JSON-like fields; an unknown or unsupported field is an error that names it."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name in UNSUPPORTED:
                raise InvalidRequestError(f"field {name!r} is not supported by this version; remove it")
            if name not in known:
                raise InvalidRequestError(
                    f"unknown field {name!r}; known sampling fields: {', '.join(sorted(known))}"
                )
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _stop_strings(stop: object) -> tuple[str, ...]:
    """One string, several or none, as a tuple without repeats."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(
        isinstance(string, str) for string in strings[:MAX_STOP_STRINGS]
    ):
        raise InvalidRequestError(f"stop must be text or a list of texts, not {type(stop).__name__}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{len(strings)} stop strings given; at most {MAX_STOP_STRINGS}")
    if "" in strings:
        raise InvalidRequestError("a stop string is empty, which would end every request; remove it")
    if (total := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"the stop strings have {total} characters together; at most {MAX_STOP_CHARACTERS}"
        )
    return tuple(dict.fromkeys(strings))


def _finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be a finite number, not {value!r}")


def _integer(name: str, value: object, *, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}")
