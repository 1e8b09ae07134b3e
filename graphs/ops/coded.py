"""Weights in the format of a quantised file: products unpack them on the fly, or multiply the codes themselves.

In the order "pairs" each value is that of the dequantised file rounded to bf16, so a product has the bits that it has
with bf16 weights (`native/coded_weights.h`). In the order "fours" the codes themselves are multiplied with rows in
eight bits (`native/coded_dots.h`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# By leaf: the kinds of its rows in the file, in the leaf's order, and how many rows have each.
StoredKinds = Mapping[str, tuple[tuple[str, int], ...]]
Order = Literal["pairs", "fours"]  # of codes
BLOCK = 16  # features
_TASK = 32  # features that a product takes at once
_HEADER, _RUNS = 64, 6


class CodedKind(NamedTuple):
    """The number of a kind (ggml's, or above 100), the values that share a scale or a scale of scales, and bytes of
    sixteen such groups: of codes of four or eight bits, of bits above four, and of scales."""

    number: int
    group: int
    low: int
    high: int
    scales: int

    @property
    def codes(self) -> int:
        """Bytes of codes of sixteen groups."""
        return self.low + self.high


KINDS = {
    "Q4_0": CodedKind(2, 32, 256, 0, 32),
    "Q4_1": CodedKind(3, 32, 256, 0, 64),
    "Q5_0": CodedKind(6, 32, 256, 64, 32),
    "Q5_1": CodedKind(7, 32, 256, 64, 64),
    "Q8_0": CodedKind(8, 32, 512, 0, 32),
    "Q4_K": CodedKind(12, 256, 2048, 0, 320),
    "Q5_K": CodedKind(13, 256, 2048, 512, 320),
    "Q6_K": CodedKind(14, 256, 2048, 1024, 288),
    "IQ4_NL": CodedKind(20, 32, 256, 0, 32),
    "IQ4_XS": CodedKind(23, 256, 2048, 0, 160),
    "A4": CodedKind(104, 32, 256, 0, 64),  # with zero points, of AWQ and others
    "A8": CodedKind(108, 32, 512, 0, 64),
    "MXFP4": CodedKind(39, 32, 256, 0, 16),
}


@dataclass(frozen=True, slots=True)
class CodedForm:
    """What is static of a coded weight `[features, width]`: the kinds of its runs of blocks of sixteen features."""

    features: int
    width: int
    runs: tuple[tuple[str, int], ...]
    order: Order = "pairs"

    @property
    def rows(self) -> jnp.dtype:
        """The dtype of rows that meet it: in fours, products quantise them."""
        return jnp.dtype(jnp.float32 if self.order == "fours" else jnp.bfloat16)

    def block_bytes(self, kind: str) -> int:
        """Of sixteen features; scales fill whole lines of 64 bytes."""
        own = KINDS[kind]
        groups = self.width // own.group
        return groups * own.codes + -(-groups * own.scales // 64) * 64

    @property
    def nbytes(self) -> int:
        return _HEADER + sum(blocks * self.block_bytes(kind) for kind, blocks in self.runs)

    def header(self) -> np.ndarray:
        """The first bytes of the array."""
        ends = np.cumsum([blocks for _, blocks in self.runs])
        runs = [
            number
            for (kind, _), end in zip(self.runs, ends, strict=True)
            for number in (KINDS[kind].number, end)
        ]
        words = np.zeros(_HEADER // 4, np.int32)
        words[: 4 + len(runs)] = [self.width, self.features, len(self.runs), self.order == "fours", *runs]
        return words.view(np.uint8)


class Coded(NamedTuple):
    """A weight in a graph. values: uint8 `[form.nbytes]`."""

    values: jax.Array
    form: CodedForm


def coded_form(
    stored: tuple[tuple[str, int], ...], width: int, rows: np.ndarray | None = None, order: Order = "pairs"
) -> CodedForm | None:
    """How one of several devices stores its part of a leaf `[F, width]` in this format; None if it cannot.

    rows `[devices, features]`: which of the leaf's rows each device has, -1 for zeros; None: one has all.
    """
    kinds = [kind for kind, _ in stored]
    if not kinds or any(kind not in KINDS or width % KINDS[kind].group for kind in kinds):
        return None
    names = list(dict.fromkeys(kinds))
    of_row = np.repeat([names.index(kind) for kind in kinds], [count for _, count in stored])
    held = np.arange(len(of_row))[None] if rows is None else rows
    features = held.shape[1]
    local = np.pad(np.where(held < 0, -1, of_row[held]), ((0, 0), (0, -features % _TASK)), constant_values=-1)
    blocks = local.reshape(len(held), -1, BLOCK).swapaxes(0, 1).reshape(local.shape[1] // BLOCK, -1)
    most = blocks.max(axis=1)
    if (np.where(blocks < 0, most[:, None], blocks) != most[:, None]).any():
        return None  # a block of several kinds, or devices that differ
    runs: list[tuple[str, int]] = []
    for kind in most:  # -1: nothing but zeros
        name = names[kind] if kind >= 0 else runs[-1][0] if runs else names[0]
        if runs and runs[-1][0] == name:
            runs[-1] = name, runs[-1][1] + 1
        else:
            runs.append((name, 1))
    return CodedForm(features, width, tuple(runs), order) if len(runs) <= _RUNS else None
