"""What a decode step takes from the host. It is kept from step to step while the same rows decode."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from xla_engine.runner.call_sizes import decode_work
from xla_engine.runner.row_settings import RowSettings
from xla_engine.scheduler import Row, VerifyRow


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """The inputs of decode steps for as long as the same rows decode.

    rows: those of the plan. index: their slots, i64 `[rows]`.
    few: rows of the program; None: all. work: its input, see `decode_work`.
    wanted: how many top log-probabilities each row needs.
    constrained: slot and settings of rows whose mask changes in every step.
    """

    rows: tuple[Row | VerifyRow, ...]
    index: np.ndarray
    few: int | None
    work: np.ndarray | jax.Array
    wanted: tuple[int, ...]
    constrained: tuple[tuple[int, RowSettings], ...]


def decode_inputs(
    rows: tuple[Row | VerifyRow, ...],
    settings: Mapping[str, RowSettings],
    device_rows: int,
    few_sizes: Sequence[int],
    given: Callable[[np.ndarray], np.ndarray | jax.Array],
) -> DecodeInputs:
    """device_rows: of the decode program for all rows. few_sizes: rows of the smaller programs, in ascending order.
    given: places the input, or leaves it on the host."""
    index = np.array([row.slot.index for row in rows], np.int64)
    few = next((count for count in few_sizes if count >= len(rows)), None)
    theirs = [settings[row.request_id] for row in rows]
    return DecodeInputs(
        rows=rows,
        index=index,
        few=few,
        work=given(decode_work(index, device_rows, few)),
        wanted=tuple(row.top_logprobs for row in theirs),
        constrained=tuple(
            (int(at), row)
            for at, row in zip(index, theirs, strict=True)
            if row.mask is not None and row.mask.constrained
        ),
    )
