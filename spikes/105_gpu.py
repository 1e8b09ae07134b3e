# Frozen: runs at commit a36189e.
"""Do programs of every size give the same bits on an NVIDIA GPU, which operations of them do, and how fast are they?

For a machine with a GPU and nothing to install. Each part runs in a process of its own, within what is left of the
time; tables come last.

    python3 -m spikes.105_gpu                          # all parts
    python3 -m spikes.105_gpu --only step,widths       # these alone
    python3 -m spikes.105_gpu --rehearse               # the same code, tiny, kernels interpreted, on any CPU
"""

# %%
from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
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

PARTS = {"operations": 90, "tiles": 100, "attention": 60, "step": 70, "prefill": 60, "widths": 90, "small_widths": 90, "engine": 90, "experts": 40}
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
        "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93"),
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
from xla_engine.graphs.attention import gpu as gpu_attention
from xla_engine.graphs.attention import gpu_kernels
from xla_engine.graphs.attention.backend import (
    KEY_SPAN,
    Attention,
    AttentionCall,
    AttentionWeights,
    LayerCache,
)
from xla_engine.graphs.attention.gpu import GpuAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.experts.gpu import gpu_experts
from xla_engine.graphs.experts.routing import Experts, Route
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.linear import gpu as gpu_linear
from xla_engine.graphs.linear.gpu import GpuProducts
from xla_engine.graphs.linear.products import ROWS_LEFT, Products, activated
from xla_engine.graphs.model.decoder import ModelSpec, parameter_shapes
from xla_engine.graphs.ops.norms import apply_rope
from xla_engine.graphs.ops.reductions import relative, total
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.rows import Extents, make_rows, make_tables
from xla_engine.graphs.sampling.logprobs import logprobs as logprobs_of
from xla_engine.graphs.steps.decode import decode_step
from xla_engine.graphs.steps.prefill import Lanes, prefill_chunk
from xla_engine.model_loader.checkpoint import random_checkpoint
from xla_engine.sampling_params import SamplingParams

REHEARSAL = arguments.rehearse
FULL = importlib.util.find_spec("xla_engine.graphs.ops.gpu_rows") is not None
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
LIVE = ((8, (1, 8)),) if REHEARSAL else ((8, (1, 8)), (64, (64,)))
CALLS, ROUNDS = (2, 1) if REHEARSAL else (20, 3)


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


def without_reading_ahead(spec: ModelSpec) -> Callable[..., Any]:
    def changed(*given: Any) -> Any:
        with mock.patch("xla_engine.graphs.ops.gpu_rows._AHEAD", 0):
            return plain_step(spec)(*given)

    return changed


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
    forms = {"gpu": plain_step(spec)}
    if not REHEARSAL and FULL:
        forms["nothing read ahead"] = without_reading_ahead(spec)
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
            ("live rows", "products", "ms", "ms, each waited for", "floor ms", "floor / ms", "tok/s",
             "lower + compile s", "temp MB", "in place"),
            rows,
        )  # fmt: skip
        rows = []


COUNTS = (1, 2, 16, 80) if REHEARSAL else (1, 8, 64, 256, 2048)


def groups(found: Mapping[Any, np.ndarray]) -> str:
    """Which keys have the same bits."""
    alike: list[list[Any]] = []
    for key, value in found.items():
        like = next((g for g in alike if found[g[0]].tobytes() == value.tobytes()), None)
        alike.append([key]) if like is None else like.append(key)
    return "; ".join(" ".join(map(str, group)) for group in alike)


