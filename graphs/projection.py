"""Linear projections: the one place that knows which operand order is fast.

Weights stay `[F, D]` as in the checkpoint. XLA:CPU re-packs the right operand of a product on every call and
keeps the left one, so with few rows the weight must be the left operand; with many rows the activations are.
Both operands have the weight's dtype and the result is float32: a mixed product is upcast as a whole on CPU.

The order is chosen per graph, never per call: the two need not agree in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from graphs.layers import rms_norm


class Products(Protocol):
    """The products of a decoder with what stands before and behind them. x and residual are float32 `[N, D]`.

    A row's result is a function of that row, to the bit: law 1 rests on it.
    """

    def normed(self, weight: jax.Array, norm: jax.Array, eps: float, x: jax.Array) -> jax.Array:
        """`weight [F, D]` times `rms_norm(x)`: `[N, F]`."""
        ...

    def added(self, weight: jax.Array, x: jax.Array, residual: jax.Array) -> jax.Array:
        """`residual` plus `weight [D, F]` times `x [N, F]`: `[N, D]`."""
        ...

    def gated(
        self, gate_up: jax.Array, down: jax.Array, norm: jax.Array, eps: float, x: jax.Array
    ) -> jax.Array:
        """x plus the gated MLP of `rms_norm(x)`: gate and up `[2 F, D]`, down `[D, F]` -> `[N, D]`."""
        ...

    def head(self, weight: jax.Array, norm: jax.Array, eps: float, x: jax.Array) -> jax.Array:
        """`weight [V, D]` times `rms_norm(x)`, vocabulary-major: `[V, N]`."""
        ...


class Projection(NamedTuple):
    """Products by XLA, in one operand order for a whole graph.

    linear: weight `[F, D]`, x `[N, D]` -> `[N, F]`.
    gated_mlp: gate and up `[2 F, D]`, down `[D, F]`, x `[N, D]` -> `down(silu(gate(x)) * up(x))` `[N, D]` (SwiGLU,
        Shazeer 2020).
    All results float32.
    """

    linear: Callable[[jax.Array, jax.Array], jax.Array]
    gated_mlp: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

    def normed(self, weight: jax.Array, norm: jax.Array, eps: float, x: jax.Array) -> jax.Array:
        return self.linear(weight, rms_norm(x, norm, eps))

    def added(self, weight: jax.Array, x: jax.Array, residual: jax.Array) -> jax.Array:
        return residual + self.linear(weight, x)

    def gated(
        self, gate_up: jax.Array, down: jax.Array, norm: jax.Array, eps: float, x: jax.Array
    ) -> jax.Array:
        return x + self.gated_mlp(gate_up, down, rms_norm(x, norm, eps))

    def head(self, weight: jax.Array, norm: jax.Array, eps: float, x: jax.Array) -> jax.Array:
        return feature_major(weight, rms_norm(x, norm, eps))


def feature_major(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight [F, D]` times `x [N, D]` transposed: float32 `[F, N]`, the order the weight-left product yields."""
    return _product(weight, x.astype(weight.dtype))


def weight_left(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[N, F]` with the weight as left operand."""
    # Without the barrier XLA swaps the operands to get rid of the transpose (findings/002).
    return lax.optimization_barrier(feature_major(weight, x)).T


def weight_left_mlp(gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    """The hidden features stay feature-major between the two products: nothing of size F is transposed.

    Between them they are flat: an exponential over rows of no more than 8 entries is rounded otherwise (findings/011).
    """
    gate, up = lax.optimization_barrier(feature_major(gate_up, x).reshape(2, -1))  # [F N]
    hidden = lax.optimization_barrier((jax.nn.silu(gate) * up).astype(down.dtype)).reshape(
        -1, len(x)
    )  # [F, N]
    return lax.optimization_barrier(_product(down, hidden, right_axis=0)).T


def rows_left(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`[N, F]` with the rows as left operand."""
    return _product(x.astype(weight.dtype), weight)


def rows_left_mlp(gate_up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
    """The gated MLP, rows as left operands."""
    gate, up = jnp.split(rows_left(gate_up, x), 2, axis=-1)  # [N, F]
    return rows_left(down, jax.nn.silu(gate) * up)


WEIGHT_LEFT = Projection(
    weight_left, weight_left_mlp
)  # decode: as fast as weights can be read, to some 64 rows
ROWS_LEFT = Projection(rows_left, rows_left_mlp)  # prefill: faster from some 128 rows on


def _product(left: jax.Array, right: jax.Array, right_axis: int = 1) -> jax.Array:
    """Contract left's last axis with `right_axis` of right: `[M, K] x [N, K] -> [M, N]` in float32."""
    # HIGHEST only matters for float32 operands: it forbids TF32 on GPUs.
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left,
        right,
        (((1,), (right_axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
