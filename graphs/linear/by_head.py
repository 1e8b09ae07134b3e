"""Products of each head with a weight of its own, as latent attention has them: one C++ call (`native/by_head.h`), or
XLA's batched product, in one operand order for all graphs."""

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.linear.native import or_nothing
from xla_engine.graphs.linear.products import Products

BY_HEAD = "xla_engine_by_head"


def by_head(products: Products, weight: jax.Array, x: jax.Array) -> jax.Array:
    """`weight [H F, D]`, of H heads, times each head's own part of `x [N, H, D]`: float32 `[N, H, F]`.

    The weight is packed as that of a layer (`Products.pack`). Rows that are not live are zeros in C++.
    """
    rows, heads, width = x.shape
    if products.isa is not None:
        result = jax.ShapeDtypeStruct((rows, len(weight)), jnp.float32)
        call = jax.ffi.ffi_call(f"{BY_HEAD}_bf16_{products.isa}", result)
        live = or_nothing(products.live, bool)
        return call(x.reshape(rows, -1), live, or_nothing(None), weight).reshape(rows, heads, -1)
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    out = lax.dot_general(
        x.astype(weight.dtype).swapaxes(0, 1),
        weight.reshape(heads, -1, width),
        (((2,), (2,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.swapaxes(0, 1)
