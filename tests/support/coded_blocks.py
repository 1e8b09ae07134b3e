"""Blocks of every kind of `graphs.ops.coded`, and what they mean: by the gguf package, or by zero points."""

from __future__ import annotations

import gguf
import numpy as np

from tests.support.gguf_files import Kind, random_blocks

_BITS = {"A4": 4, "A8": 8}  # kinds that no GGUF file has: float16 scale and zero point, 32 codes


def block_bytes(kind: str) -> int:
    return 4 + 4 * _BITS[kind] if kind in _BITS else int(gguf.GGML_QUANT_SIZES[Kind[kind]][1])


def random_rows(shape: tuple[int, int], kind: str, seed: int) -> np.ndarray:
    """Rows `[F, bytes]` of blocks."""
    generator, (rows, width) = np.random.default_rng(seed), shape
    if kind not in _BITS:
        blocks = random_blocks(shape, Kind[kind], seed)
        if kind == "MXFP4":  # powers of two of any size mean finite numbers, too
            blocks[:, :: block_bytes(kind)] = generator.integers(118, 128, (rows, width // 32))
        return blocks
    scales = generator.uniform(0.001, 0.01, (rows, width // 32, 1)).astype(np.float16)
    least = 0 if kind == "A4" else -128
    zeros = generator.integers(least, least + (1 << _BITS[kind]), scales.shape).astype(np.float16)
    codes = generator.integers(0, 256, (rows, width // 32, 4 * _BITS[kind])).astype(np.uint8)
    parts = (scales.view(np.uint8), zeros.view(np.uint8), codes)
    return np.concatenate(parts, axis=2).reshape(rows, -1)


def dequantised_rows(kind: str, raw: np.ndarray) -> np.ndarray:
    """Float32 `[F, K]`: `(code - zero) * scale`, low halves of bytes first, or as ggml has it."""
    if kind not in _BITS:
        return gguf.quants.dequantize(raw, Kind[kind])
    blocks = raw.reshape(len(raw), -1, block_bytes(kind))
    scale, zero = (
        np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16).astype(np.float32) for at in (0, 2)
    )
    codes = blocks[..., 4:]
    codes = codes.view(np.int8) if kind == "A8" else np.concatenate([codes & 15, codes >> 4], axis=2)
    return ((codes.astype(np.float32) - zero) * scale).reshape(len(raw), -1)
