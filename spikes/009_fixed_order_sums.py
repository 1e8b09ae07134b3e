# Frozen: runs at commit a8802fc.
"""Do sums depend on the shape they stand in, bit by bit, and what does an order that never changes cost?

Each form is compared with itself: the same row or query, among more rows or before more masked keys.

    python -m spikes.009_fixed_order_sums
"""

# %%
from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
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
    token_logprob,
)
from xla_engine.graphs.attention import xla as attention_xla
from xla_engine.graphs.attention.backend import KEY_SPAN
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops import norms as layers
from xla_engine.graphs.ops import reductions as vocabulary
from xla_engine.graphs.ops.fixed_order_sums import sum_first, sum_last
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.sampling import logprobs

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=15)
rounds = arguments.parse_known_args()[0].rounds

rng = np.random.default_rng(9)
print(describe_machine())


def plain_sum_last(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=-1, keepdims=True)


def plain_sum_first(values: jax.Array) -> jax.Array:
    return jnp.sum(values, axis=0)


def differing(got: np.ndarray, want: np.ndarray) -> int:
    """Values whose bits differ."""
    return int(np.sum(got.view(np.int32) != want.view(np.int32)))


# %% Sums over the last axis: 256 rows in calls of N
POOL, WIDTHS, COUNTS = 256, (48, 64, 128, 256, 576, 1536), (2, 8, 16, 32, 64, 128)
Sum = Callable[[jax.Array], jax.Array]
SUMS: dict[str, Sum] = {
    "jnp.sum(x)": plain_sum_last,
    "jnp.mean(x * x)": lambda x: jnp.mean(x * x, axis=-1, keepdims=True),
    "norm with jnp.mean": lambda x: x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5),
    "sum_last(x)": sum_last,
    "rms_norm with sum_last (the code)": lambda x: rms_norm(x, jnp.ones(x.shape[-1]), 1e-5),
}


@jax.jit
def all_sums(pools: list[jax.Array]) -> list[list[jax.Array]]:
    return [[form(pool) for pool in pools] for form in SUMS.values()]


pools = [rng.standard_normal((POOL, width)).astype(np.float32) for width in WIDTHS]


