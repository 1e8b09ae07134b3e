"""What a row is told of its request: one home for what each sampling field becomes on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_engine.graphs.row_state.rows import SamplingRows, make_sampling_rows, make_tables
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.token_mask import TokenMask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSettings:
    """What the device is told about one sequence when its prompt is complete.

    dry_breakers: tokens that break a sequence for DRY.
    seed: 64-bit unsigned. mask: None where every token may be sampled. prompt_token_ids: read for prompt_logprobs.
    adapter: which of the loaded ones, from 1; 0 is none.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    mask: TokenMask | None = None
    prompt_token_ids: tuple[int, ...] = ()
    dry_breakers: tuple[int, ...] = ()
    adapter: int = 0

    @property
    def min_tokens(self) -> int:
        """Tokens before stop ids may be sampled, for the device; a host-gated mask forbids them itself."""
        return 0 if self.mask is not None and self.mask.host_gated else self.params.min_tokens

    @property
    def top_logprobs(self) -> int:
        """How many most likely tokens are wanted at each step."""
        return self.params.logprobs or 0


def sampling_rows(count: int, rows: Mapping[int, RowSettings], *, dry: bool = False) -> SamplingRows:
    """Host arrays of `count` lanes, of which `rows` complete a prompt. dry: with the parameters of DRY."""
    sampling: Any = make_sampling_rows(
        count, dry=dry
    )  # Any: the record is declared for the arrays a graph sees
    for lane, row in rows.items():
        params = row.params
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        ):
            getattr(sampling, name)[lane] = getattr(params, name)
        sampling.top_k[lane] = max(params.top_k, 0)
        sampling.has_bias[lane] = bool(params.logit_bias)
        sampling.has_mask[lane] = row.mask is not None
        sampling.seed[lane] = row.seed >> 32, row.seed & 0xFFFFFFFF
        sampling.num_logprobs[lane] = -1 if params.logprobs is None else params.logprobs
        if dry:
            own = sampling.repetition
            own.multiplier[lane], own.base[lane] = params.dry_multiplier, params.dry_base
            own.allowed_length[lane], own.last_n[lane] = params.dry_allowed_length, params.penalty_last_n
            own.breakers[lane, : len(row.dry_breakers)] = row.dry_breakers
    return sampling


class HostTables:
    """`Tables` on the host, and which of its arrays have changed since the device got them."""

    def __init__(
        self, count: int, vocabulary: int, max_blocks: int | None = None, *, drafts: int = 0
    ) -> None:
        """drafts: that a row may have, at most."""
        self._vocabulary = vocabulary
        self._arrays: Any = make_tables(count, vocabulary, has_blocks=max_blocks is not None, drafts=drafts)
        self._stale = {"bias_ids", "bias", "mask"} | ({"block_changes"} if max_blocks else set())
        self._stale |= {"draft_masks"} if drafts else set()
        self._block_tables = np.zeros((count, max_blocks or 0), np.int32)
        self._changes: dict[tuple[int, int], int] = {}  # slot and index to block

    def set_bias(self, slot: int, bias: Mapping[int, float]) -> None:
        """Give a slot its logit bias."""
        self._arrays.bias_ids[slot] = self._vocabulary
        self._arrays.bias_ids[slot, : len(bias)] = list(bias)
        self._arrays.bias[slot, : len(bias)] = list(bias.values())
        self._stale |= {"bias_ids", "bias"}

    def set_mask(self, slot: int, words: np.ndarray) -> None:
        """Give a slot its mask, u32 `[ceil(V / 32)]`."""
        self._arrays.mask[slot] = words
        self._stale.add("mask")

    def set_draft_masks(self, slot: int, masks: Sequence[np.ndarray]) -> None:
        """Give a slot the masks behind its first, second, ... draft."""
        for place, words in enumerate(masks):
            self._arrays.draft_masks[slot, place] = words
        self._stale.add("draft_masks")

    def set_blocks(self, slot: int, start: int, blocks: Sequence[int]) -> None:
        """Give a slot blocks from the `start`-th on; what lies behind its last one is not read."""
        self._block_tables[slot, start : start + len(blocks)] = blocks
        self._changes.update({(slot, start + index): block for index, block in enumerate(blocks)})
        self._stale.add("block_changes")

    def take_block_tables(self) -> np.ndarray | None:
        """All block tables, if they have changed in more places than there is room for in the changes; else None."""
        if len(self._changes) <= len(self._block_tables):
            return None
        self._changes.clear()
        return self._block_tables.copy()

    def take_stale(self) -> dict[str, np.ndarray]:
        """Copies of the arrays that changed since the last call, by name, for the device."""
        stale, self._stale = self._stale, set()
        if "block_changes" in stale:
            changes, self._changes = self._changes, {}
            count = len(self._block_tables)
            self._arrays.block_changes[:] = count  # no slot
            for at, ((slot, index), block) in enumerate(changes.items()):
                self._arrays.block_changes[:, at] = slot, index, block
        return {name: getattr(self._arrays, name).copy() for name in sorted(stale)}
