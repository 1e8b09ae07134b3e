"""The two layouts of logits."""

from typing import NamedTuple

import jax


class ByRow(NamedTuple):
    """Logits `[N, V]`, as the C++ products return them; XLA's are vocabulary-major, `[V, N]`."""

    values: jax.Array


Logits = jax.Array | ByRow