def operations() -> None:
    """Whether the first rows of an operation have the same bits among any number of rows."""
    from xla_engine.graphs.ops.gpu_rows import gpu_rms_norm

    c, bf16 = MODEL, jnp.dtype(jnp.bfloat16)
    d, inner, heads = c.hidden_size, c.intermediate_size, c.num_attention_heads
    key = iter(jax.random.split(jax.random.key(4), 64))

    def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.normal(next(key), shape, dtype)

    most = COUNTS[-1]
    norm, x, r = normal(d), normal(most, d), normal(most, d)
    both = normal(most, 2 * inner)
    q, rope = normal(most, heads, c.head_dim), jnp.asarray(rope_tables(c, most)[0])
    logits = normal(c.vocab_size, 64)

    def plain(x: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5) * norm

    def softmax(logits: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(logits, axis=0)[:8].T

    rows: dict[str, tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]] = {
        "RMS norm by XLA": (plain, (x,)),
        "the same after a residual, to bfloat16": (lambda x, r: plain(x + r).astype(bf16), (x, r)),
        "RMS norm, kernel": (lambda x: gpu_rms_norm(x, norm, 1e-5, bf16, interpret=REHEARSAL), (x,)),
        "silu(gate) up by XLA": (lambda b: jax.nn.silu(b[:, :inner]) * b[:, inner:], (both,)),
        "rotation by XLA": (apply_rope, (q, rope)),
    }
    shapes = {"down": (d, inner), "gate, up": (2 * inner, d)}
    for name, shape in shapes.items():
        weight, given = normal(*shape, dtype=bf16) * bf16.type(0.02), normal(most, shape[1])
        rows[f"{name} by XLA"] = (functools.partial(ROWS_LEFT.linear, weight), (given,))
        rows[f"{name}, kernel"] = (functools.partial(PRODUCTS.linear, weight), (given,))
    rows["gated, kernel"] = (functools.partial(PRODUCTS.gated, weight), (given,))
    table = []

    def found_by(one: tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]) -> str:
        function, given = one
        found = {
            count: np.asarray(jax.jit(function)(*(each[:count] for each in given))[:1]) for count in COUNTS
        }
        return groups(found)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        table += [[*each] for each in zip(rows, pool.map(found_by, rows.values()), strict=True)]
    small = [count for count in COUNTS if count <= 64]
    for name, function in {
        "log-softmax by XLA": softmax,
        "the sampler's": lambda logits: logprobs_of(
            logits, jnp.zeros(logits.shape[1], jnp.int32), jnp.zeros(logits.shape[1], jnp.int32)
        )[0][:, None],
        "its sum alone": lambda logits: total(relative(logits, jnp.max(logits, axis=0)))[:, None],
    }.items():
        found = {count: np.asarray(jax.jit(function)(logits[:, :count]))[:1] for count in small}
        table.append([name, groups(found)])
    tell("Bits of the first row among others", ("operation", "numbers of rows with the same bits"), table)

    length, qkv = (64, 256) if REHEARSAL else (512, 1024), (heads + 2 * c.num_key_value_heads) * c.head_dim
    stream = normal(length[1], qkv)
    table = []
    for context in length:
        found = {}
        angles = jnp.asarray(rope_tables(c, length[1])[0])
        own = functools.partial(AttentionCall, c.attention(0), AttentionWeights())

        def prefill(layer: LayerCache, tokens: int, start: int) -> tuple[LayerCache, jax.Array]:
            def run(layer: LayerCache, qkv: jax.Array, angles: jax.Array) -> Any:
                call = own(angles[None], length[1], bf16)
                at = Extents(*(jnp.full(1, each, jnp.int32) for each in (0, start, tokens)))
                return ATTENTION.attend_prefill(layer, qkv, call, at)

            span = slice(start, start + tokens)
            return jax.jit(run)(layer, stream[span], angles[span])

        layer = ATTENTION.make_store(c, (0,), 8, max(length[1], KEY_SPAN), bf16)
        layer, out = prefill(layer, context, 0)
        found["prefill"] = np.asarray(out)[-1]
        for tokens in (1, 16, 32, 64, 256):
            if tokens < context:
                found[f"last {tokens}"] = np.asarray(prefill(layer, tokens, context - tokens)[1])[-1]

        def decode(layer: LayerCache, count: int) -> jax.Array:
            at = jnp.full(count, context - 1, jnp.int32)
            call = own(jnp.repeat(angles[context - 1][None], count, 0), length[1], bf16)
            rows = LayerCache(*(each[:count] for each in layer))
            qkv = jnp.repeat(stream[context - 1][None], count, 0)
            return ATTENTION.attend_decode(rows, qkv, call, length=at, live=jnp.ones(count, bool))[1]

        for count in (1, 8):
            found[f"decode {count}"] = np.asarray(jax.jit(decode, static_argnums=1)(layer, count))[0]
        table.append([f"{context} keys", groups(found)])
    tell("Bits of the last query in attention", ("keys", "programs with the same bits"), table)


