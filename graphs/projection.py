"""Linear projections: the one place that knows which operand order is fast.

Weights stay `[F, D]` as in the checkpoint. XLA:CPU re-packs the right operand of a product on every call and
keeps the left one, so with few rows the weight must be the left operand; with many rows the activations are.
Both operands have the weight's dtype and the result is float32: a mixed product is upcast as a whole on CPU.

The order is chosen per graph, never per call: the two need not agree in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# (weight [F, D], x [N, D]) -> float32 [N, F]
Project = Callable[[jax.Array, jax.Array], jax.Array]


def weight_left(weight: jax.Array, x: jax.Array) -> jax.Array:
    """For decode steps: as fast as the weight can be read, up to some 64 rows.

    The barrier keeps the transpose out of the product, which would fall off the fast path (findings/002).
    """
    return lax.optimization_barrier(feature_major(weight, x)).T


def rows_left(weight: jax.Array, x: jax.Array) -> jax.Array:
    """For prefill chunks: faster from some 128 rows on."""
    return _product(x.astype(weight.dtype), weight)


def feature_major(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight [F, D]` times `x [N, D]` transposed: float32 `[F, N]`, the order the weight-left product yields."""
    return _product(weight, x.astype(weight.dtype))


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Contract the last axis of both: `[M, K] x [N, K] -> [M, N]` in float32."""
    # HIGHEST only matters for float32 operands: it forbids TF32 on GPUs.
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
