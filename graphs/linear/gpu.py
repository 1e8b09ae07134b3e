"""Products on CUDA, in Pallas for Triton: the bits of a row do not depend on the number of rows.

An element of the result is one sum over the input features, in order, whatever the tile it lies in and whichever
operand is on the left (findings/gpu.md). Biases, residuals and activations are computed in the same kernel.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from xla_engine.graphs.experts.gpu import gpu_experts
from xla_engine.graphs.experts.routing import Experts, Gather, Route
from xla_engine.graphs.linear.products import (
    Activation,
    FeatureMajor,
    Input,
    Norm,
    Role,
    Term,
    Weight,
    activate,
    looked_up,
    normed,
)
from xla_engine.graphs.lora.form import Matrices
from xla_engine.graphs.ops.gpu_call import Ref, dot, kernel_call, load, store
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.sharding import Sharding

_FEW_ROWS = 64  # as many as are one tile


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProducts:
    """See `graphs.linear.products.Products`; weights are in bfloat16. `interpret` runs the kernel as plain JAX,
    anywhere and slowly."""

    interpret: bool = False
    live: jax.Array | None = None
    name = "gpu"
    isa = None
    task = 1

    def for_rows(self, live: jax.Array) -> Self:
        return replace(self, live=live)

    def with_adapters(self, adapter: jax.Array | None) -> Self:
        assert adapter is None  # engines with adapters have other products
        return self

    def of_weight(self, matrices: Matrices | None) -> Self:
        return self

    def linear(
        self, weight: Weight, x: Input, *, norm: Norm | None = None, bias: Term = None, residual: Term = None
    ) -> jax.Array:
        assert not isinstance(x, FeatureMajor)
        return self._product(weight, x, norm, bias=bias, residual=residual)

    def gated(
        self,
        weight: Weight,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        bias: Term = None,
        activation: Activation = "silu",
    ) -> jax.Array:
        return self._product(weight, x, norm, bias=bias, activation=activation)

    def experts(
        self, experts: Experts, x: jax.Array, routed: Route, residual: jax.Array, gather: Gather | None = None
    ) -> jax.Array:
        return gpu_experts(experts, x, routed, residual, gather, interpret=self.interpret)

    def pack(self, values: np.ndarray, role: Role = "linear") -> np.ndarray:
        return values

    def head(self, weight: Weight, norm: Norm, x: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        out = self._product(weight, x, norm, features_first=True)
        return out if sharding is None else sharding.gather(out, "vocabulary", axis=0)

    def embedded(self, weight: Weight, tokens: jax.Array, sharding: Sharding | None = None) -> jax.Array:
        return looked_up(weight, tokens, sharding)

    def _product(
        self,
        weight: Any,
        x: jax.Array,
        norm: Norm | None,
        *,
        bias: Term = None,
        residual: Term = None,
        activation: Activation | None = None,
        features_first: bool = False,
    ) -> jax.Array:
        """`weight [F, D]` times the norm of `x [N, D]`, with what is added to it: float32 `[N, F]`, or `[F, N]`.

        activation: of the first half of the features, which multiplies the second: `[N, F / 2]` in the weight's dtype.
        """
        assert weight.dtype == jnp.bfloat16
        if norm is None or norm.bias is not None:
            x = normed(x, norm).astype(weight.dtype)
        else:
            x = rms_norm(x, norm.weight, norm.eps, dtype=weight.dtype)
        features, rows = len(weight) // (1 if activation is None else 2), len(x)
        tiles = _tiles(features, weight.shape[1], rows, activation is not None, features_first)
        shape = (features, rows) if features_first else (rows, features)
        out: jax.Array = kernel_call(
            product_kernel,
            grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(features, tiles.features)),
            out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if activation is None else weight.dtype),
            warps=tiles.warps,
            stages=tiles.stages,
            interpret=self.interpret,
            tiles=tiles,
            features_first=features_first,
            activation=activation,
        )(x, weight, bias, residual)
        return out


class _Tiles(NamedTuple):
    """What a program multiplies: `features` by `rows`, `step` input features at a time.

    stages: steps that are loaded ahead. rows_left: rows are the left operand, not the weight.
    """

    features: int
    rows: int
    step: int
    warps: int
    stages: int
    rows_left: bool = False


def _tiles(features: int, width: int, rows: int, gated: bool, features_first: bool) -> _Tiles:
    """Tiles for a weight `[features, width]`, as measured on an H100 (findings/gpu.md). No bit depends on them."""
    if rows > _FEW_ROWS:
        if features_first:
            return _Tiles(128, 256, 64, warps=8, stages=3)
        return _Tiles(128 if gated else 256, 128, 64, warps=8, stages=3, rows_left=True)
    columns, step = max(16, 1 << (rows - 1).bit_length()), 128 if width % 128 == 0 else 64
    if gated:
        return _Tiles(128, 16, step, warps=8, stages=3) if columns == 16 else _Tiles(64, columns, 64, 4, 4)
    if columns == 16 and features < 6144:  # more programs than multiprocessors
        return _Tiles(32, 16, step, warps=4, stages=8)
    return _Tiles(64, columns, step, warps=4, stages=5)


def product_kernel(
    x_ref: Ref,  # [N, D]
    weight_ref: Ref,  # [F, D], gated [2 F, D]
    bias_ref: Ref | None,  # [F], gated [2 F]
    residual_ref: Ref | None,  # [N, F]
    out_ref: Ref,  # [N, F] or [F, N]
    *,
    tiles: _Tiles,
    features_first: bool,
    activation: Activation | None,
) -> None:
    """A tile of features of a tile of rows."""
    (rows, width), parts = x_ref.shape, 1 if activation is None else 2
    features = len(weight_ref) // parts
    row = pl.program_id(0) * tiles.rows + jnp.arange(tiles.rows)
    feature = pl.program_id(1) * tiles.features + jnp.arange(tiles.features)

    def add(step: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        column = step * tiles.step + jnp.arange(tiles.step)
        inside = None if width % tiles.step == 0 else column < width
        x = _load(x_ref, (row[:, None], column[None]), _within(row, rows), inside)

        def product(part: int) -> jax.Array:
            at = (part * features + feature[:, None], column[None])
            weight = _load(weight_ref, at, _within(feature, features), inside)
            left, right = (x, weight) if tiles.rows_left else (weight, x)
            return dot(left, right.T)

        return [total + product(part) for part, total in enumerate(sums)]

    shape = (tiles.rows, tiles.features) if tiles.rows_left else (tiles.features, tiles.rows)
    sums = lax.fori_loop(0, pl.cdiv(width, tiles.step), add, [jnp.zeros(shape, jnp.float32)] * parts)
    row, feature = (row[:, None], feature[None]) if tiles.rows_left else (row[None], feature[:, None])
    if bias_ref is not None:
        sums = [
            total + load(bias_ref, (part * features + feature,), feature < features)
            for part, total in enumerate(sums)
        ]
    total = sums[0] if activation is None else activate(sums[0], activation) * sums[1]
    whole = rows % tiles.rows == 0 and features % tiles.features == 0
    mask = None if whole else jnp.broadcast_to((row < rows) & (feature < features), shape)
    if residual_ref is not None:
        total += load(residual_ref, (row, feature), mask)
    at = (feature, row) if features_first else (row, feature)
    store(out_ref, at, total, mask)


def _within(index: jax.Array, size: int) -> jax.Array | None:
    """Which of the indices of a tile are below `size`; None: all."""
    return None if size % len(index) == 0 else index < size


def _load(
    ref: Ref, at: tuple[jax.Array, jax.Array], first: jax.Array | None, second: jax.Array | None
) -> jax.Array:
    """A tile, zero where not `first` along its first axis or not `second` along its second."""
    masks = [
        mask
        for mask in (None if first is None else first[:, None], None if second is None else second[None])
        if mask is not None
    ]
    shape = jnp.broadcast_shapes(at[0].shape, at[1].shape)
    return load(ref, at, jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None)
