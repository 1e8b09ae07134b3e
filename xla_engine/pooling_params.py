"""The parameters of a pooling request. Names and meaning are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from xla_engine.errors import InvalidRequestError
from xla_engine.sampling_params import MOST, SamplingParams, check_integer
from xla_engine.utils.did_you_mean import naming_fields
from xla_engine.utils.shown import shown

TASKS = ("embed", "classify", "score")


@naming_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams(SamplingParams):
    """A request for one vector instead of text.

    The sampling fields must keep their defaults; they exist because the engine runs both kinds of request alike.

    task: "embed" for the vector, "classify" for the probabilities of a classifier's classes, "score" for the number of
        a classifier with one class.
    dimensions: truncate the vector to this length, for models that were trained for it (Matryoshka); None: all.
    truncate_prompt_tokens: read this many tokens of a longer text, special tokens at its end included; -1: as many as
        the model reads; None: a longer text is an error.
    use_activation: scale a vector to length 1, or apply sigmoid or softmax to a classifier's numbers; None: as the
        model says.
    pooling_type: filled in by the engine.
    """

    task: str = "embed"
    dimensions: int | None = None
    use_activation: bool | None = None
    pooling_type: str | None = None
    temperature: float = 0.0
    max_tokens: int | None = field(default=1, metadata={"integers": (1, MOST), "none": True})
    ignore_eos: bool = True
    detokenize: bool = False

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)
        own = {each.name for each in fields(SamplingParams)} - {"truncate_prompt_tokens"}
        for each in fields(self):
            if each.name in own and getattr(self, each.name) != each.default:
                raise InvalidRequestError(f"{each.name} applies to generation only; remove it")
        if self.task not in TASKS:
            raise InvalidRequestError(f"task must be one of {', '.join(TASKS)}, not {shown(self.task)}")
        if self.dimensions is not None:
            object.__setattr__(self, "dimensions", check_integer("dimensions", self.dimensions, low=1))
            if self.task != "embed":
                raise InvalidRequestError("dimensions are for embeddings; remove them")
        if not isinstance(self.use_activation, bool | None):
            raise InvalidRequestError(
                f"use_activation must be true or false, not {shown(self.use_activation)}"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], **_: Any) -> PoolingParams:
        """Build from JSON-like fields; an unknown field is an error that names it."""
        known = ("task", "dimensions", "use_activation", "truncate_prompt_tokens")
        if unknown := [name for name in values if name not in known]:
            raise InvalidRequestError(f"unknown field {shown(unknown[0])}; known fields: {', '.join(known)}")
        return cls(**values)

    @property
    def max_cached_tokens(self) -> int | None:
        """0 for MEAN, which needs every position; otherwise no limit."""
        return 0 if self.pooling_type == "MEAN" else None

    def to_mapping(self) -> NoReturn:
        """Raises: requests that pool are neither recorded nor sent to another process."""
        raise InvalidRequestError(
            "pooling runs on one engine: set data_parallel_size to 1, and do not record it"
        )
