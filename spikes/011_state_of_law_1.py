# Frozen: runs at commit 84bfb74.
"""Which forms give a row the same bits whatever its index and the number of rows, and what do they cost?

Each form runs a pool of rows in calls of N. "moved": the rows of a call change places. "N": another number of rows per
call against 16. Both in numbers of values whose bits differ.

    python -m spikes.011_state_of_law_1

On a GPU it writes findings/011_state_of_law_1_<device>.md; on a CPU it prints the same, for the finding has a story.
"""

# %%
from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
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
from xla_engine.graphs.attention.backend import AttentionCall, AttentionWeights, LayerCache
from xla_engine.graphs.config import AttentionForm
from xla_engine.graphs.linear import products as projection
from xla_engine.graphs.linear.products import ROWS_LEFT, WEIGHT_LEFT, feature_major
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.ops import norms as layers
from xla_engine.graphs.ops import reductions as vocabulary
from xla_engine.graphs.ops.fixed_order_sums import sum_last
from xla_engine.graphs.ops.norms import rms_norm
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.graphs.row_state.lanes import Extents
from xla_engine.graphs.sampling import logprobs
from xla_engine.graphs.steps import decode as decode_graph
from xla_engine.runner.backends import choose_attention

arguments = argparse.ArgumentParser()
arguments.add_argument("--rounds", type=int, default=15)
arguments.add_argument("--attention", help="the attention_backend to look at; xla on a CPU, else auto")
options = arguments.parse_known_args()[0]

POOL, BASE = 192, 16  # rows; rows per call that the others are held against
COUNTS = (1, 2, 4, 8, 12, 24, 32, 48, 64)
attention = choose_attention(options.attention or ("xla" if jax.default_backend() == "cpu" else "auto"))
rng = np.random.default_rng(11)
printed: list[str] = []


def say(text: str) -> None:
    printed.append(text)
    print(text, flush=True)


Form = Callable[..., jax.Array]  # rows first, and first in the result


def differing(got: np.ndarray, want: np.ndarray) -> int:
    return int(np.sum(got.view(np.int32) != want.view(np.int32)))


class InLayout:
    """A form whose last two arguments are a cache: rows first outside, in the backend's layout for the program."""

    def __init__(self, form: Form, row_axis: int) -> None:
        self._run = jax.jit(form)
        self._row_axis = row_axis

    def __call__(self, *arguments: np.ndarray) -> jax.Array:
        *rest, keys, values = arguments
        kept = (np.ascontiguousarray(np.moveaxis(leaf, 0, self._row_axis)) for leaf in (keys, values))
        return self._run(*rest, LayerCache(*kept))


def in_calls_of(
    count: int, form: Form, rows: tuple[np.ndarray, ...], *fixed: object, turn: int = 0
) -> np.ndarray:
    """All rows in calls of `count`, which are turned by `turn` places inside each call; float32."""
    run = form if isinstance(form, InLayout) else jax.jit(form)
    parts = []
    for at in range(0, len(rows[0]), count):
        part = [np.roll(each[at : at + count], turn, axis=0) for each in rows]
        parts.append(np.roll(np.asarray(run(*fixed, *part), np.float32), -turn, axis=0))
    return np.concatenate(parts)


def state(
    form: Form, rows: tuple[np.ndarray, ...], *fixed: object, base: np.ndarray | None = None
) -> list[str]:
    """The two cells of a form: what differs when rows move, and for other N than BASE, each as `N: values`."""
    base = in_calls_of(BASE, form, rows, *fixed) if base is None else base
    moved, other = {}, {}
    for count in COUNTS:
        plain = in_calls_of(count, form, rows, *fixed)
        other[count] = differing(plain, base)
        moved[count] = differing(in_calls_of(count, form, rows, *fixed, turn=1), plain)
    return [cell(moved), cell(other)]


def cell(values: dict[int, int]) -> str:
    return ", ".join(f"{count}: {value}" for count, value in values.items() if value) or "same"


header = f"{describe_machine()}, attention backend {attention.name}"
say(header)

# %% Products: weight [F, D], rows [N, D]
SHAPES = {
    "SmolLM2 gate_up 3072 x 576": (3072, 576),
    "SmolLM2 down 576 x 1536": (576, 1536),
    "256 x 256": (256, 256),
}
TYPES = ("bfloat16", "float32")
table: list[list[object]] = []
for name, (features, size) in SHAPES.items():
    weight = rng.standard_normal((features, size)).astype(np.float32) * 0.05
    rows = (rng.standard_normal((POOL, size)).astype(np.float32),)
    for dtype in TYPES:
        left = jnp.asarray(weight, dtype)
        base = in_calls_of(BASE, WEIGHT_LEFT.linear, rows, left)
        prefill = differing(in_calls_of(POOL, ROWS_LEFT.linear, rows, left), base)
        for order, form in (("weight left", WEIGHT_LEFT.linear), ("rows left", ROWS_LEFT.linear)):
            cells = state(form, rows, left, base=base if form is WEIGHT_LEFT.linear else None)
            table.append([name, dtype, order, *cells, prefill if form is ROWS_LEFT.linear else ""])
