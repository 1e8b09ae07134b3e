"""Short gated convolutions (LFM2, arXiv 2511.23404): gates before and behind the convolution, no memory."""

import jax
import jax.numpy as jnp

from xla_engine.graphs.recurrent.kind import Kind, Others, RecurrentWeights
from xla_engine.graphs.recurrent_forms import Recurrent


def _split(_: Recurrent, projected: jax.Array) -> tuple[jax.Array, Others]:
    """The gated inputs of the convolution; then the gates of its outputs."""
    before, behind, x = jnp.split(projected, 3, axis=-1)
    return before * x, (behind,)


def _no_heads(_: Recurrent, weights: RecurrentWeights, convolved: jax.Array, others: Others) -> None:
    return None


def _output(
    _: Recurrent, weights: RecurrentWeights, convolved: jax.Array, out: jax.Array | None, others: Others
) -> jax.Array:
    return others[0] * convolved


KIND = Kind(_split, _no_heads, _output)
