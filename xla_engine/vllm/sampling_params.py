"""Sampling parameters that can be changed."""

from __future__ import annotations

from enum import Enum
from typing import Any

from xla_engine.sampling_params import SamplingParams as FixedParams


class RequestOutputKind(Enum):
    """What an output of a stream holds: all so far, only what is new, or all, in one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams:
    """`xla_engine.SamplingParams` whose fields can be set; each change is checked as all are.

    output_kind: of streams.

    Raises InvalidRequestError for a field that is unknown or out of range.
    """

    fixed: FixedParams
    output_kind: RequestOutputKind

    def __init__(
        self, *, output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: Any
    ) -> None:
        object.__setattr__(self, "fixed", FixedParams.from_optional(**fields))
        object.__setattr__(self, "output_kind", output_kind)

    @classmethod
    def of(cls, params: FixedParams) -> SamplingParams:
        """The same parameters, which can be changed."""
        made = cls()
        object.__setattr__(made, "fixed", params)
        return made

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Parameters of the fields that are not None."""
        return cls(**{name: value for name, value in fields.items() if value is not None})

    def clone(self) -> SamplingParams:
        """A copy that can be changed by itself."""
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
            object.__setattr__(self, "fixed", self.fixed.clone(**{name: value}))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return (self.fixed, self.output_kind) == (other.fixed, other.output_kind)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"{self.fixed!r}, {self.output_kind}"