say(f"\n### Products, {POOL} rows\n")
say(
    markdown_table(
        ("weight", "dtype", "form", "moved", "N", f"{POOL} rows left against 16 weight left"), table
    )
)


# %% Row-wise pieces
def plain_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def plain_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def softmax_in_order(x: jax.Array) -> jax.Array:
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weights / sum_last(weights)


def plain_logprob(head: jax.Array, x: jax.Array) -> jax.Array:
    logits = feature_major(head, x)
    return jnp.max(jax.nn.log_softmax(logits, axis=0), axis=0)


def logprob(head: jax.Array, x: jax.Array) -> jax.Array:
    logits = feature_major(head, x)
    return token_logprob(logits, vocabulary.argmax(logits))


def plain_gated(weight: jax.Array, x: jax.Array) -> jax.Array:
    """`gated` with silu over `[F, N]`."""
    gate, up = jnp.split(lax.optimization_barrier(feature_major(weight, x)), 2)
    return (jax.nn.silu(gate) * up).astype(weight.dtype).T


class PlainGated(projection.XlaProducts):
    """Weight left, with `plain_gated`."""

    def gated(self, weight, x, *, norm=None, bias=None, activation="silu"):  # type: ignore[no-untyped-def, override]
        return plain_gated(weight, projection.normed(x, norm))


narrow = (rng.standard_normal((POOL, 256)).astype(np.float32) * 3,)
unit = jnp.eye(256)
head = jnp.asarray(rng.standard_normal((4096, 256)) * 0.3, jnp.bfloat16)
PIECES: dict[str, tuple[Form, tuple[object, ...]]] = {
    "sum_last, width 256 (the code)": (sum_last, ()),
    "jnp.sum": (plain_sum, ()),
    "rms_norm (the code)": (lambda x: rms_norm(x, jnp.ones(256), 1e-5), ()),
    "norm with jnp.mean": (plain_norm, ()),
    "softmax with sum_last (the code)": (softmax_in_order, ()),
    "jax.nn.softmax": (jax.nn.softmax, ()),
    "gated MLP, unit weights, silu over flat rows (the code)": (
        lambda weight, x: WEIGHT_LEFT.gated(weight, x).values.T,
        (jnp.tile(unit, (2, 1)),),
    ),
    "the same, silu over [F, N]": (plain_gated, (jnp.tile(unit, (2, 1)),)),
    "token_logprob, V = 4096 (the code)": (logprob, (head,)),
    "jax.nn.log_softmax": (plain_logprob, (head,)),
}
table = [[name, *state(form, narrow, *fixed)] for name, (form, fixed) in PIECES.items()]
say(f"\n### Row-wise pieces in float32, {POOL} rows\n")
say(markdown_table(("form", "moved", "N"), table))

# %% Attention through the backend: decode rows, prefill lanes, and one against the other
HEADS = {"SmolLM2 9/3 x 64": (9, 3, 64), "Qwen3 16/8 x 128": (16, 8, 128), "embedded 8/2 x 32": (8, 2, 32)}
FEW, POSITIONS, WIDTH, LANES = 64, 512, 16, (1, 2, 8, 16)
small = dataclasses.replace(SMOLLM2_135M, max_position_embeddings=POSITIONS)


def form_of(rope: jax.Array) -> AttentionForm:
    return AttentionForm(scale=(2 * rope.shape[-1]) ** -0.5, window=None, softcap=None, norm_eps=1e-5)


def decode_form(dtype: str, row_axis: int) -> Form:
    def form(qkv: jax.Array, rope: jax.Array, length: jax.Array, layer: LayerCache) -> jax.Array:
        call = AttentionCall(form_of(rope), AttentionWeights(), rope, POSITIONS, jnp.dtype(dtype))
        _, out = attention.attend_decode(layer, qkv, call, length=length, live=jnp.ones(len(qkv), bool))
        return out.astype(jnp.float32)

    return InLayout(form, row_axis)


def prefill_form(dtype: str, row_axis: int) -> Form:
    """The same queries as the only token of one lane each."""

    def form(qkv: jax.Array, rope: jax.Array, length: jax.Array, layer: LayerCache) -> jax.Array:
        lanes = len(qkv)
        tokens = jnp.zeros((lanes, WIDTH, qkv.shape[1])).at[:, 0].set(qkv)
        wide = jnp.broadcast_to(rope[:, None], (lanes, WIDTH, *rope.shape[1:]))
        _, out = attention.attend_prefill(
            layer,
            tokens.reshape(lanes * WIDTH, -1),
            AttentionCall(form_of(rope), AttentionWeights(), wide, POSITIONS, jnp.dtype(dtype)),
            Extents(jnp.arange(lanes, dtype=jnp.int32), length, jnp.ones(lanes, jnp.int32)),
        )
        return out.reshape(lanes, WIDTH, -1)[:, 0].astype(jnp.float32)

    return InLayout(form, row_axis)


