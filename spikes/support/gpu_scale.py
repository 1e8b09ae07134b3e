# Frozen: runs at commit 590d0eb.
"""What the GPU spikes share: shapes, programs on device-made weights, and times of calls that follow each other.

Two scales: Llama-3.1-8B on a GPU, and a rehearsal of the same code with tiny shapes and interpreted kernels on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spikes.support.timing import SMOLLM2_135M, busy_rows
from xla_engine.graphs.attention.backend import Attention
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_tables
from xla_engine.graphs.steps.decode import decode_step

LLAMA_3_1_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    rope_theta=500000.0,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of a run.

    model, small: timed in full; few: `model` with few layers, for parts and comparisons.
    live: (rows of the graph, live rows) per roofline line; context: keys of a live row; positions: of a slot.
    contexts: key lengths of the attention sweep; chunks: (lanes, tokens) of the prefill sweep.
    calls per round, rounds: of every timing.
    """

    model: ModelConfig
    small: ModelConfig
    few: int
    live: tuple[tuple[int, int], ...]
    context: int
    positions: int
    contexts: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    calls: int
    rounds: int
    attention: GpuAttention

    @property
    def shallow(self) -> ModelConfig:
        return dataclasses.replace(self.model, num_hidden_layers=self.few)

    @property
    def most_rows(self) -> int:
        return self.live[-1][0]


REAL = Scale(
    model=LLAMA_3_1_8B,
    small=SMOLLM2_135M,
    few=4,
    live=((8, 1), (8, 8), (16, 16), (32, 32), (64, 64)),
    context=1000,
    positions=2048,
    contexts=(512, 2048, 8192),
    chunks=((1, 256), (1, 512), (2, 256), (1, 1024), (8, 256)),
    calls=20,
    rounds=5,
    attention=GpuAttention(),
)
_TINY = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
REHEARSAL = Scale(
    model=_TINY,
    small=dataclasses.replace(_TINY, num_hidden_layers=1),
    few=1,
    live=((8, 1), (8, 8)),
    context=100,
    positions=256,
    contexts=(256,),
    chunks=((1, 16), (2, 16)),
    calls=2,
    rounds=1,
    attention=GpuAttention(interpret=True),
)


def spec_of(config: ModelConfig, attention: Attention) -> ModelSpec:
    return ModelSpec(config, jnp.dtype(jnp.bfloat16), attention)


def device_weights(spec: ModelSpec) -> list[jax.Array]:
    """Norms 1, matrices normal with standard deviation 0.02, made on the device."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    keys = jax.random.split(jax.random.key(0), len(spec.leaves))
    return [
        jnp.ones(leaf.shape, leaf.dtype) if len(leaf.shape) == 1 else normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, spec.leaves, strict=True)
    ]


class Programs:
    """Programs over one cache and one set of weights, compiled together in threads.

    `function(weights, rope, cache, rows, scheduled, tables)` returns a cache first. Rows are given anew, so every call
    is the same work. `live` rows, evenly spread, hold `length` keys.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: list[jax.Array],
        functions: Mapping[str, Callable[..., Any]],
        *,
        rows: int,
        live: int,
        length: int,
        positions: int,
    ) -> None:
        self.weights = weights
        self.cache = make_cache(spec, rows, positions)
        self.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))
        self.rope = jax.device_put(rope_tables(spec.config, positions))
        self.rows = busy_rows(spec.config, rows, length)
        self.scheduled = jnp.asarray(np.arange(rows) % (rows // live) == 0)
        self.tables = jax.device_put(make_tables(rows, spec.config.vocab_size))
        self._inventory = Inventory()
        arguments = (self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables)
        self._inventory.compile(
            [
                Program(name=name, function=function, arguments=arguments, donate=(2,))
                for name, function in functions.items()
            ],
            threads=8,
        )

    def run(self, name: str) -> Any:
        """Dispatch once; what the program returns behind the cache."""
        self.cache, *rest = self._inventory(
            name, self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables
        )
        return rest

    @property
    def reports(self) -> dict[str, GraphReport]:
        return {report.name: report for report in self._inventory}

    def close(self) -> None:
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()
        self._inventory.clear()


def step_of(spec: ModelSpec, positions: int) -> Callable[..., Any]:
    return functools.partial(decode_step, spec, positions)


def milliseconds(scale: Scale, run: Callable[[], Any], *, each: bool = False) -> float:
    """Per call: calls dispatched one after the other and waited for once, or `each` waited for; median of rounds."""
    jax.block_until_ready(run())
    found = []
    for _ in range(scale.rounds):
        began = time.perf_counter()
        for _ in range(scale.calls):
            last = run()
            if each:
                jax.block_until_ready(last)
        jax.block_until_ready(last)
        found.append((time.perf_counter() - began) / scale.calls)
    return 1e3 * statistics.median(found)


def timed(scale: Scale, function: Callable[..., Any], *arguments: Any) -> float:
    """Milliseconds per call of a jitted function; arguments stay where they are."""
    compiled = jax.jit(function).lower(*arguments).compile()
    return milliseconds(scale, lambda: compiled(*arguments))


@functools.cache
def read_gigabytes_per_second(scale: Scale) -> float:
    """The memory ceiling for what only reads, as a decode step does: the largest of a big array."""
    size = (1 << 30) if scale is REAL else 1 << 20
    values = jnp.ones(size, jnp.bfloat16)
    found = values.nbytes / timed(scale, jnp.max, values) / 1e6
    values.delete()
    return found


def model_bytes(config: ModelConfig, live: int, context: int) -> tuple[int, int]:
    """Bytes a decode step reads at least: weights but the embedding table, and the keys and values of live rows."""
    c = config
    layer = c.hidden_size * (c.qkv_features + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
    weights = 2 * (c.num_hidden_layers * layer + c.vocab_size * c.hidden_size)
    return weights, 4 * c.num_hidden_layers * live * context * c.num_key_value_heads * c.head_dim
