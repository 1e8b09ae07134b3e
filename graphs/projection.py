"""Linear projections: the one place that knows which operand order is fast.

Weights stay `[F, D]` as in the checkpoint. XLA:CPU re-packs the right operand of a product on every call and
keeps the left one, so with few rows the weight must be the left operand; with many rows the activations are.
Both operands have the weight's dtype and the result is float32: a mixed product is upcast as a whole on CPU.
The barrier keeps the transpose out of the product, which would fall off the fast path (findings/002).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

ROWS_ON_THE_LEFT = 128  # from this many rows on, activations are the left operand on CPU


def project(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`x [N, D]` times `weight [F, D]` transposed: float32 `[N, F]`."""
    if x.shape[0] >= ROWS_ON_THE_LEFT:
        return _product(x.astype(weight.dtype), weight)
    return lax.optimization_barrier(project_feature_major(weight, x)).T


def project_feature_major(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight [F, D]` times `x [N, D]` transposed: float32 `[F, N]`, the order the weight-left product yields."""
    return _product(weight, x.astype(weight.dtype))


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """Contract the last axis of both: `[M, K] x [N, K] -> [M, N]` in float32."""
    # HIGHEST only matters for float32 operands: it forbids TF32 on GPUs.
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
