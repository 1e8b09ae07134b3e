"""What differs between the steps that run a model."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from xla_engine.graphs.attention.backend import AttentionWeights
from xla_engine.graphs.linear.products import Products
from xla_engine.graphs.recurrent.kind import RecurrentWeights

# (layer index, fused projection [N, (H + 2 KV) Dh] float32 before rotation, weights of attention) -> [N, H Dh]
# For a recurrent layer: (layer index, [N, projected features], its weights) -> [N, inner features]
Attend = Callable[[int, jax.Array, AttentionWeights | RecurrentWeights], jax.Array]


@dataclass(frozen=True, slots=True)
class Call:
    """What a step gives to the layers.

    attend: knows positions and owns the cache. It rotates q and k, stores k and v, and returns the attention output.
    products: in the form that suits the graph; rows that are not `products.live` are arbitrary.
    read: the rows `[N]` that are read after the last layer; None: all.
    inputs: the tokens' embeddings for each layer, `[N, layers, P]`, if the model has them.
    """

    attend: Attend
    products: Products
    read: jax.Array | None = None
    inputs: jax.Array | None = None