def in_calls_of(count: int) -> list[list[np.ndarray]]:
    """All 256 rows, `count` at a time."""
    parts = [all_sums([pool[at : at + count] for pool in pools]) for at in range(0, POOL, count)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


whole = in_calls_of(POOL)
results = {count: in_calls_of(count) for count in COUNTS}
table: list[list[object]] = []
for form, name in enumerate(SUMS):
    for column, width in enumerate(WIDTHS):
        rows_differing = [
            np.sum(np.any(results[count][form][column] != whole[form][column], axis=1)) for count in COUNTS
        ]
        table.append([name, width, *rows_differing])
print(f"\nrows of {POOL} that differ between calls of N rows and one call of {POOL}\n")
print(markdown_table(("form", "width", *(f"N = {count}" for count in COUNTS)), table))

# %% Attention: the same queries in larger buckets, among more rows, and as a prefill chunk
SEQUENCES, WIDTH = 8, 16
HEADS = {  # H, KV, Dh
    "SmolLM2-135M 9/3 x 64": (9, 3, 64),
    "Qwen3-0.6B 16/8 x 128": (16, 8, 128),
    "embedded 8/2 x 32": (8, 2, 32),
    "tiny 2/1 x 16": (2, 1, 16),
}
LENGTHS = {100: (256, 512, 1024), 400: (512, 1024, 2048)}  # most keys seen: buckets
Attention = Callable[..., jax.Array]


def blocks(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, **_: bool) -> jax.Array:
    """The code, as in decode, for keys and values `[N, KV, S, Dh]` and visible `[N, 1, R|1, S]`."""
    by_block = (*keys.shape[:2], -1, KEY_SPAN, keys.shape[3])
    keys, values = (jnp.moveaxis(each.reshape(by_block), 2, 0) for each in (keys, values))
    return attention_xla._attention(q, keys, values, visible[:, 0], keys_left=True)


def plain(q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, **_: bool) -> jax.Array:
    """One masked softmax over the whole bucket: q `[N, KV, R, Dh]`, keys and values `[N, KV, S, Dh]`."""
    precision = lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    kwargs = {"precision": precision, "preferred_element_type": jnp.float32}
    batch = ((0, 1), (0, 1))
    scores = (
        lax.dot_general(q.astype(keys.dtype), keys, (((3,), (3,)), batch), **kwargs) * q.shape[-1] ** -0.5
    )
    scores = jnp.where(visible, scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    return lax.dot_general(
        weights.astype(values.dtype), values, (((3,), (2,)), batch), **kwargs
    ) / plain_sum_last(weights)


def blocks_plain_sum(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, **_: bool
) -> jax.Array:
    with mock.patch.object(attention_xla, "sum_last", plain_sum_last):
        return blocks(q, keys, values, visible)


def plain_by_block(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, **_: bool
) -> jax.Array:
    """`plain` for keys and values as the cache has them."""
    count, kv_heads, _, head_dim = q.shape
    keys, values = (jnp.moveaxis(x, 0, 2).reshape(count, kv_heads, -1, head_dim) for x in (keys, values))
    return plain(q, keys, values, visible[:, None])


CODE = f"blocks of {KEY_SPAN}, sum_last (the code)"
ATTENTIONS: dict[str, Attention] = {
    "one softmax, jnp.sum": plain,
    f"blocks of {KEY_SPAN}, jnp.sum": blocks_plain_sum,
    CODE: blocks,
}


def in_both_graphs(
    form: Attention, q: np.ndarray, stored: np.ndarray, seen: np.ndarray, bucket: int, dtype: str
) -> dict[str, np.ndarray]:
    """All queries `[N, T, KV, G, Dh]` as 8 and as 32 decode rows per call, and as 8 lanes of T tokens."""
    run = jax.jit(form)
    keys, values = (jnp.asarray(each[:, :, :bucket], dtype) for each in stored)
    visible = (np.arange(bucket) < seen[:, None])[:, None, None]  # [N, 1, 1, S]
    out = {}
    for copies in (1, 4):
        k, v, mask = (jnp.tile(each, (copies, 1, 1, 1)) for each in (keys, values, visible))
        parts = []
        for at in range(0, WIDTH, copies):
            rows = q[:, at : at + copies].swapaxes(0, 1).reshape(-1, *q.shape[2:])
            part = np.asarray(run(rows, k, v, mask))
            parts.append(part.reshape(copies, SEQUENCES, *part.shape[1:]).swapaxes(0, 1))
        out[f"decode {copies * SEQUENCES}"] = np.concatenate(parts, axis=1)
    lanes = q.swapaxes(1, 2).reshape(SEQUENCES, q.shape[2], -1, q.shape[4])
    part = np.asarray(run(lanes, keys, values, jnp.asarray(visible)))
    out["prefill"] = part.reshape(SEQUENCES, q.shape[2], WIDTH, -1, q.shape[4]).swapaxes(1, 2)
    return out


table = []
for heads, (h, kv, dh) in HEADS.items():
    queries = rng.standard_normal((SEQUENCES, WIDTH, kv, h // kv, dh)).astype(np.float32)
    stored = rng.standard_normal((2, SEQUENCES, kv, 2048, dh)).astype(np.float32)
    for dtype in ("bfloat16", "float32"):
        for name, form in ATTENTIONS.items():
            cells: list[object] = []
            for longest, buckets in LENGTHS.items():
                seen = longest - np.arange(SEQUENCES) * (longest // SEQUENCES)
                runs = {size: in_both_graphs(form, queries, stored, seen, size, dtype) for size in buckets}
                reference = runs[buckets[0]]["decode 8"]
                cells.append(max(differing(run["decode 8"], reference) for run in runs.values()))
                cells.append(max(differing(run["decode 32"], reference) for run in runs.values()))
                cells.append(max(differing(run["prefill"], reference) for run in runs.values()))
            table.append([heads, dtype, name, *cells])
print(
    f"\nattention of {SEQUENCES * WIDTH} queries: values that differ from 8 decode rows in the smallest bucket"
)
print(
    ", ".join(f"up to {longest} keys seen in buckets {buckets}" for longest, buckets in LENGTHS.items()), "\n"
)
kinds = ("8 rows, any bucket", "32 rows", "prefill")
header = ("heads", "dtype", "form", *(f"{longest}: {kind}" for longest in LENGTHS for kind in kinds))
print(markdown_table(header, table))

# %% How few heads and rows are too few? The code, up to 100 keys seen, against a bucket of 1024
SMALL = (256, 512, 768)
table = []
own = np.random.default_rng(10)
for heads_of in ((1, 1, 32), (2, 1, 16), (2, 2, 32), (4, 1, 16), (4, 2, 16)):
    for rows in (8, 16):
        queries = own.standard_normal((32, rows, heads_of[1], heads_of[0] // heads_of[1], heads_of[2]))
        stored = own.standard_normal((2, rows, heads_of[1], 1024, heads_of[2]))
        seen = 100 - np.arange(rows)

        def at(bucket: int, queries=queries, stored=stored, seen=seen) -> np.ndarray:
            keys, values = (jnp.asarray(each[:, :, :bucket], jnp.bfloat16) for each in stored)
            visible = jnp.asarray((np.arange(bucket) < seen[:, None])[:, None, None])
            run = jax.jit(blocks)
            return np.stack(
                [np.asarray(run(jnp.asarray(q, jnp.float32), keys, values, visible)) for q in queries]
            )

        whole = at(1024)
        name = "{}/{} x {}".format(*heads_of)
        table.append([name, rows, whole.size, *(differing(at(bucket), whole) for bucket in SMALL)])
print("\nblocks (the code), bfloat16: values that differ from a bucket of 1024\n")
print(markdown_table(("heads", "rows", "values", *(f"{bucket} keys" for bucket in SMALL)), table))

# %% What blocks cost: attention of 16 layers, alone
DEEP, BUCKETS = 16, (256, 512, 1024)
KV, DH = SMOLLM2_135M.num_key_value_heads, SMOLLM2_135M.head_dim
GROUPS = SMOLLM2_135M.num_attention_heads // KV


def chained(
    form: Attention, q: jax.Array, pairs: list[tuple[jax.Array, jax.Array]], seen: jax.Array
) -> jax.Array:
    for keys, values in pairs:
        q = q + 1e-30 * form(q, keys, values, seen)
    return q


table = []
for rows in (8, 32):
    costs: dict[str, list[object]] = {name: [f"{name}, {rows} rows"] for name in ATTENTIONS}
    q = jnp.asarray(rng.standard_normal((rows, KV, GROUPS, DH)), jnp.float32)
    for bucket in BUCKETS:
        pairs = [
            tuple(
                jnp.full((rows, KV, bucket, DH), 0.01 * (1 + layer + part), jnp.bfloat16) for part in range(2)
            )
            for layer in range(DEEP)
        ]
        seen = jnp.ones((rows, 1, 1, bucket), bool)
        programs = {
            name: jax.jit(chained, static_argnums=0).lower(form, q, pairs, seen).compile()
            for name, form in ATTENTIONS.items()
        }
        runs = {
            name: lambda program=program, q=q, pairs=pairs, seen=seen: jax.block_until_ready(
                program(q, pairs, seen)
            )
            for name, program in programs.items()
        }
        for name, times in interleave(runs, rounds).items():
            costs[name].append(f"{1e3 * times.median / DEEP:.3f}")
        del pairs, programs, runs
    table.extend(costs.values())
print("\nms per layer, bfloat16, decode rows, all keys seen\n")
print(markdown_table(("form", *(f"{bucket} keys" for bucket in BUCKETS)), table))

# %% Sums over the vocabulary: 64 columns in calls of N
COLUMNS, VOCABULARIES, CALLS = 64, (4096, 32000, 49152), (8, 16, 32)


def _relative(logits: jax.Array) -> jax.Array:
    return jnp.exp(logits - jnp.max(logits, axis=0))


OVER_VOCABULARY: dict[str, Sum] = {
    "jnp.sum(exp)": lambda x: jnp.sum(jnp.exp(x - jnp.max(x, axis=0)), axis=0),
    "jax.nn.logsumexp": lambda x: jax.nn.logsumexp(x, axis=0),
    "token_logprob (the code)": lambda x: token_logprob(x, jnp.zeros(x.shape[1], jnp.int32)),
    "draw: block totals (the code)": lambda x: jnp.sum(vocabulary.blocks(_relative(x), 0.0), axis=1),
    "draw: cumulative sums (the code)": lambda x: vocabulary.cumulative(_relative(x)),
    "top-p: jnp.sum over 128 candidates": lambda x: jnp.sum(_relative(x)[:128], axis=0),
    "top-p: sum_first over 128 candidates (the code)": lambda x: sum_first(_relative(x)[:128]),
}


def columns_differing(form: Sum, logits: np.ndarray, count: int) -> int:
    run = jax.jit(form)
    whole = np.asarray(run(logits))
    parts = [np.asarray(run(logits[:, at : at + count])) for at in range(0, COLUMNS, count)]
    unequal = np.concatenate(parts, axis=-1) != whole
    return int(np.sum(np.any(unequal.reshape(-1, COLUMNS), axis=0)))


table = []
for name, form in OVER_VOCABULARY.items():
    cells: list[object] = [name]
    for size in VOCABULARIES:
        logits = np.random.default_rng(3).standard_normal((size, COLUMNS)).astype(np.float32) * 3
        cells.extend(columns_differing(form, logits, count) for count in CALLS)
    table.append(cells)
print(f"\nover the vocabulary: columns of {COLUMNS} that differ between calls of N columns and one call\n")
print(markdown_table(("form", *(f"V = {v}, N = {count}" for v in VOCABULARIES for count in CALLS)), table))


# %% The whole decode step, with and without
@contextlib.contextmanager
def replaced(*targets: tuple[object, str, object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in targets:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


NORMS = ((layers, "sum_last", plain_sum_last),)
SUMMED = (
    *NORMS,
    (attention_xla, "sum_last", plain_sum_last),
    (logprobs, "total", plain_sum_first),
)
STEPS = {
    "fixed orders, blocks of keys (the code)": (),
    "jnp.sum in the norms": NORMS,
    "jnp.sum in norms, softmax and log-probabilities": SUMMED,
    "the same, and one softmax over the bucket": (*SUMMED, (attention_xla, "_attention", plain_by_block)),
}
spec = ModelSpec(SMOLLM2_135M, jnp.dtype(jnp.bfloat16))
weights = random_weights(spec)
columns = {}
for rows, bucket in ((8, 256), (32, 256), (8, 1024)):
    steps = {}
    for name, targets in STEPS.items():
        with replaced(*targets):
            steps[name] = DecodeStep(
                spec, weights, rows=rows, length=bucket - 80, key_length=bucket, positions=bucket
            )
    times = interleave(steps, rounds)
    columns[f"B = {rows}, {bucket} keys"] = {name: each.milliseconds() for name, each in times.items()}
    del steps
print("\nms per decode step, bfloat16\n")
print(
    markdown_table(("sums", *columns), [[name, *(each[name] for each in columns.values())] for name in STEPS])
)
