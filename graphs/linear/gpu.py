"""Products of few rows on CUDA, in Pallas for Triton. More rows than `_MOST_ROWS` go to XLA, which is faster there.

The weight is the left operand of the matrix instruction and rows are its columns, so that an element of the result is
the same sum in the same order for any number of rows, in tiles of any size (findings/gpu.md). Features that are too
few to fill the device are summed in parts, as many as the shape of the weight says, which are added in order.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from xla_engine.graphs.experts.gpu import gpu_experts
from xla_engine.graphs.experts.routing import Experts, Gather, Route
from xla_engine.graphs.linear.products import (
    Activation,
    FeatureMajor,
    Input,
    Norm,
    Term,
    Weight,
    activated,
    feature_major,
    finished,
    kept_dtype,
    looked_up,
    normed,
    rows_first,
)
from xla_engine.graphs.sharding import Sharding

_MOST_ROWS = 64
_STEP = 64  # input features that divide a part
_MOST_PARTS = 8
_BUSY = 96  # programs that fill the device well enough
_LONGEST_PART = 4096  # input features

Ref = Any  # a Pallas reference: an array in device memory inside a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProducts:
    """See `graphs.linear.products.Products`. Weights that are not in bfloat16 (routers) go to XLA, too.
    `interpret` runs the kernel as plain JAX, anywhere and slowly."""

    interpret: bool = False
    live: jax.Array | None = None
    name = "gpu"
    isa = None
    task = 1

    def for_rows(self, live: jax.Array) -> Self:
        return replace(self, live=live)

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        assert not isinstance(x, FeatureMajor)
        return finished(self._product(weight, normed(x, norm)), bias, residual)

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: Term = None,
        activation: Activation = "silu",
    ) -> jax.Array:
        both = self.linear(weight, x, norm=norm, bias=bias)
        return activated(both, activation).astype(kept_dtype(weight))

    def experts(
        self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
    ) -> jax.Array:
        return gpu_experts(experts, x, routed, residual, gather, interpret=self.interpret)

    def pack(self, weight: np.ndarray) -> np.ndarray:
        return weight

    def pack_head(self, weight: np.ndarray) -> np.ndarray:
        return weight

    def pack_scales(self, scales: np.ndarray) -> np.ndarray:
        return scales

    def head(self, weight: Weight, norm: Norm, x: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        out = self._product(weight, normed(x, norm), features_first=True)
        return out if sharding is None else sharding.gather(out, "vocabulary", axis=0)

    def embedded(self, weight: Weight, tokens: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        return looked_up(weight, tokens, sharding)

    def _product(self, weight: Weight, x: jax.Array, *, features_first: bool = False) -> jax.Array:
        """`weight [F, D]` times x `[N, D]`: float32 `[N, F]`, or `[F, N]`."""
        if len(x) > _MOST_ROWS or not isinstance(weight, jax.Array) or weight.dtype != jnp.bfloat16:
            return feature_major(weight, x) if features_first else rows_first(weight, x)
        (features, width), rows = weight.shape, len(x)
        tiles = _tiles(features, width, rows)
        shape = (features, rows) if features_first else (rows, features)
        parts: jax.Array = pl.pallas_call(
            functools.partial(product_kernel, tiles=tiles, features_first=features_first),
            grid=(pl.cdiv(features, tiles.features), tiles.parts),
            out_shape=jax.ShapeDtypeStruct((tiles.parts, *shape), jnp.float32),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=tiles.stages),
            interpret=self.interpret,
            name=product_kernel.__name__,
        )(x.astype(weight.dtype), weight)
        return functools.reduce(jnp.add, parts)


class _Tiles(NamedTuple):
    """What a program multiplies: `features` by `rows`, `step` input features at a time, of one of `parts` parts of
    them. stages: steps that are loaded ahead."""

    features: int
    rows: int
    step: int
    parts: int
    stages: int


def _tiles(features: int, width: int, rows: int) -> _Tiles:
    """Tiles for a weight `[features, width]`, as measured on an H100 (findings/gpu.md).

    The number of parts, which bits depend on, follows from the weight's shape alone.
    """
    parts = _parts(features, width)
    step = 128 if (width // parts) % 128 == 0 else _STEP
    columns = max(16, 1 << (rows - 1).bit_length())
    if columns > 16 and step == 128 and pl.cdiv(features, 128) * parts >= 128:
        return _Tiles(128, columns, step, parts, stages=3)
    return _Tiles(64, columns, step, parts, stages=5)


def _parts(features: int, width: int) -> int:
    """The fewest parts of whole steps that keep a device busy and are short."""
    tiles, steps = pl.cdiv(features, 64), width // _STEP
    whole = [each for each in range(1, _MOST_PARTS + 1) if width % (_STEP * each) == 0]
    enough = (each for each in whole if tiles * each >= _BUSY and steps // each * _STEP <= _LONGEST_PART)
    return next(enough, whole[-1] if whole else 1)


def product_kernel(
    x_ref: Ref,  # [N, D]
    weight_ref: Ref,  # [F, D]
    out_ref: Ref,  # [J, N, F] or [J, F, N] float32
    *,
    tiles: _Tiles,
    features_first: bool,
) -> None:
    """A tile of features of all rows, of one part of the input features."""
    (rows, width), features = x_ref.shape, len(weight_ref)
    feature = pl.program_id(0) * tiles.features + jnp.arange(tiles.features)
    row, part, span = jnp.arange(tiles.rows), pl.program_id(1), pl.cdiv(width, tiles.parts)

    def add(step: jax.Array, total: jax.Array) -> jax.Array:
        column = part * span + step * tiles.step + jnp.arange(tiles.step)
        inside = None if width % _STEP == 0 else (column < width)[None]
        weight = _load(weight_ref, (feature[:, None], column[None]), features, inside)
        x = _load(x_ref, (row[:, None], column[None]), rows, inside)
        return total + jnp.dot(weight, x.T, preferred_element_type=jnp.float32)

    nothing = jnp.zeros((tiles.features, tiles.rows), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(span, tiles.step), add, nothing)
    at = (feature[:, None], row[None]) if features_first else (row[None], feature[:, None])
    whole = rows == tiles.rows and features % tiles.features == 0
    mask = None if whole else (row < rows)[None] & (feature < features)[:, None]
    plgpu.store(out_ref.at[(part, *at)], total, mask=mask)


def _load(ref: Ref, at: tuple[jax.Array, jax.Array], size: int, inside: jax.Array | None) -> jax.Array:
    """Zero where the first index is not below `size`, and where not `inside`."""
    mask = None if size % len(at[0]) == 0 else at[0] < size
    if inside is not None:
        mask = inside if mask is None else mask & inside
    if mask is None:
        return plgpu.load(ref.at[at])
    shape = jnp.broadcast_shapes(at[0].shape, at[1].shape)
    return plgpu.load(ref.at[at], mask=jnp.broadcast_to(mask, shape), other=0.0)