table = []
for name, (heads, kv_heads, head_dim) in HEADS.items():
    config = dataclasses.replace(
        small, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim
    )
    length = rng.integers(1, 400, FEW).astype(np.int32)
    qkv = rng.standard_normal((FEW, (heads + 2 * kv_heads) * head_dim)).astype(np.float32)
    rope = rope_tables(config, POSITIONS)[0, length]
    for dtype in TYPES:
        stored = rng.standard_normal((2, FEW, kv_heads, POSITIONS, head_dim)).astype(
            np.dtype(jnp.dtype(dtype))
        )
        layer = attention.from_host(*stored)
        row_axis = list(layer.keys.shape).index(FEW)
        kept = [np.moveaxis(np.asarray(leaf), row_axis, 0) for leaf in layer]
        pool = (qkv, rope, length, *kept)
        decode = in_calls_of(BASE, decode_form(dtype, row_axis), pool)
        cells = state(decode_form(dtype, row_axis), pool, base=decode)
        by_lanes = {count: in_calls_of(count, prefill_form(dtype, row_axis), pool) for count in LANES}
        lanes = {count: differing(found, by_lanes[LANES[-1]]) for count, found in by_lanes.items()}
        table.append([name, dtype, *cells, cell(lanes), differing(by_lanes[8], decode)])
say(f"\n### Attention, {FEW} rows of up to 400 keys in a bucket of {POSITIONS}\n")
columns = (
    "heads",
    "dtype",
    "decode: moved",
    "decode: N",
    f"prefill: lanes against {LANES[-1]}",
    "prefill against decode",
)
say(markdown_table(columns, table))


# %% What the forms of the code cost, in a whole decode step
@contextlib.contextmanager
def replaced(*targets: tuple[object, str, object]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for owner, name, value in targets:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def one_softmax(
    q: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, *, keys_left: bool
) -> jax.Array:
    """Attention over all keys at once: q `[N, KV, R, Dh]`, keys and values `[J, N, KV, block, Dh]`."""
    shape = (*q.shape[:2], -1, q.shape[-1])
    keys, values = (jnp.moveaxis(each, 0, 2).reshape(shape) for each in (keys, values))
    scores = jnp.einsum("nkrd,nksd->nkrs", q.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores * q.shape[-1] ** -0.5, -jnp.inf))
    return jnp.einsum(
        "nkrs,nksd->nkrd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )


FAST = [
    (layers, "sum_last", plain_sum),
    (logprobs, "total", lambda x: jnp.sum(x, axis=0)),
    (logprobs, "relative", lambda x, peak: jnp.exp(x - peak)),
]
if attention.name == "xla":
    FAST.append((attention_xla, "_attention", one_softmax))
dtype = jnp.dtype(jnp.bfloat16)
spec = ModelSpec(SMOLLM2_135M, dtype, attention)
weights = random_weights(spec)
table = []
for count, length in ((8, 128), (32, 128)):
    size = {"rows": count, "length": length, "key_length": 256, "positions": 256}
    steps = {"the code": DecodeStep(spec, weights, **size)}
    fast = PlainGated(weight_left=True)
    with replaced(*FAST, (decode_graph, "WEIGHT_LEFT", fast)):
        steps["nothing in a fixed order"] = DecodeStep(spec, weights, **size)
    times = interleave(steps, options.rounds)
    code, other = times.values()
    ratios = sorted(a / b for a, b in zip(code.seconds, other.seconds, strict=True))
    middle = ratios[len(ratios) // 2]
    table.append([f"B = {count}", code.milliseconds(), other.milliseconds(), f"{middle:.3f}"])
say("\n### Decode step, SmolLM2-135M shapes, bfloat16, 128 keys, ms: median (least-most)\n")
say(markdown_table(("", "the code", "nothing in a fixed order", "median ratio"), table))

# %% On a GPU: its own finding
if jax.default_backend() != "cpu":
    device = jax.devices()[0].device_kind.lower().replace(" ", "_")
    path = Path(__file__).parent.parent / "findings" / f"011_state_of_law_1_{device}.md"
    question = __doc__.split("\n\n")
    path.write_text(
        f"# 011 State of law 1 on {jax.devices()[0].device_kind}\n\n## Question\n\n{question[0]}\n\n{question[1]}\n\n"
        f"## Command\n\n    python -m spikes.011_state_of_law_1\n\n## Setting\n\n{header}\n\n## Table\n"
        + "\n".join(printed[1:])
        + '\n\n## Verdict\n\nWhere a cell says "same", the form keeps law 1 in that respect on this device. '
        "`xla-engine verify` says what the whole engine keeps.\n"
    )
    print(f"written: {path}")
