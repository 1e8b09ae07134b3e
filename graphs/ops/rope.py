"""Rotary embedding as data: a table of cosines and sines per distinct embedding of a model.

A table rather than in-graph transcendentals: a row's angles are then the same bits in every graph. They are the same
bits on every machine, too: NumPy's `power`, `cos` and `sin` and libm's `log` follow the processor, so powers and
logarithms are `decimal`'s here, and cosines and sines a polynomial of additions and multiplications in float64.
"""

import math
from decimal import Context, Decimal
from typing import Any

import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import Rope, RopeScaling

Array = np.ndarray[Any, Any]

_DECIMAL = Context(prec=40)
_ROWS = 1024  # whose angles are turned at a time
# Constants of fdlibm: pi/2 in parts of 33 bits, whose small multiples are exact (e_rem_pio2.c), and the polynomials of
# sine and cosine up to pi/4 (k_sin.c, k_cos.c).
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COSINE = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
)


def rope_tables(config: ModelConfig, length: int, *, context_length: int | None = None) -> Array:
    """Cosines and sines of positions `0 .. length` for each of `config.ropes`: float32 `[K, length, 2, Dh/2]`,
    of the widest heads; narrower ones turn by the first angles.

    If queries are scaled by position, the last table has their factors in place of cosines (`scaled_queries`).
    Attention factors are multiplied in. Dimensions that do not turn have cosine 1 and sine 0; they are the last of
    each half (`rotary_order`).
    `context_length`: the longest request, which "dynamic" and "longrope" choose by, never a request's own length;
    None is `length`.
    """
    context_length = context_length or length
    tables = np.zeros((config.rotary_tables, length, 2, config.widest_head // 2), np.float32)
    tables[:, :, 0] = 1
    if config.llama_4_scaling_beta is not None:
        tables[-1, :, 0] = _query_factors(config, config.llama_4_scaling_beta, length)[:, None]
    for table, rope in zip(tables, config.ropes, strict=False):
        if rope is None:
            continue
        frequencies = inverse_frequencies(rope, context_length)
        factor = np.float32(1 if rope.scaling is None else rope.scaling.attention_factor)
        for begin in range(0, length, _ROWS):
            rows = table[begin : begin + _ROWS, :, : len(frequencies)]
            positions = np.arange(begin, begin + len(rows), dtype=np.float32)
            rows[:] = cosines_and_sines(positions[:, None] * frequencies) * factor
    return tables


def _query_factors(config: ModelConfig, beta: float, length: int) -> Array:
    """The factor of the queries at each position, float32 `[length]`."""
    assert config.rope_scaling is not None
    contexts = np.arange(length) // config.rope_scaling.original_max_position_embeddings
    factors = [1 + beta * natural_log(1 + number) for number in range(int(contexts.max(initial=0)) + 1)]
    return np.array(factors, np.float32)[contexts]


def cosines_and_sines(angles: Array) -> Array:
    """Of angles f32 `[N, F]` at least 0: f32 `[N, 2, F]`, the same bits on every machine, and nearest in all but few
    cases for angles up to 2^20."""
    exact = angles.astype(np.float64)
    quarters = np.rint(exact * (2 / math.pi))
    for part in _HALF_PI:
        exact = exact - quarters * part
    square = exact * exact
    sine = exact + exact * square * _polynomial(_SINE, square)
    cosine = 1 - (0.5 * square - square * square * _polynomial(_COSINE, square))
    quarter = quarters.astype(np.int64) & 3
    turned = np.where(quarter & 1, -sine, cosine), np.where(quarter & 1, cosine, sine)
    sign = np.where(quarter & 2, -1.0, 1.0)
    return np.stack([(each * sign).astype(np.float32) for each in turned], axis=1)


def _polynomial(coefficients: tuple[float, ...], of: Array) -> Array:
    """The highest power's coefficient stands first."""
    value = np.full_like(of, coefficients[0])
    for each in coefficients[1:]:
        value = value * of + each
    return value


def natural_log(value: float) -> float:
    """The nearest number to the logarithm of a positive one, whatever libm says."""
    return float(_DECIMAL.ln(Decimal(value)))


def power(base: float, exponent: float) -> float:
    """The nearest number to `base ** exponent`, base > 0, whatever libm says."""
    return float(_DECIMAL.exp(_DECIMAL.multiply(_DECIMAL.ln(Decimal(base)), Decimal(exponent))))


def rotary_order(config: ModelConfig) -> Array:
    """The checkpoint's dimension at each dimension of a head: `[Dh]`.

    Backends rotate dimensions i and i + Dh/2. A checkpoint that pairs neighbours, or rotates the first `rotary_dim`
    dimensions only, has its query and key rows put in this order at load; scores do not depend on the order.
    """
    pairs = np.arange(config.rotary_dim).reshape((-1, 2) if config.rope_interleaved else (2, -1))
    first, second = pairs.T if config.rope_interleaved else pairs
    rest = np.arange(config.rotary_dim, config.head_dim).reshape(2, -1)
    return np.concatenate([first, rest[0], second, rest[1]])


def inverse_frequencies(rope: Rope, context_length: int) -> Array:
    """Angles per position, float32 `[rope.dims / 2]` (Su et al. 2021), with the checkpoint's scaling applied."""
    theta, scaling, rotary_dim = rope
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    if scaling is not None and scaling.rope_type == "dynamic":
        reach = max(context_length / scaling.original_max_position_embeddings, 1.0)
        theta *= power(scaling.factor * reach - (scaling.factor - 1), rotary_dim / (rotary_dim - 2))
    base = float(np.float32(theta))
    wavelengths = np.array([power(base, float(each)) for each in exponents], np.float32)
    frequencies: Array = np.float32(1.0) / wavelengths
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        keep: Array = np.zeros_like(frequencies)
    elif scaling.rope_type == "proportional":
        turning = np.arange(rotary_dim // 2) < int(scaling.turning * rotary_dim // 2)
        return np.where(turning, frequencies / np.float32(scaling.factor), np.float32(0))
    elif scaling.rope_type == "longrope":
        long = context_length > scaling.original_max_position_embeddings
        return frequencies / np.asarray(scaling.long_factor if long else scaling.short_factor, np.float32)
    elif scaling.rope_type == "llama3":
        per_context = scaling.original_max_position_embeddings / (2 * math.pi / frequencies)
        keep = (per_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        keep = _yarn_ramp(theta, scaling, rotary_dim)
    keep = np.clip(keep, 0.0, 1.0).astype(np.float32)  # 1: unscaled, 0: divided by the whole factor
    return ((1 - keep) * frequencies / np.float32(scaling.factor) + keep * frequencies).astype(np.float32)


def _yarn_ramp(theta: float, scaling: RopeScaling, rotary_dim: int) -> Array:
    """1 up to the dimension that turns `beta_fast` times in the original context, 0 from `beta_slow` turns on."""

    def dimension(turns: float) -> float:
        wavelengths = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * natural_log(wavelengths) / (2 * natural_log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return 1 - (np.arange(rotary_dim // 2, dtype=np.float32) - low) / (high - low)
