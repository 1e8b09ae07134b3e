"""The settings of a row on the device, converted from request parameters by `graphs.row_state.sampling_fields`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_engine.graphs.row_state.rows import make_tables
from xla_engine.graphs.row_state.sampling_fields import (
    REPETITION_FIELDS,
    SAMPLING_FIELDS,
    RowField,
    SamplingRows,
    make_sampling_rows,
)
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.token_mask import TokenMask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSettings:
    """The settings of one sequence, which the device gets when its prompt is complete.

    dry_breakers: tokens that break a sequence for DRY.
    seed: 64-bit unsigned. mask: None if every token may be sampled. prompt_token_ids: used for prompt_logprobs.
    adapter: the adapter's slot, from 1; 0 is none. positions: i32 `[prompt, 3]`, see `grid_positions`; None: all are
    places in the prompt. second_text: the position of the first token of type 1 in a prompt of two texts; 0: there is
    none.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    mask: TokenMask | None = None
    prompt_token_ids: tuple[int, ...] = ()
    dry_breakers: tuple[int, ...] = ()
    adapter: int = 0
    positions: np.ndarray[Any, np.dtype[np.int32]] | None = None
    second_text: int = 0

    @property
    def rope_offset(self) -> int:
        """`Rows.rope_offset`: text goes on behind the furthest position of the prompt."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.positions)

    @property
    def min_tokens(self) -> int:
        """Tokens before the device may sample a stop id; 0 if a constrained mask takes care of this."""
        return 0 if self.mask is not None and self.mask.constrained else self.params.min_tokens

    @property
    def top_logprobs(self) -> int:
        """For how many most likely tokens log-probabilities are needed at each step."""
        return self.params.logprobs or 0


def grid_positions(length: int, grids: Sequence[tuple[int, int, int]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Positions in time, rows and columns of a prompt of `length` tokens with pictures: i32 `[length, 3]`.

    grids: (start, rows, columns) of each picture, which has one token for each place of its grid. The first has the
    position that a text token would have, on all axes; the others are counted from it, and text goes on behind the
    longer side (M-RoPE, Wang et al. 2024, section 2.1).
    """
    positions = np.empty((length, 3), np.int32)
    at = position = 0
    for start, rows, columns in (*grids, (length, 0, 0)):
        positions[at:start] = np.arange(position, position + start - at, dtype=np.int32)[:, None]
        position += start - at
        at = start + rows * columns
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), np.int32(max(columns, 1)))
        positions[start:at] = position + np.stack([np.zeros_like(row), row, column], axis=1)
        position += max(rows, columns)
    return positions


def sampling_rows(count: int, rows: Mapping[int, RowSettings], *, dry: bool = False) -> SamplingRows:
    """Host arrays for `count` lanes. rows: of the lanes that complete a prompt. dry: include the parameters of DRY."""
    sampling = make_sampling_rows(count, dry=dry)
    for lane, row in rows.items():
        _fill(sampling, SAMPLING_FIELDS, lane, row)
        if dry:
            _fill(sampling.repetition, REPETITION_FIELDS, lane, row)
    return sampling


def _fill(record: Any, lines: Mapping[str, RowField], lane: int, row: RowSettings) -> None:
    """Fill one lane of a record of sampling parameters."""
    for name, line in lines.items():
        value = getattr(row, line.settled) if line.settled else getattr(row.params, str(line.param))
        getattr(record, name)[lane] = value if line.entry is None else line.entry(value)


class HostTables:
    """The host copy of `Tables`, with a record of the arrays that have changed since the device got them."""

    def __init__(
        self, count: int, vocabulary: int, max_blocks: int | None = None, *, drafts: int = 0
    ) -> None:
        """drafts: the most drafts of a row."""
        self._vocabulary = vocabulary
        self._arrays: Any = make_tables(count, vocabulary, has_blocks=max_blocks is not None, drafts=drafts)
        self._stale = {"bias_ids", "bias", "mask"} | ({"block_changes"} if max_blocks else set())
        self._stale |= {"draft_masks"} if drafts else set()
        self._block_tables = np.zeros((count, max_blocks or 0), np.int32)
        self._changes: dict[tuple[int, int], int] = {}  # block by (slot, index)

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        """Set a slot's logit bias."""
        self._arrays.bias_ids[slot] = self._vocabulary
        self._arrays.bias_ids[slot, : len(bias)] = list(bias)
        self._arrays.bias[slot, : len(bias)] = list(bias.values())
        self._stale |= {"bias_ids", "bias"}

    def set_mask(self, slot: int, words: np.ndarray) -> None:
        """Set a slot's mask, u32 `[ceil(V / 32)]`."""
        self._arrays.mask[slot] = words
        self._stale.add("mask")

    def set_draft_masks(self, slot: int, masks: Sequence[np.ndarray]) -> None:
        """Set a slot's masks after its first, second, ... draft."""
        for place, words in enumerate(masks):
            self._arrays.draft_masks[slot, place] = words
        self._stale.add("draft_masks")

    def set_blocks(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        """Set a slot's blocks from the `start`-th on. Entries after the last one are not read."""
        self._block_tables[slot, start : start + len(blocks)] = blocks
        self._changes.update({(slot, start + index): block for index, block in enumerate(blocks)})
        self._stale.add("block_changes")

    def take_block_tables(self) -> np.ndarray | None:
        """All block tables if there are more changes than `block_changes` can hold; otherwise None."""
        if len(self._changes) <= len(self._block_tables):
            return None
        self._changes.clear()
        return self._block_tables.copy()

    def take_stale(self) -> dict[str, np.ndarray]:
        """Copies of the arrays that have changed since the last call, by name."""
        stale, self._stale = self._stale, set()
        if "block_changes" in stale:
            changes, self._changes = self._changes, {}
            count = len(self._block_tables)
            self._arrays.block_changes[:] = count  # no slot
            for at, ((slot, index), block) in enumerate(changes.items()):
                self._arrays.block_changes[:, at] = slot, index, block
        return {name: getattr(self._arrays, name).copy() for name in sorted(stale)}