def tiles() -> None:
    """Products alone, several weights in turn, in tiles of other sizes: rates, and whether bits differ."""
    c, made = MODEL, gpu_linear._Tiles
    d, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    shapes = {
        "q, k, v": (c.qkv_features, d),
        "output": (d, heads),
        "down": (d, c.intermediate_size),
        "gate, up": (2 * c.intermediate_size, d),
        "head": (c.vocab_size, d),
    }
    table, many = [], []
    for name, shape in shapes.items():
        copies = 2 if REHEARSAL else max(2, int(6e8 // (2 * shape[0] * shape[1])))
        weights = [
            jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02)
            for key in jax.random.split(jax.random.key(0), copies)
        ]
        some = jax.random.normal(jax.random.key(5), (COUNTS[-1], shape[1]), jnp.bfloat16)

        def call(weights: list[jax.Array], x: jax.Array, residual: jax.Array, name: str = name) -> Any:
            if name == "gate, up":
                return [PRODUCTS.gated(weight, x) for weight in weights]
            if name == "head":
                return [PRODUCTS._product(weight, x, None, features_first=True) for weight in weights]
            residual = residual if name in ("output", "down") else None
            return [PRODUCTS._product(weight, x, None, residual=residual) for weight in weights]

        def by_xla(weights: list[jax.Array], x: jax.Array, residual: jax.Array, name: str = name) -> Any:
            outs = [ROWS_LEFT.linear(weight, x) for weight in weights]
            if name == "gate, up":
                return [activated(out, "silu").astype(jnp.bfloat16) for out in outs]
            return [residual + out for out in outs] if name in ("output", "down") else outs

        few = [
            *(made(32, 0, 128, 4, 5), made(32, 0, 256, 4, 4), made(64, 0, 128, 4, 5)),
            *(made(16, 0, 256, 4, 4), made(64, 0, 64, 4, 4), made(128, 0, 128, 4, 3), made(128, 0, 128, 8, 3)),
            *(made(32, 0, 128, 4, 8), made(32, 0, 512, 4, 2), made(64, 0, 256, 8, 3)),
        ]
        lots = [
            made(128, 128, 64, 8, 4),
            made(256, 128, 64, 8, 3, True),
            made(128, 128, 64, 8, 4, True),
            made(128, 256, 64, 8, 3, True),
            made(128, 128, 64, 4, 3, True),
            made(64, 128, 64, 4, 4, True),
            *([made(128, 256, 64, 8, 3)] if name == "head" else []),
        ]
        work: list[tuple[int, Any]] = [
            *((rows, each._replace(rows=max(16, rows))) for rows in (8, 64) for each in few),
            *((COUNTS[-1], each) for each in lots if name != "head" or not each.rows_left),
            *((rows, None) for rows in (8, 64, COUNTS[-1])),
        ]
        if REHEARSAL:
            work = work[:2] + work[20:22] + work[-1:]

        def lowered(one: tuple[int, Any]) -> Any:
            rows, chosen = one
            residual = jax.ShapeDtypeStruct((rows, shape[0]), jnp.float32)
            given = weights, some[:rows], residual
            form = by_xla if chosen is None else call
            with mock.patch.object(gpu_linear, "_tiles", lambda *_: chosen):
                return jax.jit(lambda *given: form(*given)).lower(*given)  # traced anew

        def compiled(one: Any) -> Any:
            try:
                return one.compile()
            except Exception as error:  # tiles that do not fit
                return f"{type(error).__name__}: {str(error)[:80]}"

        with concurrent.futures.ThreadPoolExecutor(14) as pool:
            programs = list(pool.map(compiled, [lowered(one) for one in work]))
        expected: dict[int, np.ndarray] = {}
        for (rows, chosen), program in zip(work, programs, strict=True):
            told = "XLA" if chosen is None else " ".join(map(str, chosen))
            if isinstance(program, str):
                table.append([name, str(rows), told, program, ""])
                continue
            residual = jnp.ones((rows, shape[0]), jnp.float32)
            given = weights, some[:rows], residual
            found = program(*given)[0]
            first = np.asarray(found[:, :8].T if name == "head" and chosen else found[:8])
            same = "same" if np.array_equal(expected.setdefault(0, first), first) else "OTHER"
            ms = milliseconds(lambda program=program, given=given: program(*given)) / copies
            size = 2 * shape[0] * shape[1]
            cells = [name, str(rows), told, f"{1e3 * ms:.1f}", same if chosen else ""]
            if rows <= 64:
                table.append([*cells[:3], f"{size / ms / 1e6 / read_rate():.1%}", cells[4]])
            else:
                many.append([*cells[:3], f"{size * rows / ms / 1e9:.0f}", cells[4]])
    header = "product", "rows", "features, rows, step, warps, stages, rows left"
    tell("Few rows, share of the rate of reading", (*header, "share", "bits"), table)
    tell("Many rows, TFLOP/s", (*header, "TFLOP/s", "bits"), many)


def attention() -> None:
    """Decode attention, several layers in turn, whole and in parts, with splits of other sizes."""
    c, layers = MODEL, 2 if REHEARSAL else 8
    form, call_of = c.attention(0), GpuAttention._call
    own = AttentionWeights()
    table = []
    for count in (8,) if REHEARSAL else (8, 64):
        stores = [
            ATTENTION.make_store(c, (0,), count, POSITIONS, jnp.dtype(jnp.bfloat16)) for _ in range(layers)
        ]
        qkv = jax.random.normal(jax.random.key(1), (count, c.qkv_features), jnp.float32)
        length = jnp.full(count, CONTEXT - 1, jnp.int32)
        angles = jnp.asarray(rope_tables(c, POSITIONS)[0])[length]
        call = AttentionCall(form, own, angles, POSITIONS, jnp.dtype(jnp.bfloat16))
        rows, live = jnp.arange(count, dtype=jnp.int32), jnp.ones(count, bool)

        def whole(stores: list[LayerCache], qkv: jax.Array) -> Any:
            return [
                ATTENTION.attend_decode(each, qkv, call, length=length, live=live)  # noqa: B023
                for each in stores
            ]

        def write(stores: list[LayerCache], qkv: jax.Array) -> Any:
            return [ATTENTION._write(each, qkv, rows, length, call) for each in stores]  # noqa: B023

        def split(stores: list[LayerCache], qkv: jax.Array) -> Any:
            q = qkv[:, : c.num_attention_heads * c.head_dim].astype(jnp.bfloat16)
            q = q.reshape(count, c.num_key_value_heads, -1, c.head_dim)  # noqa: B023
            return [(each, ATTENTION._partial(each, q, length, call)) for each in stores]  # noqa: B023

        def timed_of(function: Callable[..., Any], size: int, warps: int) -> str:
            def patched(self: GpuAttention, kernel: Any, *, warps: int, **rest: Any) -> Any:
                split = getattr(kernel, "func", kernel) is gpu_kernels.split_kernel
                return call_of(self, kernel, warps=chosen if split else warps, **rest)

            chosen = warps
            with (
                mock.patch.object(GpuAttention, "_call", patched),
                mock.patch.object(gpu_kernels, "key_tile", lambda _: size),
                mock.patch.object(gpu_attention, "key_tile", lambda _: size),
            ):
                program = jax.jit(lambda *given: function(*given), donate_argnums=0)
                try:
                    compiled = program.lower(stores, qkv).compile()  # noqa: B023
                except Exception as error:
                    return str(error)[:60]

            def run() -> Any:
                nonlocal stores
                out = compiled(stores, qkv)  # noqa: B023
                stores = [each[0] for each in out]
                return out

            return f"{1e3 * milliseconds(run) / layers:.1f}"

        floor = 4e3 * count * CONTEXT * c.num_key_value_heads * c.head_dim / read_rate() / 1e6
        for size, warps in ((128, 4),) if REHEARSAL else ((64, 4), (128, 4), (128, 8), (256, 8)):
            cells = [timed_of(each, size, warps) for each in (whole, write, split)]
            table.append([str(count), str(size), str(warps), *cells, f"{floor:.1f}"])
        for each in jax.tree.leaves(stores):
            each.delete()
    header = ("rows", "keys of a split", "warps", "us a layer", "write alone", "splits alone", "floor")
    tell(f"Decode attention, {CONTEXT} keys", header, table)


def experts() -> None:
    """Routed experts in the shape of Qwen3-30B-A3B, four layers in turn, against reading the chosen ones once."""
    count, chosen, d, inner, layers = (8, 2, 64, 32, 2) if REHEARSAL else (128, 8, 2048, 768, 4)
    key = iter(jax.random.split(jax.random.key(6), 64))

    def normal(*shape: int) -> jax.Array:
        return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(0.02))(next(key))

    weights = [Experts(normal(count, 2 * inner, d), normal(count, d, inner)) for _ in range(layers)]
    table = []
    for rows in (4,) if REHEARSAL else (1, 8, 64):
        draw = np.random.default_rng(rows)
        expert = np.stack([draw.permutation(count)[:chosen] for _ in range(rows)]).astype(np.int32)
        routed = Route(jnp.asarray(expert), jnp.full((rows, chosen), 1 / chosen, jnp.float32))
        x = jax.random.normal(next(key), (rows, d), jnp.float32)

        def run(weights: list[Experts], x: jax.Array, routed: Route = routed) -> jax.Array:
            for each in weights:
                x = gpu_experts(each, x, routed, x, interpret=REHEARSAL)
            return x

        ms = timed(run, weights, x) / layers
        read = len(np.unique(expert)) * 6 * d * inner
        table.append([str(rows), f"{1e3 * ms:.0f}", f"{read / ms / 1e6 / read_rate():.0%}"])
    tell("Routed experts of one layer", ("rows", "us", "of the rate of reading"), table)


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


def checkpoint_of(model: ModelConfig) -> Any:
    block = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16)
    weights: dict[str, Any] = {
        name: np.resize(block, shape) if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in parameter_shapes(model).items()
    }
    return random_checkpoint(model, weights=weights)


def small_widths() -> None:
    """`widths` of the second model."""
    widths(1)


def widths(place: int = 0) -> None:
    """Whether engines of other sizes give the same requests the same bits, and what their checks find."""
    from xla_engine.tools.bench.models import SMOLLM2_135M

    small = TINY if REHEARSAL else dataclasses.replace(SMOLLM2_135M, num_hidden_layers=6)
    for title, model in (
        (f"{FEW.num_hidden_layers} layers of Llama-3.1-8B", FEW),
        ("6 layers of SmolLM2-135M", small),
    )[place : place + 1]:
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
