"""Mutable sampling parameters."""

from __future__ import annotations

from enum import Enum
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.sampling_params import SamplingParams as FixedParams
from xla_engine.sampling_params import check_finite, check_integer


class RequestOutputKind(Enum):
    """The content of streamed outputs: everything so far, only new tokens, or a single output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


# vLLM's fields without an effect here: only these defaults are accepted. None always means the default.
_DEFAULTS: dict[str, Any] = {
    "spaces_between_special_tokens": True, "flat_logprobs": False, "skip_clone": False, "stream_interval": 1,
    "watermarking": False, "routed_experts_prompt_start": 0, "output_text_buffer_length": 0, "extra_args": {},
    "logprob_token_ids": None, "prompt_logprob_token_ids": None, "thinking_token_budget": None,
    "repetition_detection": None, "trace_decode_token_ids": None, "skip_reading_prefix_cache": False,
    "logits_processors": [], "guided_decoding": None,
}  # fmt: skip


class SamplingParams:
    """A mutable `xla_engine.SamplingParams`; every change is validated.

    output_kind: of streams.

    Raises InvalidRequestError for a field that is unknown or out of range.
    """

    fixed: FixedParams
    output_kind: RequestOutputKind

    def __init__(
        self, *, output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any
    ) -> None:
        object.__setattr__(self, "fixed", FixedParams.from_optional(**_own(fields)))
        object.__setattr__(self, "output_kind", output_kind)

    @classmethod
    def of(cls, params: FixedParams) -> SamplingParams:
        """A mutable copy of the parameters."""
        made = cls()
        object.__setattr__(made, "fixed", params)
        return made

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Parameters from the fields that are not None, except `max_tokens`, where None means as many as fit."""
        return cls(
            **{name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        )

    def clone(self) -> SamplingParams:
        """An independent copy."""
        made = self.of(self.fixed)
        made.output_kind = self.output_kind
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "fixed":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.fixed, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "output_kind":
            object.__setattr__(self, name, value)
        else:
            object.__setattr__(self, "fixed", self.fixed.clone(**_own({name: value})))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return (self.fixed, self.output_kind) == (other.fixed, other.output_kind)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"{self.fixed!r}, {self.output_kind}"


class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's fields and defaults.

    beam_width: sequences that are kept at each step and returned, at most half of MAX_LOGPROBS.
    length_penalty: a beam's sum of log-probabilities is divided by its number of tokens to this power.

    Raises InvalidRequestError.
    """

    def __init__(
        self,
        beam_width: int,
        max_tokens: int,
        ignore_eos: bool = False,
        temperature: float = 0.0,
        length_penalty: float = 1.0,
        *,
        skip_special_tokens: bool = True,
        **others: Any,
    ) -> None:
        beam_width = check_integer("beam_width", beam_width, low=1, high=MAX_LOGPROBS // 2)
        max_tokens = check_integer("max_tokens", max_tokens, low=1)
        check_finite("length_penalty", length_penalty)
        if temperature or any(others.values()):
            name = "temperature" if temperature else next(name for name, value in others.items() if value)
            raise InvalidRequestError(f"beam search does not support {name}; leave it out")
        self.beam_width, self.max_tokens, self.ignore_eos = beam_width, max_tokens, ignore_eos
        self.length_penalty, self.skip_special_tokens = length_penalty, skip_special_tokens


def _own(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate vLLM's fields to ours, and drop those without an effect."""
    found = {
        name: value
        for name, value in fields.items()
        if name not in _DEFAULTS or (value is not None and value != _DEFAULTS[name])
    }
    if "prompt_logprob_start" in found:
        found["logprobs_start"] = found.pop("prompt_logprob_start")
    for name in ("logprobs", "prompt_logprobs"):
        if found.get(name) == -1:
            raise InvalidRequestError(
                f"{name}=-1 asks for the whole vocabulary, and the limit is {MAX_LOGPROBS}; use "
                f"{MAX_LOGPROBS}, or `xla_engine.LLM.score` for tokens that are known"
            )
    return found
