# Frozen: runs at commit a8802fc.
"""Where does the time of a decode step go, on the device and on the host?

Device: parts of the step on SmolLM2-135M's shape, each a compiled program of its own, at a key bucket of 256.
Host: the verbs of the engine's loop around the embedded model.

    python -m spikes.006_step_breakdown
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier as barrier

from spikes.support.timing import Times, describe_machine, interleave, markdown_table
from xla_engine.bench.limits import read_bandwidth
from xla_engine.bench.models import SMOLLM2_135M
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.attention import xla as attention_xla
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.linear.products import WEIGHT_LEFT, feature_major
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops.norms import apply_rope, split_heads
from xla_engine.graphs.ops.reductions import argmax
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows, make_tables
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.model_loader.checkpoint import random_weights
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS, SamplingParams

KEYS = 256
LENGTH = 200  # of every row
CALLS = 5  # per round; each is waited for
CONFIG = SMOLLM2_135M
SPEC = ModelSpec(CONFIG, jnp.dtype(jnp.bfloat16))

Arrays = dict[str, Any]
Part = Callable[[Arrays], Any]


# %%
def _hidden(
    arrays: Arrays, attend: Callable[[KVCache, jax.Array, int, jax.Array], Any]
) -> tuple[KVCache, jax.Array]:
    """The decoder's hidden states `[B, D]` with an attention of our choice."""
    rows, cache = arrays["rows"], list(arrays["cache"])
    model = SPEC.merge(arrays["weights"])
    angles = arrays["rope"][0, rows.length]
    hidden = model.hidden(rows.token, functools.partial(attend, cache, angles), WEIGHT_LEFT)
    return cache, hidden


def _attend(cache: KVCache, rope: jax.Array, index: int, qkv: jax.Array, own: AttentionWeights) -> jax.Array:
    live = jnp.ones(qkv.shape[0], bool)
    length = jnp.full(qkv.shape[0], LENGTH, jnp.int32)
    call = AttentionCall(CONFIG.attention(index), own, rope, KEYS, SPEC.dtype)
    cache[index], out = SPEC.attention.attend_decode(cache[index], qkv, call, length=length, live=live)
    return out


def _write_only(
    cache: KVCache, rope: jax.Array, index: int, qkv: jax.Array, own: AttentionWeights
) -> jax.Array:
    q, k, v = _rotated(qkv, rope)
    row, length = jnp.arange(q.shape[0]), jnp.full(q.shape[0], LENGTH, jnp.int32)

    def put(buffer: jax.Array, new: jax.Array) -> jax.Array:
        return attention_xla._scatter(buffer, new, row, length, length >= 0, None)

    cache[index] = LayerCache(put(cache[index].keys, k), put(cache[index].values, v))
    return q.reshape(q.shape[0], -1)


def _nothing(cache: KVCache, rope: jax.Array, index: int, qkv: jax.Array, own: AttentionWeights) -> jax.Array:
    q, k, v = _rotated(qkv, rope)
    groups = q.shape[1] // k.shape[1]
    return (q + jnp.tile(k + v, (1, groups, 1))).reshape(q.shape[0], -1)


