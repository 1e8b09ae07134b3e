"""Logits in, samples out: the two layouts of logits, and the sampler's output with its packed form for the host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.row_state.limits import MAX_LOGPROBS


class ByRow(NamedTuple):
    """Logits `[N, V]`, as the C++ products return them; XLA's are vocabulary-major, `[V, N]`."""

    values: jax.Array


Logits = jax.Array | ByRow


COLUMNS: dict[str, type[np.generic]] = {"token": np.int32, "logprob": np.float32}
"""The fields of `Sampled` with one four-byte value per row. They are packed together."""


class Sampled(NamedTuple):
    """One token per row. token: i32 `[N]`. logprob: f32 `[N]`. top: i32, see `graphs.sampling.logprobs.logprobs`."""

    token: jax.Array
    logprob: jax.Array
    top: jax.Array

    def packed(self) -> jax.Array:
        """The columns as one i32 `[len(COLUMNS), N]`."""
        columns: list[jax.Array] = [getattr(self, name) for name in COLUMNS]
        return jnp.stack([each if each.dtype == jnp.int32 else each.view(jnp.int32) for each in columns])


def shapes(count: int) -> Sampled:
    """Shapes and dtypes for `count` rows."""
    columns: Any = {name: jax.ShapeDtypeStruct((count,), dtype) for name, dtype in COLUMNS.items()}
    return Sampled(**columns, top=jax.ShapeDtypeStruct((1 + 2 * MAX_LOGPROBS, count), jnp.int32))  # type: ignore[arg-type]


def unpack_samples(packed: np.ndarray) -> dict[str, np.ndarray]:
    """Unpack `Sampled.packed` on the host: `[N]` each, by name.

    A token may be NO_CHOICE, or -1 if the row did not run.
    """
    return {name: column.view(dtype) for column, (name, dtype) in zip(packed, COLUMNS.items(), strict=True)}
