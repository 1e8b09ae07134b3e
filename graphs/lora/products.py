"""Products in which each row may have its own LoRA adapter (Hu et al. 2021; in one batch: Chen et al. 2023).

For a row with an adapter, B (A x) is added in float32, x being the input of the product. A row without one keeps every
bit of the product. The result of a row depends only on the row: in C++ (`native/lora.h`) each sum has a fixed order,
and XLA's products, which are here, process each lane separately.
"""

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.lora.form import Matrices


def with_added(
    out: jax.Array, rows: jax.Array, adapter: jax.Array, matrices: Matrices, *, features_first: bool
) -> jax.Array:
    """A product `out [N, F]`, or `[F, N]`, plus what the adapters make of its input `rows [N, D]`.

    adapter: i32 `[G]`, the adapter slot of each lane of rows, from 1; 0 is none.
    """
    lanes = lax.optimization_barrier(rows.astype(jnp.float32)).reshape(len(adapter), -1, rows.shape[1])
    at = jnp.maximum(adapter - 1, 0)
    down, up = (each[at].astype(jnp.float32) for each in (matrices.down, matrices.up))
    hidden = _product("gtk,gprk->gptr", lanes, down)
    parts = [
        _product("gtr,grf->gtf", hidden[:, part], up[:, :, begin:end])
        for part, (begin, end) in enumerate(zip((0, *matrices.ends), matrices.ends, strict=False))
    ]
    more = lax.optimization_barrier(jnp.concatenate(parts, axis=2).reshape(len(rows), -1))
    out = lax.optimization_barrier(out)
    adapted = jnp.repeat(adapter > 0, lanes.shape[1])
    if features_first:
        return jnp.where(adapted, out + more.T, out)
    return jnp.where(adapted[:, None], out + more, out)


def _product(form: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(form, left, right, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
