# Frozen: runs at commit 60b1f13.
"""Fair timing for spikes: variants take turns, so that a noisy minute harms all of them alike.

Also the model whose steps are timed: SmolLM2-135M shapes with random weights. Spikes are modules, run from
the repository root with or without the packages installed:

    python -m spikes.001_kv_write
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.bench import models
from xla_engine.bench.card import markdown_table as markdown_table
from xla_engine.bench.limits import describe_machine as machine_words
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import GraphReport, Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.reductions import argmax
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Rows, SamplingRows, make_rows, make_tables
from xla_engine.graphs.sampling import logprobs
from xla_engine.graphs.sampling import sampler as sampling
from xla_engine.graphs.steps import sample_rows
from xla_engine.graphs.steps.decode import decode_step

SMOLLM2_135M = dataclasses.replace(models.SMOLLM2_135M, max_position_embeddings=8192)


@dataclass(frozen=True, slots=True)
class Times:
    """Wall seconds of one variant, one value per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        return min(self.seconds)

    @property
    def most(self) -> float:
        return max(self.seconds)

    def milliseconds(self, digits: int = 1) -> str:
        """`median (least-most)` in milliseconds."""
        low, middle, high = (1e3 * value for value in (self.least, self.median, self.most))
        return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def interleave(
    variants: Mapping[str, Callable[[], object]], rounds: int, *, warm_up: int = 1
) -> dict[str, Times]:
    """Time every variant once per round, A B A B, after `warm_up` rounds that do not count.

    A variant blocks until its work is done (`jax.block_until_ready`). Every other round runs backwards, so
    that no variant always follows the same neighbour.
    """
    for _ in range(warm_up):
        for run in variants.values():
            run()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            began = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - began)
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def describe_machine() -> str:
    """What a finding's Setting says: cores, CPU features, Python, jax version, devices."""
    devices = ", ".join(sorted({device.device_kind for device in jax.devices()}))
    return f"{machine_words()}, jax {jax.__version__}, jaxlib {version('jaxlib')}, device {devices}"


def random_weights(spec: ModelSpec, seed: int = 0) -> list[jax.Array]:
    """Leaves for `spec`: norms 1, matrices normal with standard deviation 0.04 (activations of order one)."""
    rng = np.random.default_rng(seed)

    def leaf(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, dtype)
        values = rng.standard_normal(shape, np.float32)
        values *= np.float32(0.04)
        return values.astype(dtype)

    return [jax.device_put(leaf(each.shape, each.dtype)) for each in spec.leaves]


def busy_rows(config: ModelConfig, count: int, length: int, seed: int = 0) -> Rows:
    """Every row live with `length` keys, a random token, greedy, and its log-probability wanted."""
    rng = np.random.default_rng(seed)
    rows = make_rows(count, 4, length + 1)
    return dataclasses.replace(
        rows,
        token=jnp.asarray(rng.integers(0, config.vocab_size, count), jnp.int32),
        length=jnp.full(count, length, jnp.int32),
        remaining=jnp.full(count, 1 << 20, jnp.int32),
        sampling=dataclasses.replace(rows.sampling, num_logprobs=jnp.zeros(count, jnp.int32)),
    )


def token_logprob(logits: jax.Array, token: jax.Array) -> jax.Array:
    """Log-probability of `token [N]` under `logits [V, N]`, f32 `[N]`: as the sampler's, whatever rows want."""
    peak, rest = logprobs._normaliser(logits)
    return logprobs._chosen(logits, token) - peak - rest


def greedy(logits: jax.Array, rows: SamplingRows, *_: Any, **__: Any) -> sampling.Sampled:
    """`graphs.sampling.sampler.sample` for greedy rows."""
    token = argmax(logits)
    return sampling.Sampled(token, token_logprob(logits, token), jnp.zeros((1, len(token)), jnp.int32))


class DecodeStep:
    """One compiled form of the decode step with a cache of its own; a call runs it and waits for its samples.

    Rows are not donated, so every call is the same step: `length` keys per row, bucket `key_length`. Of the
    sampler only what greedy rows with log-probabilities run is kept; the rest takes compile time and memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Any,
        *,
        rows: int,
        length: int,
        key_length: int,
        positions: int,
        cache: Any = None,
        function: Callable[..., tuple[Any, Rows, jax.Array, jax.Array]] = decode_step,
    ) -> None:
        self.weights = weights
        self.cache: KVCache = cache or make_cache(spec, rows, positions)
        self.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))
        self.rope = jax.device_put(rope_tables(spec.config, positions))
        self.rows = busy_rows(spec.config, rows, length)
        self.scheduled = jnp.ones(rows, bool)
        self.tables = jax.device_put(make_tables(rows, spec.config.vocab_size))
        self._inventory = Inventory()
        program = Program(
            name="step",
            function=functools.partial(function, spec, key_length),
            arguments=(self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables),
            donate=(2,),
        )
        with mock.patch.object(sample_rows, "sample", greedy):
            self._inventory.compile([program])
        self.report: GraphReport = next(iter(self._inventory))

    def __call__(self) -> jax.Array:
        """One step; packed samples `[2, B]`."""
        samples: jax.Array
        self.cache, _, samples, _ = self._inventory(
            "step", self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables
        )
        return samples.block_until_ready()

    @property
    def text(self) -> str:
        """Optimised HLO."""
        return self._inventory.text("step")
