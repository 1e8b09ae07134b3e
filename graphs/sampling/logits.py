"""How logits lie."""

from __future__ import annotations

from typing import NamedTuple

import jax


class ByRow(NamedTuple):
    """Logits `[N, V]`, as C++ products give them; those of XLA's are vocabulary-major, `[V, N]`."""

    values: jax.Array


Logits = jax.Array | ByRow
