# Frozen: runs at commit 590d0eb.
"""Which operand order and dtypes make a projection fast, and which give a row the same bits wherever it stands?

Speed: the four projections of all 30 layers of SmolLM2-135M, chained as in the model, weights out of memory; and
the whole decode step. Bits: probe rows in every position of products with 2 to 256 rows.

    python -m spikes.002_projection
"""

# %%
from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spikes.support.timing import (
    SMOLLM2_135M,
    DecodeStep,
    describe_machine,
    interleave,
    markdown_table,
    random_weights,
)
from xla_engine.graphs.linear.products import (
    ROWS_LEFT,
    WEIGHT_LEFT,
    XlaProducts,
    feature_major,
    finished,
    normed,
)
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.steps import decode

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=5)
arguments.add_argument("--row-step", type=int, default=1, help="every n-th row count in the check of bits")
rounds, row_step = vars(arguments.parse_known_args()[0]).values()

ROWS = (8, 32, 64, 128, 256)
c = SMOLLM2_135M
SHAPES = (  # [F, D] of one layer
    (c.qkv_features, c.hidden_size),
    (c.hidden_size, c.num_attention_heads * c.head_dim),
    (2 * c.intermediate_size, c.hidden_size),
    (c.hidden_size, c.intermediate_size),
)
LAYERS = c.num_hidden_layers
PARAMETERS = LAYERS * sum(features * inputs for features, inputs in SHAPES)
print(describe_machine())

# %% Forms: (weight, x [N, D]) -> [N, F]; the weight is [F, D], or [D, F] where the name says so
Form = Callable[[jax.Array, jax.Array], jax.Array]
LAST = (((1,), (1,)), ((), ()))  # contract the last axis of both


def weight_left_no_barrier(weight: jax.Array, x: jax.Array) -> jax.Array:
    return feature_major(weight, x).T


class NoBarrier(XlaProducts):
    """Weight left in `linear`, without the barrier."""

    def linear(self, weight, x, *, norm=None, bias=None, residual=None):  # type: ignore[no-untyped-def, override]
        return finished(weight_left_no_barrier(weight, normed(x, norm)), bias, residual)


