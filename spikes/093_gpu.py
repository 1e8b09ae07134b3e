# Frozen: runs at commit a900ae9.
"""Do the engine's programs hold the law on an NVIDIA GPU, and how near are they to what its memory can read?

For a machine with a GPU and nothing to install. Each part runs in a process of its own, within what is left of the
time; tables come last.

    python3 -m spikes.093_gpu                          # all parts
    python3 -m spikes.093_gpu --only step,bits         # these alone
    python3 -m spikes.093_gpu --rehearse               # the same code, tiny, kernels interpreted, on any CPU
"""

# %%
from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

PARTS = {
    "step": 120,
    "bits": 70,
    "products": 100,
    "parts": 60,
    "prefill": 90,
    "host": 60,
    "engine": 90,
    "widths": 110,
}
MARK = "RESULT "

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--rehearse", action="store_true")
parser.add_argument("--only", help="these parts alone, with commas between them")
parser.add_argument("--part", help="measure one part in this process")
parser.add_argument("--seconds", type=float, default=460, help="stop starting parts after this long")
parser.add_argument("--output", help="write the tables here as well")
arguments = parser.parse_known_args()[0]

Table = tuple[str, Sequence[str], list[list[str]]]


def child(name: str, limit: float) -> tuple[list[Table], str]:
    """Tables of a part, or none and the reason."""
    environment = {
        **os.environ,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-W", "ignore", __file__, "--part", name]
    if arguments.rehearse:
        environment["JAX_PLATFORMS"] = "cpu"
        command.append("--rehearse")
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        printed, reason = done.stdout, (done.stderr.strip().splitlines() or ["no message"])[-1][:400]
        if arguments.output:
            Path(f"{arguments.output}.{name}.err").write_text(done.stderr[-20000:])
    except subprocess.TimeoutExpired as error:
        printed, reason = (error.stdout or b"").decode(), f"stopped after {limit:.0f} s"
    lines = [line for line in printed.splitlines() if line.startswith(MARK)]
    finished = printed.rstrip().endswith("DONE")
    return [json.loads(line.removeprefix(MARK)) for line in lines], "" if finished else reason


def text_of(title: str, header: Sequence[str], rows: list[list[str]]) -> str:
    cells = [list(map(str, row)) for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return "\n".join(
        [f"{title}\n", lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]
    )


def main() -> None:
    began = time.monotonic()
    sections = []
    for name in arguments.only.split(",") if arguments.only else PARTS:
        left = arguments.seconds - (time.monotonic() - began)
        tables, reason = child(name, min(left, PARTS[name])) if left > 15 else ([], "no time left")
        print(f"{time.monotonic() - began:5.0f} s  {name}: {reason or 'done'}", flush=True)
        for title, header, rows in tables:
            sections.append(text_of(title, header, rows))
            print(sections[-1], flush=True)
    if arguments.output:
        Path(arguments.output).write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__" and not arguments.part:
    main()
    sys.exit()

# %% in the child
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.attention.backend import (
    KEY_SPAN,
    Attention,
    AttentionCall,
    AttentionWeights,
    LayerCache,
)
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear.gpu import GpuProducts
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, Products
from xla_engine.graphs.model.decoder import ModelSpec, parameter_shapes
from xla_engine.graphs.ops.norms import split_heads
from xla_engine.graphs.ops.reductions import argmax
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import make_rows, make_tables
from xla_engine.graphs.sampling.sampled import Sampled
from xla_engine.graphs.steps import sample_rows
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.sampling_params import SamplingParams

REHEARSAL = arguments.rehearse
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
TINY = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
)
MODEL = TINY if REHEARSAL else LLAMA_3_1_8B
FEW = dataclasses.replace(MODEL, num_hidden_layers=1 if REHEARSAL else 4)
ATTENTION, PRODUCTS = GpuAttention(interpret=REHEARSAL), GpuProducts(interpret=REHEARSAL)
CONTEXT, POSITIONS = (100, 256) if REHEARSAL else (1000, 2048)
# Rows of a graph, and of them those that are live.
LIVE = ((8, (1, 8)),) if REHEARSAL else ((8, (1, 8)), (32, (32,)), (64, (64,)))
CALLS, ROUNDS = (2, 1) if REHEARSAL else (20, 5)


def tell(title: str, header: Sequence[str], rows: list[list[str]]) -> None:
    print(MARK + json.dumps([title, list(header), rows]), flush=True)


def spec_of(
    config: ModelConfig, attention: Attention = ATTENTION, products: Products | None = PRODUCTS
) -> ModelSpec:
    return ModelSpec(config, jnp.dtype(jnp.bfloat16), attention, products)


def device_weights(spec: ModelSpec) -> list[jax.Array]:
    """Norms 1, matrices normal with standard deviation 0.02, made on the device."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)

    keys = jax.random.split(jax.random.key(0), len(spec.leaves))
    return [
        jnp.ones(leaf.shape, leaf.dtype) if len(leaf.shape) == 1 else normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, spec.leaves.values(), strict=True)
    ]


class Steps:
    """Decode programs over one cache and one set of weights. Rows are given anew, so every call is the same work."""

    def __init__(
        self, spec: ModelSpec, weights: list[jax.Array], forms: Mapping[str, Callable[..., Any]], rows: int
    ) -> None:
        self.weights, self.count = weights, rows
        self.cache = make_cache(spec, rows, POSITIONS)
        self.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))
        self.rope = jax.device_put(rope_tables(spec.config, POSITIONS))
        own = make_rows(rows, 4, POSITIONS)
        draw = np.random.default_rng(0)
        self.rows = dataclasses.replace(
            own,
            token=jnp.asarray(draw.integers(0, spec.config.vocab_size, rows), jnp.int32),
            length=jnp.full(rows, CONTEXT, jnp.int32),
            remaining=jnp.full(rows, 1 << 20, jnp.int32),
            sampling=dataclasses.replace(own.sampling, num_logprobs=jnp.zeros(rows, jnp.int32)),
        )
        self.tables = jax.device_put(make_tables(rows, spec.config.vocab_size))
        self.live(rows)
        self.inventory = Inventory()
        given = (self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables)
        self.inventory.compile(
            [
                Program(name=name, function=function, arguments=given, donate=(2,))
                for name, function in forms.items()
            ],
            threads=8,
        )

    def live(self, count: int) -> None:
        """So many rows, evenly spread, are live from now on."""
        self.scheduled = jnp.asarray(np.arange(self.count) % (self.count // count) == 0)

    def run(self, name: str) -> Any:
        """Dispatch once; what the program returns behind the cache."""
        self.cache, *rest = self.inventory(
            name, self.weights, self.rope, self.cache, self.rows, self.scheduled, self.tables
        )
        return rest

    def close(self) -> None:
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()
        self.inventory.clear()


def plain_step(spec: ModelSpec) -> Callable[..., Any]:
    return functools.partial(decode_step, spec, POSITIONS)


def milliseconds(run: Callable[[], Any], *, each: bool = False) -> float:
    """Per call: calls dispatched one after the other and waited for once, or `each` waited for; median of rounds."""
    jax.block_until_ready(run())
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(CALLS):
            last = run()
            if each:
                jax.block_until_ready(last)
        jax.block_until_ready(last)
        found.append((time.perf_counter() - began) / CALLS)
    return 1e3 * statistics.median(found)


def timed(function: Callable[..., Any], *given: Any) -> float:
    """Milliseconds per call of a jitted function; arguments stay where they are."""
    compiled = jax.jit(function).lower(*given).compile()
    return milliseconds(lambda: compiled(*given))


@functools.cache
def read_rate() -> float:
    """GB/s of what only reads, as a decode step does: the largest of a big array."""
    values = jax.random.normal(jax.random.key(3), (1 << (20 if REHEARSAL else 31),), jnp.bfloat16)
    found = values.nbytes / timed(jnp.max, values) / 1e6
    values.delete()
    return found


def least_bytes(config: ModelConfig, live: int) -> int:
    """What a decode step reads at least: weights but the embedding table, and keys and values of live rows."""
    c = config
    layer = c.hidden_size * (c.qkv_features + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
    weights = 2 * (c.num_hidden_layers * layer + c.vocab_size * c.hidden_size)
    return weights + 4 * c.num_hidden_layers * live * CONTEXT * c.num_key_value_heads * c.head_dim


def step() -> None:
    """Ceilings of the device, and the whole decode step against reading weights and keys once."""
    n = 64 if REHEARSAL else 8192
    square = jax.random.normal(jax.random.key(1), (n, n), jnp.bfloat16)
    product = timed(lambda a: jnp.dot(a, a, preferred_element_type=jnp.float32), square)
    big = jax.random.normal(jax.random.key(2), (1 << (20 if REHEARSAL else 30),), jnp.bfloat16)
    copied = 2 * big.nbytes / timed(lambda x: -x, big) / 1e6
    big.delete()
    tell(
        "Ceilings",
        ("what", "found"),
        [
            ["device", jax.devices()[0].device_kind],
            ["jax", jax.__version__],
            ["read, GB/s", f"{read_rate():.0f}"],
            ["read and write, GB/s", f"{copied:.0f}"],
            [f"bf16 product of {n}, TFLOP/s", f"{2 * n**3 / product / 1e9:.0f}"],
        ],
    )
    spec = spec_of(MODEL)
    weights = device_weights(spec)
    forms = {"gpu": plain_step(spec), "xla": plain_step(spec_of(MODEL, products=None))}
    rows = []
    for count, lives in LIVE:
        steps = Steps(spec, weights, forms, count)
        reports = {report.name: report for report in steps.inventory}
        for live, name in ((live, name) for live in lives for name in forms):
            steps.live(live)
            before = steps.cache[0].keys.unsafe_buffer_pointer()
            ahead = milliseconds(lambda steps=steps, name=name: steps.run(name))
            alone = milliseconds(lambda steps=steps, name=name: steps.run(name), each=True)
            in_place = steps.cache[0].keys.unsafe_buffer_pointer() == before
            floor, report = least_bytes(MODEL, live) / read_rate() / 1e6, reports[name]
            rows.append(
                [
                    f"{live} of {count}",
                    name,
                    *(f"{ms:.2f}" for ms in (ahead, alone, floor)),
                    f"{floor / ahead:.0%}",
                    f"{1e3 * live / ahead:.0f}",
                    f"{report.lower_seconds:.0f} + {report.compile_seconds:.0f}",
                    f"{report.temp_bytes / 1e6:.0f}",
                    "yes" if in_place and report.alias_bytes >= steps.cache_bytes else "NO",
                ]
            )
        steps.close()
    tell(
        f"Decode step, {MODEL.num_hidden_layers} layers, {CONTEXT} keys per row, bf16",
        ("live rows", "products", "ms", "ms, each waited for", "floor ms", "floor / ms", "tok/s", "lower + compile s",
         "temp MB", "in place"),
        rows,
    )  # fmt: skip


def bits() -> None:
    """Whether samples depend on the row, the neighbours, the width."""
    spec = spec_of(FEW)
    weights = device_weights(spec)
    found: dict[int, np.ndarray] = {}
    table = []
    for count in sorted({count for count, _ in LIVE}):
        steps = Steps(spec, weights, {"step": plain_step(spec)}, count)
        outcomes = []
        for seed, row in ((0, 0), (1, count // 2), (2, count - 1)):
            draw = np.random.default_rng(seed)
            token = draw.integers(0, spec.config.vocab_size, count).astype(np.int32)
            token[row] = 7
            shape = (2, *steps.cache[0].keys.shape[1:])
            mine = np.random.default_rng(9).standard_normal(shape, np.float32)
            keys = draw.standard_normal(shape, np.float32)
            mask = (np.arange(count) == row)[:, None, None, None]
            for index in range(len(steps.cache)):
                stored = (np.where(mask, m, k) for m, k in zip(mine, keys, strict=True))
                steps.cache[index] = LayerCache(*(jnp.asarray(x, jnp.bfloat16) for x in stored))
            length = draw.integers(1, POSITIONS - 1, count).astype(np.int32)
            length[row] = CONTEXT
            steps.rows = dataclasses.replace(steps.rows, token=jnp.asarray(token), length=jnp.asarray(length))
            outcomes += [np.asarray(steps.run("step")[1])[:, row] for _ in range(3)]
        found[count] = outcomes[0]
        same = all(np.array_equal(outcome, outcomes[0]) for outcome in outcomes)
        table.append(
            [f"{count} rows: first, middle, last among others, thrice", "same" if same else "DIFFERENT"]
        )
        steps.close()
    widths = list(found)
    for small, large in zip(widths, widths[1:], strict=False):
        same = np.array_equal(found[small], found[large])
        table.append([f"{small} rows against {large}", "same" if same else f"{found[small]} {found[large]}"])
    digest = hashlib.sha256(b"".join(each.tobytes() for each in found.values())).hexdigest()[:12]
    tell("Bits of a row, few layers", ("comparison", "found"), [*table, ["hash of these samples", digest]])


def products() -> None:
    """Projections alone over several weights in turn: share of the read ceiling, and whether a row's bits change with
    the number of rows."""
    c = MODEL
    shapes = {
        "q, k, v": (c.qkv_features, c.hidden_size),
        "output": (c.hidden_size, c.num_attention_heads * c.head_dim),
        "gate, up": (2 * c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
        "head": (c.vocab_size, c.hidden_size),
    }
    counts = (1, 8) if REHEARSAL else (1, 8, 16, 32, 64, 256)
    timed_counts = (8,) if REHEARSAL else (8, 64, 256)
    table = []
    for name, shape in shapes.items():
        copies = 2 if REHEARSAL else max(2, int(4e8 // (2 * shape[0] * shape[1])))
        keys = jax.random.split(jax.random.key(0), copies)
        weights = [jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02) for key in keys]
        x = jax.random.normal(jax.random.key(5), (counts[-1], shape[1]), jnp.float32)
        for form, side in ((WEIGHT_LEFT, "weight"), (ROWS_LEFT, "rows")):
            cells, results = [], {}

            def chain(weights: list[jax.Array], x: jax.Array, form: Any = form) -> jax.Array:
                total = jnp.zeros((), jnp.float32)
                for weight in weights:
                    out = lax.optimization_barrier(form.linear(weight, x + total))
                    total = out[0, 0] * 1e-30
                return total

            def first(weight: jax.Array, x: jax.Array, form: Any = form) -> jax.Array:
                return form.linear(weight, x)[0]

            for count in counts:
                results[count] = np.asarray(jax.jit(first)(weights[0], x[:count]))
                if count in timed_counts:
                    ms = timed(chain, weights, x[:count]) / copies
                    cells.append(f"{2 * shape[0] * shape[1] / ms / 1e6 / read_rate():.0%}")
            groups: list[list[int]] = []
            for count in counts:
                like = next((g for g in groups if np.array_equal(results[g[0]], results[count])), None)
                groups.append([count]) if like is None else like.append(count)
            table.append([name, side, *cells, "; ".join(" ".join(map(str, group)) for group in groups)])
        header = ("projection", "left", *(f"{n} rows" for n in timed_counts), "groups of equal bits")
        tell(f"Projection {name}, share of the read ceiling", header, table[-2:])


def _no_attention(
    self: Any, layer: LayerCache, qkv: jax.Array, *_: Any, **__: Any
) -> tuple[LayerCache, jax.Array]:
    kv_heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    return layer, split_heads(qkv, kv_heads, head_dim)[0].reshape(len(qkv), -1)


def _greedy(logits: jax.Array, rows: Any, *_: Any, **__: Any) -> Sampled:
    token = argmax(logits)
    return Sampled(token, jnp.zeros(len(token), jnp.float32), jnp.zeros((1, len(token)), jnp.int32))


def parts() -> None:
    """Steps of few layers with one thing changed; then attention of one layer alone."""
    spec = spec_of(FEW)
    plain = plain_step(spec)

    def replaced(owner: Any, name: str, value: Any) -> Callable[..., Any]:
        def changed(*given: Any) -> Any:
            with mock.patch.object(owner, name, value):
                return plain(*given)

        return changed

    forms = {
        "full step": plain,
        "tokens only, no log-probabilities": replaced(sample_rows, "sample", _greedy),
        "no attention, no write": replaced(GpuAttention, "attend_decode", _no_attention),
        "products by XLA": plain_step(spec_of(FEW, products=None)),
    }
    weights = device_weights(spec)
    count = LIVE[-1][0]
    steps = Steps(spec, weights, forms, count)
    found = {name: milliseconds(lambda name=name: steps.run(name)) for name in forms}
    steps.close()
    other = spec_of(FEW, XlaAttention())
    xla = Steps(other, weights, {"xla": plain_step(other)}, count)
    found["attention backend xla"] = milliseconds(lambda: xla.run("xla"))
    xla.close()
    full = found["full step"]
    floor = least_bytes(FEW, count) / read_rate() / 1e6
    rows = [[name, f"{ms:.3f}", f"{ms - full:+.3f}"] for name, ms in found.items()]
    tell(
        f"Decode step of {FEW.num_hidden_layers} layers, {count} rows, {CONTEXT} keys, one thing changed",
        ("form", "ms", "against the full step"),
        [*rows, ["floor", f"{floor:.3f}", ""]],
    )
    config = MODEL
    width = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    table = []
    for rows_, longest in ((8, 256),) if REHEARSAL else ((8, 2048), (64, 2048), (8, 8192), (64, 8192)):
        layer = ATTENTION.make_store(config, (0,), rows_, longest, jnp.dtype(jnp.bfloat16))
        length = np.linspace(longest // 2, longest - 1, rows_).astype(np.int32)
        qkv = jax.random.normal(jax.random.key(1), (rows_, width), jnp.float32)
        angles = jnp.asarray(rope_tables(config, longest)[0])[length]

        def attend(layer: LayerCache, qkv: jax.Array, angles: Any = angles, length: Any = length) -> Any:
            call = AttentionCall(
                config.attention(0), AttentionWeights(), angles, longest, jnp.dtype(jnp.bfloat16)
            )
            live = jnp.ones(len(length), bool)
            return ATTENTION.attend_decode(layer, qkv, call, length=jnp.asarray(length), live=live)

        compiled = jax.jit(attend, donate_argnums=0).lower(layer, qkv).compile()
        state = [layer]

        def run(compiled: Any = compiled, state: list[Any] = state, qkv: Any = qkv) -> jax.Array:
            state[0], out = compiled(state[0], qkv)
            return out

        ms = milliseconds(run)
        jax.tree.map(lambda leaf: leaf.delete(), state)
        size = 4.0 * int((length + 1).sum()) * config.num_key_value_heads * config.head_dim
        table.append([str(rows_), str(longest), f"{1e3 * ms:.1f}", f"{size / ms / 1e6 / read_rate():.0%}"])
    tell(
        "Attention of one decode layer, rows of half to all of the longest",
        ("rows", "longest", "us", "of the read ceiling"),
        table,
    )


def prefill() -> None:
    """One prefill call of few layers, first chunks and chunks behind a long prefix."""
    spec = spec_of(FEW)
    weights = device_weights(spec)
    rope = jax.device_put(rope_tables(spec.config, POSITIONS))
    c = spec.config
    other = spec_of(FEW, products=None)
    layer = c.hidden_size * (c.qkv_features + c.num_attention_heads * c.head_dim + 3 * c.intermediate_size)
    table = []
    for lanes, tokens in ((1, 16),) if REHEARSAL else ((1, 256), (4, 512)):
        rows = make_rows(lanes, 4, POSITIONS)
        tables = jax.device_put(make_tables(lanes, c.vocab_size))
        calls: dict[str, Any] = {}
        for start, name, given_spec in (
            (start, name, each)
            for start in (0, POSITIONS - tokens)
            for name, each in (("gpu", spec), ("xla", other))
        ):
            work = Lanes(
                tokens=jax.random.randint(jax.random.key(1), (lanes, tokens), 0, c.vocab_size, jnp.int32),
                slot=jnp.arange(lanes, dtype=jnp.int32),
                start=jnp.full(lanes, start, jnp.int32),
                count=jnp.full(lanes, tokens, jnp.int32),
                is_last=jnp.ones(lanes, bool),
                prompt_length=jnp.full(lanes, start + tokens, jnp.int32),
                max_tokens=jnp.ones(lanes, jnp.int32),
                min_tokens=jnp.zeros(lanes, jnp.int32),
                stop_ids=rows.stop_ids,
                sampling=rows.sampling,
            )
            cache = make_cache(spec, lanes, POSITIONS)
            if name not in calls:
                whole = jax.jit(prefill_chunk, static_argnums=(0, 1, 2), donate_argnums=(5,))
                given = (given_spec, POSITIONS, max(8, lanes), weights, rope, cache, rows, work, tables)
                calls[name] = whole.lower(*given).compile()
            call, state = calls[name], [cache]

            def run(call: Any = call, state: list[Any] = state, rest: Any = (rows, work, tables)) -> Any:
                state[0], *out = call(weights, rope, state[0], *rest)
                return out

            ms = milliseconds(run)
            jax.tree.map(lambda leaf: leaf.delete(), state)
            flops = 2 * c.num_hidden_layers * layer * lanes * tokens / ms / 1e9
            rate = lanes * tokens / ms
            table.append(
                [f"{lanes} x {tokens}", str(start), name, f"{ms:.2f}", f"{rate:.1f}", f"{flops:.0f}"]
            )
    tell(
        f"Prefill call of {c.num_hidden_layers} layers with head and sampler",
        ("lanes x tokens", "keys before", "products", "ms", "thousand tok/s", "TFLOP/s in projections"),
        table,
    )


def host() -> None:
    """A step of a small model, whose time is the host's: dispatched ahead, waited for, and until the call returns."""
    from xla_engine.tools.bench.models import SMOLLM2_135M

    small = TINY if REHEARSAL else SMOLLM2_135M
    spec = spec_of(small)
    steps = Steps(spec, device_weights(spec), {"step": plain_step(spec)}, 8)
    ahead = milliseconds(lambda: steps.run("step"))
    alone = milliseconds(lambda: steps.run("step"), each=True)
    returned = []
    for _ in range(CALLS):
        jax.block_until_ready(steps.cache[0])
        time.sleep(0.002)
        began = time.perf_counter()
        steps.run("step")
        returned.append(time.perf_counter() - began)
    cells = [f"{ms:.3f}" for ms in (ahead, alone, 1e3 * statistics.median(returned))]
    leaves = len(jax.tree.leaves((steps.weights, steps.cache, steps.rows, steps.tables)))
    tell(
        f"Step of {small.num_hidden_layers} layers of width {small.hidden_size}, 8 rows, {leaves} buffers",
        ("XLA_FLAGS", "ms ahead", "ms waited for", "ms until the call returns"),
        [[os.environ.get("XLA_FLAGS", "") or "default", *cells]],
    )


def checkpoint_of(model: ModelConfig) -> Any:
    block = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    weights: dict[str, Any] = {
        name: np.resize(block, shape) if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in parameter_shapes(model).items()
    }
    return random_checkpoint(model, weights=weights)


def widths() -> None:
    """Whether engines of other sizes, for two models, give the same requests the same bits; what their checks find."""
    from xla_engine.tools.bench.models import SMOLLM2_135M

    small = TINY if REHEARSAL else dataclasses.replace(SMOLLM2_135M, num_hidden_layers=6)
    for title, model in (
        (f"{FEW.num_hidden_layers} layers of Llama-3.1-8B", FEW),
        ("6 layers of SmolLM2-135M", small),
    ):
        checkpoint, first, table = checkpoint_of(model), None, []
        for rows, lanes, chunk in ((8, (1, 2), 64), (32, (8,), 64), (16, (4,), 128)):
            config = EngineConfig(
                attention_backend="gpu", linear_backend="gpu", max_num_seqs=rows, max_model_len=1024 if not REHEARSAL
                else 256, chunk_size=chunk if not REHEARSAL else 16, prefill_lanes=lanes, compile_cache=False
            )  # fmt: skip
            with XlaBatchEngine(checkpoint, None, config) as running:
                check = running.self_check
                draw, found = np.random.default_rng(1), {}
                for index in range(24):
                    length = int(draw.integers(3, 60 if REHEARSAL else 700))
                    prompt = draw.integers(0, model.vocab_size, length).tolist()
                    kind = (
                        {"temperature": 0.0}
                        if index % 2
                        else {"temperature": 0.8, "top_p": 0.9, "seed": index}
                    )
                    params = SamplingParams(**kind, ignore_eos=True, max_tokens=24, logprobs=0)
                    running.submit(prompt, params, request_id=str(index))
                while len(found) < 24:
                    for output in running.step(only_finished=True):
                        one = output.outputs[0]
                        found[output.request_id] = (tuple(one.token_ids), tuple(one.logprobs or ()))
            first = first or found
            differ = sum(found[name] != first[name] for name in first)
            tokens = sum(found[name][0] != first[name][0] for name in first)
            told = "" if check is None else "; ".join((check.promise, *check.differences))
            table.append([str(rows), str(lanes), str(chunk), f"{differ} of 24", str(tokens), told])
        tell(
            f"Engines of other sizes, {title}",
            ("rows", "lanes", "chunk", "requests with other bits", "other tokens", "check"),
            table,
        )


def engine() -> None:
    """The whole engine: start, one request alone and among others to the bit, and rates."""
    count, prompt, answer = (8, 16, 24) if REHEARSAL else (64, 128, 256)
    began = time.perf_counter()
    checkpoint = checkpoint_of(MODEL)
    made = time.perf_counter() - began
    config = EngineConfig(
        attention_backend="gpu",
        linear_backend="gpu",
        max_num_seqs=count,
        max_model_len=256 if REHEARSAL else 1024,
        chunk_size=16 if REHEARSAL else 128,
        prefill_lanes=(8,),
        enable_prefix_caching=False,
        preemption=False,
        compile_cache=False,
    )
    began = time.perf_counter()
    with XlaBatchEngine(checkpoint, None, config) as running:
        started = time.perf_counter() - began
        check = running.self_check
        rows = [["random weights made, s", f"{made:.0f}"], ["start, s", f"{started:.0f}"]]
        rows += [["self-check", "not run" if check is None else check.promise]]
        tell("Engine: start", ("what", "found"), rows)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(0, MODEL.vocab_size, prompt).tolist() for _ in range(count)]

        def run(some: Sequence[int], temperature: float = 0.0) -> tuple[dict[int, Any], float]:
            ids = {}
            began = time.perf_counter()
            for index in some:
                params = SamplingParams(
                    temperature=temperature, seed=index, ignore_eos=True, max_tokens=answer, logprobs=0
                )
                ids[running.submit(prompts[index], params)] = index
            results = {}
            while len(results) < len(ids):
                for output in running.step(only_finished=True):
                    one = output.outputs[0]
                    results[ids[output.request_id]] = (tuple(one.token_ids), tuple(one.logprobs or ()))
            return results, time.perf_counter() - began

        rows = []
        run(range(count))
        for temperature in (0.0, 0.9):
            together, seconds = run(range(count), temperature)
            differing = 0
            for index in (0, count // 2, count - 1):
                alone, single = run([index], temperature)
                differing += alone[index] != together[index]
            rows.append(
                [
                    f"{temperature}",
                    f"{count * answer / seconds:.0f}",
                    f"{answer / single:.0f}",
                    f"{1e3 * single / answer:.2f}",
                    f"{differing} of 3",
                ]
            )
        tell(
            f"Engine: {count} requests of {prompt} + {answer} tokens, {MODEL.num_hidden_layers} layers",
            ("temperature", f"tok/s, {count} at once", "tok/s alone", "ms a token alone",
             "differ alone and among others"),
            rows,
        )  # fmt: skip
        turns = []
        for index in range(count):
            running.submit(
                prompts[index], SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=answer)
            )
        for _ in range(answer // 2):
            began = time.perf_counter()
            running.step(only_finished=True)
            turns.append(time.perf_counter() - began)
        tell(
            "Engine: turns while all decode",
            ("what", "ms"),
            [["median turn", f"{1e3 * statistics.median(turns[len(turns) // 4 :]):.3f}"]],
        )


if __name__ == "__main__":
    globals()[arguments.part]()
    print("DONE", flush=True)
