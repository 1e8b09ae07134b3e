"""What packing means, in NumPy: rows of a quantised file in the layout of `graphs.ops.coded`, without loss.

`graphs/native/pack.h` does the same, and is what the engine uses. The block formats are ggml's (`ggml-common.h`; see
also `quants.py` of the `gguf` package). A4 and A8 are made from other files (`quantised.matrix`): float16 scale and
zero point, then codes as in Q4_0 or Q8_0.
"""

from typing import Any

import numpy as np

from xla_engine.graphs.ops.coded import BLOCK, KINDS, Order

Array = np.ndarray[Any, Any]


def coded_blocks(kind: str, rows: Array, width: int, order: Order = "pairs") -> tuple[Array, bool]:
    """Convert rows `[F, bytes]` of the file to blocks `[F / 16, bytes]`; also returns whether all scales are finite.

    F must be a multiple of 16.
    """
    own = KINDS[kind]
    groups = width // own.group
    raw = rows.reshape(-1, BLOCK, groups, rows.shape[1] // groups)
    codes, halves, small = _parts(kind, raw)
    if order == "fours":
        planes = [_fours(codes.reshape(len(raw), BLOCK, width), kind).reshape(len(raw), -1)]
    else:
        planes = [
            plane.reshape(len(raw), -1) for plane in _planes(codes.reshape(len(raw), 2, 8, width), kind)
        ]
    turned = [each.swapaxes(1, 2) for each in halves]  # [blocks, groups, 16, 2]
    scales = np.concatenate(
        [each.reshape(len(raw), groups, -1) for each in (*([] if small is None else [small]), *turned)],
        axis=2,
    ).reshape(len(raw), -1)
    padding = np.zeros((len(raw), -scales.shape[1] % 64), np.uint8)
    finite = all(np.isfinite(np.ascontiguousarray(each).view(np.float16)).all() for each in halves)
    if kind == "MXFP4":
        finite = _in_range(raw[..., 0], codes)
    return np.concatenate([*planes, scales, padding], axis=1), finite


def _in_range(power: Array, codes: Array) -> bool:
    """Whether all numbers of MXFP4 blocks are zero or normal, and as small as weights may be."""
    return bool(((power < 221) & ((power > 1) | ~(codes & 7).any(axis=-1))).all())


def _parts(kind: str, raw: Array) -> tuple[Array, list[Array], Array | None]:
    """Split groups `[blocks, 16, groups, bytes]` into codes `[blocks, 16, groups, K]`, the bytes of float16 scales
    and minima `[blocks, 16, groups, 2]`, and the small scales `[blocks, groups, ...]` of sixteen features each."""
    if kind == "Q6_K":
        low, high, small, scale = np.split(raw, [128, 192, 208], axis=-1)
        fours = _nibbles(low, 64)
        twos = (high.reshape(*raw.shape[:3], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]) & 3
        codes = fours | twos.reshape(*raw.shape[:3], 256) << 4
        return codes, [scale], np.moveaxis(small, 1, 3)
    if kind in ("Q4_K", "Q5_K"):
        scale, least, packed, rest = np.split(raw, [2, 4, 16], axis=-1)
        codes = _nibbles(rest[..., -128:], 32)
        if kind == "Q5_K":
            bits = rest[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
            codes = codes | bits.reshape(codes.shape) << 4
        one, other, both = np.split(packed, 3, axis=-1)
        scales = np.concatenate([one & 63, both & 15 | one >> 2 & 48], axis=-1)
        minima = np.concatenate([other & 63, both >> 4 | other >> 2 & 48], axis=-1)
        small = np.moveaxis(np.stack([scales, minima], axis=-1), 1, 4)  # [blocks, groups, 8, 2, 16]
        return codes, [scale, least], small
    if kind == "IQ4_XS":
        scale, upper, lower, packed = np.split(raw, [2, 4, 8], axis=-1)
        twos = upper[..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
        fours = lower[..., None] >> np.array([0, 4], np.uint8) & 15
        six = fours.reshape(*raw.shape[:3], 8) | twos.reshape(*raw.shape[:3], 8) << 4
        return _nibbles(packed, 16), [scale], np.moveaxis(six - np.uint8(32), 1, 3)  # signed bytes
    if kind == "MXFP4":  # numbers are doubled
        return _nibbles(raw[..., 1:], 16), [], np.maximum(raw[..., 0], 1).swapaxes(1, 2) - np.uint8(1)
    count = 2 if kind in ("Q4_1", "Q5_1", "A4", "A8") else 1
    halves = [raw[..., 2 * place : 2 * place + 2] for place in range(count)]
    if kind in ("Q8_0", "A8"):
        return raw[..., 2 * count :], halves, None
    codes = _nibbles(raw[..., -16:], 16)
    if kind in ("Q5_0", "Q5_1"):
        codes = codes | np.unpackbits(raw[..., 2 * count : 2 * count + 4], axis=-1, bitorder="little") << 4
    return codes, halves, None


def _nibbles(packed: Array, run: int) -> Array:
    """Unpack 4-bit codes: every `run` bytes hold `run` codes in their low halves, then `run` in their high halves."""
    apart = packed.reshape(*packed.shape[:-1], -1, 1, run) >> np.array([[0], [4]], np.uint8) & 15
    found: Array = apart.reshape(*packed.shape[:-1], -1)
    return found


def _planes(codes: Array, kind: str) -> list[Array]:
    """The bit planes of codes `[blocks, 2, 8, K]`; axis 1 separates the lower and the upper eight features."""
    own, blocks = KINDS[kind], len(codes)

    def plane(values: Array, bits: int) -> Array:
        """Bytes by eight K, feature, K % 2 and K / 2: within one, from the lowest bits on, those of both halves."""
        parts = values.reshape(blocks, 2, 8, -1, 4 // bits, 4, 2).transpose(0, 3, 2, 6, 5, 4, 1)
        shifted = parts.reshape(*parts.shape[:-2], -1) << np.arange(0, 8, bits, dtype=np.uint8)
        found: Array = np.bitwise_or.reduce(shifted, axis=-1)
        return found

    if kind in ("Q8_0", "A8"):
        return [codes.reshape(blocks, 2, 8, -1, 4, 2).transpose(0, 3, 1, 2, 5, 4) ^ 128]
    return [plane(codes & 15, 4), *([plane(codes >> 4, own.high * 4 // own.low)] if own.high else [])]


def _fours(codes: Array, kind: str) -> Array:
    """The bit planes of codes `[blocks, 16, K]` by 32 K: the lowest four bits (or all eight), then those above. Each
    has bytes by feature and K % 4, in which K, K + 4 .. follow each other from the lowest bits on."""
    own, blocks = KINDS[kind], len(codes)

    def plane(values: Array, bits: int) -> Array:
        parts = values.reshape(blocks, BLOCK, -1, bits, 8 // bits, 4)
        shifted = parts << np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        found: Array = np.bitwise_or.reduce(shifted, axis=4).transpose(0, 2, 3, 1, 4)
        return found.reshape(blocks, codes.shape[2] // 32, -1)

    if kind in ("Q8_0", "A8"):
        return plane(codes ^ 128, 8)
    high = [plane(codes >> 4, own.high * 4 // own.low)] if own.high else []
    return np.concatenate([plane(codes & 15, 4), *high], axis=2)