def transposed_input(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`W @ x.T`: the product contracts (1, 0) before XLA folds the transpose into it."""
    out = jnp.matmul(weight, x.astype(weight.dtype).T, preferred_element_type=jnp.float32)
    return lax.optimization_barrier(out).T


def plain(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`x @ W` with W `[D, F]`."""
    return jnp.matmul(x.astype(weight.dtype), weight, preferred_element_type=jnp.float32)


def mixed(weight: jax.Array, x: jax.Array) -> jax.Array:
    """float32 activations against the weight as it is."""
    return lax.dot_general(weight, x, LAST, preferred_element_type=jnp.float32).T


def same_dtype_out(weight: jax.Array, x: jax.Array) -> jax.Array:
    """The result in the weight's dtype."""
    return lax.optimization_barrier(lax.dot_general(weight, x.astype(weight.dtype), LAST)).T.astype(
        jnp.float32
    )


def int8_weight_left(weight: jax.Array, x: jax.Array) -> jax.Array:
    out = lax.dot_general(weight, x.astype(jnp.int8), LAST, preferred_element_type=jnp.int32)
    return lax.optimization_barrier(out).T.astype(jnp.float32)


def int8_rows_left(weight: jax.Array, x: jax.Array) -> jax.Array:
    out = lax.dot_general(x.astype(jnp.int8), weight, LAST, preferred_element_type=jnp.int32)
    return out.astype(jnp.float32)


def dequantised(weight: jax.Array, x: jax.Array) -> jax.Array:
    """Weight-only int8: the weight is converted to float32 for the product."""
    return WEIGHT_LEFT.linear(weight.astype(jnp.float32), x)


FORMS: dict[str, dict[str, Form]] = {
    "bfloat16": {
        "weight left, barrier (decode)": WEIGHT_LEFT.linear,
        "weight left, no barrier": weight_left_no_barrier,
        "rows left (prefill)": ROWS_LEFT.linear,
        "x @ W[D, F]": plain,
        "W @ x.T, barrier": transposed_input,
        "weight left, float32 x": mixed,
        "weight left, bfloat16 result": same_dtype_out,
    },
    "float32": {
        "weight left, barrier (decode)": WEIGHT_LEFT.linear,
        "rows left (prefill)": ROWS_LEFT.linear,
        "x @ W[D, F]": plain,
    },
    "int8": {
        "weight left, int32 result": int8_weight_left,
        "rows left, int32 result": int8_rows_left,
        "weight only: converted to float32": dequantised,
    },
}


# %% Milliseconds for the projections of all layers
def all_layers(form: Form) -> Callable[[list[jax.Array], jax.Array, jax.Array], jax.Array]:
    """Each product reads the one before it, at a factor that vanishes: values stay as they are, order is kept."""

    def run(weights: list[jax.Array], narrow: jax.Array, wide: jax.Array) -> jax.Array:
        x = narrow  # [N, D]
        for layer in range(LAYERS):
            for weight, base in zip(
                weights[4 * layer : 4 * layer + 4], (narrow, narrow, wide, narrow), strict=True
            ):
                out = form(weight, x)
                size = base.shape[1]
                x = base + 1e-30 * (out[:, :size] + out[:, -size:])  # every column is wanted
        return x

    return run


def compiled(form: Form, weights: list[jax.Array], rows: int) -> tuple[Callable[[], object], int, bool]:
    """A call of the form on all layers, its scratch bytes, and whether it converts a whole weight."""
    rng = np.random.default_rng(rows)
    narrow, wide = (
        jnp.asarray(4 * rng.standard_normal((rows, size)), jnp.float32)
        for size in (SHAPES[0][1], SHAPES[3][1])
    )
    program = jax.jit(all_layers(form)).lower(weights, narrow, wide).compile()
    sizes = {f"{a},{b}" for features, inputs in SHAPES for a, b in ((features, inputs), (inputs, features))}
    shapes = "|".join(sizes)
    converts = re.search(rf"= f32\[(?:{shapes})\]\S* (?:convert|fusion)\(", program.as_text()) is not None
    return (
        lambda: jax.block_until_ready(program(weights, narrow, wide)),
        program.memory_analysis().temp_size_in_bytes,
        converts and weights[0].dtype != jnp.float32,
    )


def random_layers(dtype: str, transposed: bool) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    scale = 30.0 if dtype == "int8" else 0.04
    shapes = [shape[::-1] if transposed else shape for shape in SHAPES] * LAYERS
    return [jnp.asarray(scale * rng.standard_normal(shape, np.float32)).astype(dtype) for shape in shapes]


for dtype, forms in FORMS.items():
    stored = {False: random_layers(dtype, False)}
    if any(form is plain for form in forms.values()):
        stored[True] = random_layers(dtype, True)
    bytes_read = PARAMETERS * jnp.dtype(dtype).itemsize
    table: dict[str, list[object]] = {name: [name] for name in forms}
    scratch: dict[str, str] = {}
    for rows in ROWS:
        with ThreadPoolExecutor(2) as pool:
            jobs = {
                name: pool.submit(compiled, form, stored[form is plain], rows) for name, form in forms.items()
            }
        built = {name: job.result() for name, job in jobs.items()}
        times = interleave({name: run for name, (run, _, _) in built.items()}, rounds)
        for name, each in times.items():
            gflops = 2 * rows * PARAMETERS / each.median / 1e9
            table[name].append(
                f"{1e3 * each.median:.1f} ({bytes_read / each.median / 1e9:.1f}; {gflops:.0f})"
            )
            if rows == ROWS[0]:
                _, temp, converts = built[name]
                scratch[name] = f"{temp / 1e6:.1f}{', converts' if converts else ''}"
        del built, jobs
    header = (f"{dtype}: ms (GB/s; GFLOP/s) at rows", *map(str, ROWS), "scratch MB at 8")
    print(f"\nweights {bytes_read / 1e6:.0f} MB\n")
    print(markdown_table(header, [[*cells, scratch[name]] for name, cells in table.items()]))

# %% The same orders in the whole decode step
spec = ModelSpec(c, jnp.dtype(jnp.bfloat16))
weights = random_weights(spec)
table = {}
for rows in (8, 32):
    steps = {}
    for name, form in (
        ("weight left, barrier (the code)", WEIGHT_LEFT),
        ("weight left, no barrier", NoBarrier(weight_left=True)),
        ("rows left", ROWS_LEFT),
    ):
        with mock.patch.object(decode, "WEIGHT_LEFT", form):
            steps[name] = DecodeStep(spec, weights, rows=rows, length=176, key_length=256, positions=256)
    times = interleave(steps, 3 * rounds)
    for name, step in steps.items():
        table.setdefault(name, [name]).extend(
            (times[name].milliseconds(), f"{step.report.temp_bytes / 1e6:.1f}")
        )
print("\nwhole decode step, bfloat16\n")
print(markdown_table(("form", "ms, B = 8", "temp MB", "ms, B = 32", "temp MB"), list(table.values())))
del steps, weights

# %% Bits: does a row's result depend on where it stands and how many rows stand beside it?
FEATURES = 192
WIDTHS = (48, 64, 256, 576, 1024)
POOL = 256
ORDERS: dict[str, Form] = {
    "weight left": WEIGHT_LEFT.linear,
    "rows left": ROWS_LEFT.linear,
    "x @ W[D, F]": plain,
}


Weights = dict[str, list[tuple[jax.Array, jax.Array]]]  # by dtype, per width: [F, K] and its copy [K, F]
Results = dict[str, dict[str, list[jax.Array]]]  # by order and dtype, per width


def products(weights: Weights, x: dict[str, list[jax.Array]]) -> Results:
    """Every order, dtype and width in one program."""
    return {
        name: {
            dtype: [form(pair[form is plain], rows) for pair, rows in zip(pairs, x[dtype], strict=True)]
            for dtype, pairs in weights.items()
        }
        for name, form in ORDERS.items()
    }


rng = np.random.default_rng(1)
DTYPES = ("bfloat16", "float32")
matrices = [rng.standard_normal((FEATURES, width)) for width in WIDTHS]
probe_weights: Weights = {
    dtype: [(jnp.asarray(each, dtype), jnp.asarray(each.T, dtype)) for each in matrices] for dtype in DTYPES
}
pool_rows = [rng.standard_normal((POOL, width)).astype(np.float32) for width in WIDTHS]


def rows_at(order: np.ndarray) -> dict[str, list[jax.Array]]:
    return {dtype: [jnp.asarray(rows[order], dtype) for rows in pool_rows] for dtype in DTYPES}


def arrangements(count: int) -> Iterable[np.ndarray]:
    """One row in every position at once, then strangers side by side, three ways."""
    yield np.zeros(count, np.int64)
    for _ in range(3):
        yield rng.permutation(POOL)[:count]


# One answer per row: each form's own at 256 rows.
everybody = np.arange(POOL)
canonical = jax.tree.map(np.asarray, jax.jit(products)(probe_weights, rows_at(everybody)))
counts = list(range(2, POOL + 1, row_step))
differing: dict[tuple[str, str, int], list[int]] = {
    (name, dtype, width): [] for name in ORDERS for dtype in DTYPES for width in range(len(WIDTHS))
}
moving = {key: set[int]() for key in differing}
with ThreadPoolExecutor(2) as threads:
    programs = threads.map(
        lambda count: jax.jit(products).lower(probe_weights, rows_at(np.zeros(count, np.int64))).compile(),
        counts,
    )
    for count, program in zip(counts, programs, strict=True):
        for turn, order in enumerate(arrangements(count)):
            out = jax.tree.map(np.asarray, program(probe_weights, rows_at(order)))
            for (name, dtype, width), bad in differing.items():
                got, want = out[name][dtype][width], canonical[name][dtype][width][order]
                if not np.array_equal(got, want) and (not bad or bad[-1] != count):
                    bad.append(count)
                if turn == 0 and not (got == got[0]).all():
                    moving[name, dtype, width].add(count)


def ranges(values: list[int]) -> str:
    """`2-7, 9`; long lists are cut."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + row_step:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    shown = [f"{low}" if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(shown[:4]) + (f", ... ({len(values)} counts)" if len(shown) > 4 else "") or "none"


print(f"\nbits, rows 2-{POOL}: row counts at which some row differs from its own result among {POOL} rows;")
print("in brackets the counts at which one row differs from position to position\n")
rows_of_table = []
for name in ORDERS:
    for dtype in DTYPES:
        cells = []
        for width in range(len(WIDTHS)):
            key = (name, dtype, width)
            cells.append(f"{ranges(differing[key])} [{ranges(sorted(moving[key]))}]")
        rows_of_table.append((f"{name}, {dtype}", *cells))
print(markdown_table(("form", *(f"K = {width}" for width in WIDTHS)), rows_of_table))

print(f"\nweight left against rows left, {POOL} rows each: differing values of {POOL * FEATURES}\n")
crossed = [
    (
        dtype,
        *(
            np.sum(canonical["weight left"][dtype][width] != canonical["rows left"][dtype][width])
            for width in range(len(WIDTHS))
        ),
    )
    for dtype in DTYPES
]
print(markdown_table(("dtype", *(f"K = {width}" for width in WIDTHS)), crossed))
