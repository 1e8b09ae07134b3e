# Frozen: runs at commit 4203ea1.
"""What does an adapter cost in each product of a layer, C++ operations alone?

python -m spikes.054_lora_products
"""

# %%
from __future__ import annotations

import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import SMOLLM2_135M, describe_machine, markdown_table
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.linear.products import Norm
from xla_engine.graphs.lora.form import LoraForm, Matrices, part_ends
from xla_engine.graphs.lora.products import of_weight, with_adapters
from xla_engine.runner.backends import choose_products

ROWS, CALLS, SLOTS, RANK, USED, RUNS = 8, 8, 8, 16, 8, 400
BF16 = jnp.dtype(jnp.bfloat16)
ADAPTERS = {"none": None, "room": [0] * ROWS, "one": [1] * ROWS, "four": [1, 2, 3, 4] * 2}
draw = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(draw.standard_normal(shape, np.float32)).astype(BF16)


def least_us(products: NativeProducts, target: str, features: int, width: int) -> dict[str, float]:
    """The least time of a call by what adapters the rows have, forms in turns; each call reads weights of its own."""
    ends = part_ends(SMOLLM2_135M, target)
    weights = [jnp.asarray(products.pack(normal(features, width))) for _ in range(CALLS)]
    room = LoraForm(SLOTS, RANK, BF16, packed=True)
    down, up = normal(SLOTS, len(ends), RANK, width), normal(SLOTS, RANK, ends[-1])
    down[:, :, USED:] = up[:, USED:] = 0
    held = jnp.asarray(np.stack([room.stored(each) for each in up]))
    matrices = Matrices(jnp.asarray(down), held, jnp.full((SLOTS, len(ends)), USED, jnp.int32), ends)
    x, norm = jnp.asarray(normal(ROWS, width), jnp.float32), Norm(jnp.ones(width, jnp.float32), 1e-5)

    @jax.jit
    def run(x: jax.Array, adapter: jax.Array | None) -> list[jax.Array]:
        form = of_weight(with_adapters(products.for_rows(jnp.ones(ROWS, bool)), adapter), matrices)
        call = form.gated if target == "gate_up" else form.linear
        return [call(weight, x, norm=norm) for weight in weights]

    given = {name: None if each is None else jnp.array(each, jnp.int32) for name, each in ADAPTERS.items()}
    found = dict.fromkeys(given, math.inf)
    for _ in range(RUNS):
        for name, adapter in given.items():
            began = time.perf_counter()
            jax.block_until_ready(run(x, adapter))
            found[name] = min(found[name], (time.perf_counter() - began) / CALLS * 1e6)
    return found


# %%
products = choose_products("native", SMOLLM2_135M, BF16)
assert products is not None
print(describe_machine())
config = SMOLLM2_135M
hidden, inner, heads = (
    config.hidden_size,
    config.intermediate_size,
    config.num_attention_heads * config.head_dim,
)
shapes = {
    "qkv": (config.qkv_features, hidden),
    "output": (hidden, heads),
    "gate_up": (2 * inner, hidden),
    "down": (hidden, inner),
}
times = {target: least_us(products, target, *shape) for target, shape in shapes.items()}
rows = [[target, *(f"{each:.0f}" for each in found.values())] for target, found in times.items()]
totals = [sum(found[name] for found in times.values()) for name in ADAPTERS]
rows.append(["of the first", *(f"{total / totals[0]:.2f}" for total in totals)])
print(markdown_table([f"us a call, {ROWS} rows, rank {USED}", *ADAPTERS], rows))
