"""The sampling table: the sampling parameters of a row on the device, and the order in which they act.

Each field of `SamplingRows` and `Repetition` is a line of the table. These lines define neutral rows, the values that
the host fills in (`xla_engine.runner.row_settings`), the layout of a row in C++ (`native/row_fields.h`) and the values
that `verify` tries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_type_hints

import jax
import numpy as np

from xla_engine.graphs.row_state.limits import MAX_DRY_BREAKERS

STAGES = (
    "bias",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "dry",
    "min_tokens",
    "mask",
    "temperature",
    "min_p",
    "top_k_top_p",
    "draw",
)
"""The stages of sampling in order. A stage that no live row of a step needs is skipped, and a stage does not change
the logits of rows that do not need it."""


class RowField(NamedTuple):
    """A line of the table.

    dtype, shape: of one row's entry.
    neutral: the value of all elements of the entry without an effect.
    param: the field of `SamplingParams` that fills the entry.
    settled: the field of `RowSettings` that fills it, if the host derives the value first.
    entry: converts that field's value to the entry; None: no conversion.
    tried: values of `param` with an effect, from which `verify` draws.
    """

    dtype: type[np.generic]
    neutral: float
    param: str | None = None
    shape: tuple[int, ...] = ()
    settled: str | None = None
    entry: Callable[[Any], Any] | None = None
    tried: tuple[Any, ...] = ()


def _padded(ids: tuple[int, ...]) -> tuple[int, ...]:
    return *ids, *(-1,) * (MAX_DRY_BREAKERS - len(ids))


def _halves(seed: int) -> tuple[int, int]:
    return seed >> 32, seed & 0xFFFFFFFF


def _is_given(value: object) -> bool:
    return value is not None


def _count(value: int | None) -> int:
    return -1 if value is None else value


def _not_negative(value: int) -> int:
    return max(value, 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """Parameters of DRY (`sampling.logits_processors`), and the window of the other penalties, one entry per row.

    dry_multiplier: 0 disables DRY.
    penalty_last_n: how many of the last tokens the penalties consider; -1 for all.
    dry_breakers: token ids, padded with -1.
    """

    dry_multiplier: Annotated[jax.Array, RowField(np.float32, 0, "dry_multiplier")]
    dry_base: Annotated[jax.Array, RowField(np.float32, 1, "dry_base")]
    dry_allowed_length: Annotated[jax.Array, RowField(np.int32, 0, "dry_allowed_length")]
    penalty_last_n: Annotated[jax.Array, RowField(np.int32, -1, "penalty_last_n")]
    dry_breakers: Annotated[
        jax.Array, RowField(np.int32, -1, shape=(MAX_DRY_BREAKERS,), settled="dry_breakers", entry=_padded)
    ]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling parameters, one entry per row: `[N]` or `[N, *shape]`; N is B for the decode state, P for prefill
    lanes.

    A neutral row samples greedily, without any adjustment.

    has_bias, has_mask: 1 if the slot's bias or mask in the `Tables` applies, otherwise 0.
    seed: 64 bits as (high, low).
    num_logprobs: -1 for none, 0 for the sampled token's, n > 0 also for those of the n most likely tokens.
    repetition: None in an engine without DRY.
    """

    temperature: Annotated[jax.Array, RowField(np.float32, 0, "temperature")]
    top_k: Annotated[jax.Array, RowField(np.int32, 0, "top_k", entry=_not_negative)]
    top_p: Annotated[jax.Array, RowField(np.float32, 1, "top_p")]
    min_p: Annotated[jax.Array, RowField(np.float32, 0, "min_p")]
    repetition_penalty: Annotated[jax.Array, RowField(np.float32, 1, "repetition_penalty", tried=(0.7, 1.3))]
    frequency_penalty: Annotated[jax.Array, RowField(np.float32, 0, "frequency_penalty", tried=(-1.0, 1.5))]
    presence_penalty: Annotated[jax.Array, RowField(np.float32, 0, "presence_penalty", tried=(-1.5, 2.0))]
    has_bias: Annotated[jax.Array, RowField(np.uint32, 0, "logit_bias", entry=bool)]
    has_mask: Annotated[jax.Array, RowField(np.uint32, 0, settled="mask", entry=_is_given)]
    seed: Annotated[jax.Array, RowField(np.uint32, 0, shape=(2,), settled="seed", entry=_halves)]
    num_logprobs: Annotated[jax.Array, RowField(np.int32, -1, "logprobs", entry=_count)]
    repetition: Repetition | None = None


def _lines(record: type[Any]) -> dict[str, RowField]:
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


SAMPLING_FIELDS, REPETITION_FIELDS = _lines(SamplingRows), _lines(Repetition)


def make_sampling_rows(count: int, *, dry: bool = False) -> SamplingRows:
    """Neutral rows as host arrays. dry: include the parameters of DRY."""

    def neutral(lines: dict[str, RowField]) -> dict[str, Any]:
        found = {name: np.zeros((count, *line.shape), line.dtype) for name, line in lines.items()}
        for name, line in lines.items():
            if line.neutral:
                found[name][:] = line.neutral
        return found

    return SamplingRows(
        **neutral(SAMPLING_FIELDS), repetition=Repetition(**neutral(REPETITION_FIELDS)) if dry else None
    )