def _rotated(qkv: jax.Array, rope: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = split_heads(qkv, CONFIG.num_key_value_heads, CONFIG.head_dim)
    return apply_rope(q, rope), apply_rope(k, rope), v


def full_step(arrays: Arrays) -> Any:
    return decode_step(
        SPEC, KEYS, *(arrays[name] for name in ("weights", "rope", "cache", "rows", "live", "tables"))
    )


def without_sampling(arrays: Arrays) -> Any:
    cache, hidden = _hidden(arrays, _attend)
    return cache, SPEC.merge(arrays["weights"]).logits(hidden, WEIGHT_LEFT)


def without_head(arrays: Arrays) -> Any:
    return _hidden(arrays, _attend)


def layers_with_write(arrays: Arrays) -> Any:
    return _hidden(arrays, _write_only)


def layers_without_attention(arrays: Arrays) -> Any:
    return _hidden(arrays, _nothing)


def projections_only(arrays: Arrays) -> Any:
    """The four products of each layer, one after the other: a number of each enters the next one's input."""
    widths = (CONFIG.hidden_size, CONFIG.intermediate_size)
    inputs = {width: jnp.tile(arrays["hidden"][:, :1], (1, width)) for width in widths}
    last = jnp.zeros((1, 1), jnp.float32)
    for layer in SPEC.merge(arrays["weights"]).layers:
        for weight in (layer.qkv[...], layer.output[...], layer.gate_up[...], layer.down[...]):
            last = barrier(feature_major(weight, inputs[weight.shape[1]] + last))[:1, :1]
    return arrays["cache"], last


def head_only(arrays: Arrays) -> Any:
    return arrays["cache"], SPEC.merge(arrays["weights"]).logits(arrays["hidden"], WEIGHT_LEFT)


def argmax_only(arrays: Arrays) -> Any:
    return arrays["cache"], argmax(arrays["logits"])


def empty_program(arrays: Arrays) -> Any:
    """As many buffers as the step has, nothing to compute."""
    return arrays["cache"], arrays["rows"].length + 1


PARTS: dict[str, Part] = {
    "full step": full_step,
    "without sampling": without_sampling,
    "without head and sampling": without_head,
    "layers, KV write, no attention": layers_with_write,
    "layers, neither": layers_without_attention,
    "projections of the layers": projections_only,
    "head": head_only,
    "argmax": argmax_only,
    "empty program, same buffers": empty_program,
}


# %%
class Device:
    """Arrays of one batch size; every program takes all of them and donates the cache."""

    def __init__(self, batch: int) -> None:
        idle = make_rows(batch, MAX_STOP_TOKEN_IDS, KEYS)
        self.arrays: Arrays = {
            "weights": jax.device_put(SPEC.flatten(random_weights(CONFIG, dtype="bfloat16"))),
            "rope": jax.device_put(rope_tables(CONFIG, KEYS)),
            "rows": dataclasses.replace(
                idle,
                token=jnp.arange(batch, dtype=jnp.int32),
                length=jnp.full(batch, LENGTH, jnp.int32),
                remaining=jnp.full(batch, KEYS, jnp.int32),
            ),
            "tables": jax.device_put(make_tables(batch, CONFIG.vocab_size)),
            "live": jnp.ones(batch, bool),
            "hidden": jnp.ones((batch, CONFIG.hidden_size), jnp.float32),
            "logits": jax.random.normal(jax.random.key(0), (CONFIG.vocab_size, batch), jnp.float32),
        }
        self.cache = make_cache(SPEC, batch, KEYS)
        self.kv_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def program(self, part: Part, *, ahead: bool = False) -> Callable[[], None]:
        """Run `part` CALLS times; `ahead` dispatches all before waiting, as the engine's lag does."""

        def call(cache: KVCache, rest: Arrays) -> Any:
            return part({**rest, "cache": cache})

        lowered = jax.jit(call, donate_argnums=0, keep_unused=True).lower(self.cache, self.arrays)
        compiled = lowered.compile()

        def run() -> None:
            for _ in range(CALLS):
                self.cache, *outputs = compiled(self.cache, self.arrays)
                if not ahead:
                    jax.block_until_ready((self.cache, outputs))
            jax.block_until_ready((self.cache, outputs))

        return run


def measure_device(batch: int, rounds: int) -> tuple[dict[str, float], dict[str, Times], float]:
    """Median ms of each part per call, the raw times, and the megabytes the step must read."""
    device = Device(batch)
    programs = {name: device.program(part) for name, part in PARTS.items()}
    programs["full step, dispatched ahead"] = device.program(full_step, ahead=True)
    times = interleave(programs, rounds, warm_up=2)
    weights = sum(leaf.nbytes for leaf in device.arrays["weights"])
    return (
        {name: 1e3 * found.median / CALLS for name, found in times.items()},
        {name: Times(tuple(value / CALLS for value in found.seconds)) for name, found in times.items()},
        (weights + device.kv_bytes) / 1e6,
    )


def attribute(ms: dict[str, float]) -> dict[str, float]:
    """Differences between programs that differ by one part. They need not add up: XLA fuses across the seams."""
    return {
        "projections of the layers": ms["projections of the layers"],
        "norms, rope, SwiGLU, residuals": ms["layers, neither"] - ms["projections of the layers"],
        "KV write": ms["layers, KV write, no attention"] - ms["layers, neither"],
        "attention": ms["without head and sampling"] - ms["layers, KV write, no attention"],
        "head": ms["without sampling"] - ms["without head and sampling"],
        "sampling and row state": ms["full step"] - ms["without sampling"],
    }


# %%
class Verbs:
    """Seconds spent in each verb of the loop, turn by turn, while nothing is prefilled."""

    def __init__(self, engine: XlaBatchEngine) -> None:
        self.turns: list[dict[str, float]] = []
        self._turn: dict[str, float] = {}
        self._engine = engine
        for owner, method, name in (
            (engine.scheduler, "plan", "plan"),
            (engine.runner, "start", "start"),
            (engine.runner, "wait", "wait"),
            (engine.scheduler, "commit", "commit"),
            (engine, "_deliver", "deliver, detokenise"),
        ):
            setattr(owner, method, self._timed(name, getattr(owner, method)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = method(*arguments)
            self._turn[name] = self._turn.get(name, 0.0) + time.perf_counter() - began
            return result

        return timed

    def step(self) -> None:
        """One turn of the engine; kept when it was a steady one."""
        before = self._engine.stats()
        self._turn = {}
        began = time.perf_counter()
        outputs = self._engine.step(only_finished=True)
        self._turn["whole turn"] = time.perf_counter() - began
        after = self._engine.stats()
        steady = after.generation_tokens - before.generation_tokens == self._engine.max_num_seqs
        if steady and not outputs and after.prefill_calls == before.prefill_calls:
            self.turns.append(self._turn)


def measure_host(lag: int, tokens: int) -> dict[str, float]:
    """Median microseconds of each verb with 16 rows of the embedded model decoding."""
    config = EngineConfig(max_num_seqs=16, max_model_len=256, lag=lag, compile_cache=False)
    with XlaBatchEngine.from_pretrained(config=config) as engine:
        verbs = Verbs(engine)
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for index in range(2 * engine.max_num_seqs):
            engine.submit(f"def function_{index}(a, b):", params)
        while engine.has_unfinished:
            verbs.step()
    names = list(verbs.turns[0])
    medians = {name: 1e6 * statistics.median(turn[name] for turn in verbs.turns) for name in names}
    host = sum(medians[name] for name in names if name not in ("wait", "whole turn"))
    return {**medians, "host, without wait": host}


# %%
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=200, help="generated per request in the host part")
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    bandwidth = read_bandwidth(threads)
    found = {batch: measure_device(batch, arguments.rounds) for batch in arguments.batches}
    bandwidth = max(bandwidth, read_bandwidth(threads))
    print(f"{describe_machine()}; read bandwidth {bandwidth:.1f} GB/s on {threads} threads")
    floors = {batch: megabytes / bandwidth for batch, (_, _, megabytes) in found.items()}
    columns = [f"B = {batch}" for batch in arguments.batches]

    print("\nPrograms, ms per call, median (least-most):\n")
    names = list(next(iter(found.values()))[1])
    rows = [[name, *(times[name].milliseconds(2) for _, times, _ in found.values())] for name in names]
    rows.append(["floor: weights and KV once", *(f"{floors[batch]:.2f}" for batch in found)])
    print(markdown_table(["program", *columns], rows))

    print("\nWhere the step goes, ms and share of the step:\n")
    parts = {batch: attribute(ms) for batch, (ms, _, _) in found.items()}
    rows = [
        [name, *(f"{parts[b][name]:.2f} ({parts[b][name] / found[b][0]['full step']:.0%})" for b in found)]
        for name in next(iter(parts.values()))
    ]
    rows.append(["full step", *(f"{ms['full step']:.2f}" for ms, _, _ in found.values())])
    rows.append(["floor / full step", *(f"{floors[b] / found[b][0]['full step']:.0%}" for b in found)])
    print(markdown_table(["part", *columns], rows))

    print("\nThe host, 16 rows of the embedded model, median microseconds per turn:\n")
    hosts = [measure_host(lag, arguments.tokens) for lag in (0, 1)]
    rows = [[name, *(f"{host[name]:.0f}" for host in hosts)] for name in hosts[0]]
    print(markdown_table(["verb", "lag 0", "lag 1"], rows))


if __name__ == "__main__":
    main()
