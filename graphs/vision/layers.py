"""The layers of all vision towers.

Every patch of a picture sees every other. With many patches a layer runs in several calls: queries, keys and values of
all patches, then the rest for one part of the rows after the other. Parts depend on the number of patches alone,
because XLA rounds attention of other shapes in another way.

The residual stream and norms are float32; products run in the weights' dtype, by XLA (why not in C++:
findings/images.md).
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from xla_engine.graphs.inventory import Program, program_name
from xla_engine.graphs.linear.products import rows_first
from xla_engine.graphs.ops.norms import apply_rope, centred, rms_norm
from xla_engine.graphs.vision.config import PatchConfig, VisionConfig

# Kinds of programs: before the layers, whole or in parts, at layers whose output is read, and behind the layers.
EMBED, LAYER, HEADS = "vision_embed", "vision_layer", "vision_heads"
ROWS, TAP, PROJECT = "vision_rows", "vision_tap", "vision_project"
_SCORES = 1 << 22  # of a head in a call

Config = VisionConfig | PatchConfig
Leaves = Mapping[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def rows_of_part(rows: int, unit: int = 1) -> int:
    """The rows of a layer that a call takes: whole units, of which there are more in `rows`."""
    most = max(min(rows, _SCORES // rows), unit)
    return next(each for each in range(most // unit * unit, 0, -unit) if rows % each == 0)


def norm_shapes(name: str, size: int) -> Shapes:
    return {name: (size,), f"{name}_bias": (size,)}


def linear_shapes(name: str, rows: int, columns: int) -> Shapes:
    return {name: (rows, columns), f"{name}_bias": (rows,)}


def layer_shapes(c: Config) -> Shapes:
    d, f = c.hidden_size, c.intermediate_size
    if isinstance(c, PatchConfig) and c.pooled is not None:
        inner = c.num_attention_heads * c.head_dim
        norms = dict.fromkeys(("norm1", "output_norm", "norm2", "down_norm"), (d,))
        heads = dict.fromkeys(("q_norm", "k_norm"), (c.head_dim,))
        products = {"qkv": (3 * inner, d), "output": (d, inner), "gate_up": (2 * f, d), "down": (d, f)}
        parts = {"qkv": 3, "output": 1, "gate_up": 2, "down": 1} if c.pooled.clipped else {}
        bounds = {f"{name}_bounds": (4 * count,) for name, count in parts.items()}
        return {**norms, **heads, **products, **bounds}
    if isinstance(c, PatchConfig) and c.gated:
        return {
            "norm1": (d,),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
            "norm2": (d,),
            **linear_shapes("qkv", 3 * d, d),
            **linear_shapes("output", d, d),
            **linear_shapes("gate_up", 2 * f, d),
            **linear_shapes("down", d, f),
        }
    return {
        **norm_shapes("norm1", d),
        **linear_shapes("qkv", 3 * d, d),
        **linear_shapes("output", d, d),
        **norm_shapes("norm2", d),
        **linear_shapes("up", f, d),
        **linear_shapes("down", d, f),
    }


def all_layer_shapes(c: Config) -> Shapes:
    return {
        f"layers.{index}.{name}": shape
        for index in range(c.num_hidden_layers)
        for name, shape in layer_shapes(c).items()
    }


def abstract(shapes: Shapes, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Leaves of these shapes: matrices in `dtype`, vectors in float32."""
    return {
        name: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.float32)
        for name, shape in shapes.items()
    }


def layer_programs(c: Config, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs of a layer, which are called with the leaves of each: one, or two if a part has fewer rows."""
    leaves, count = abstract(layer_shapes(c), dtype), jax.ShapeDtypeStruct((), jnp.int32)
    x = jax.ShapeDtypeStruct((rows, c.hidden_size), jnp.float32)
    seen = [jax.ShapeDtypeStruct((c.num_attention_heads, rows, c.head_dim), dtype)] * 3
    angles = jax.ShapeDtypeStruct((rows, 2, c.head_dim // 2), jnp.float32)
    picture = (angles, count) if isinstance(c, PatchConfig) else ()

    def whole(leaves: Leaves, x: jax.Array, *picture: jax.Array) -> jax.Array:
        return layer(c, leaves, x, *picture)

    def of_all(leaves: Leaves, x: jax.Array, *picture: jax.Array) -> list[jax.Array]:
        return heads(c, leaves, x, *picture[:1])

    def of_part(
        leaves: Leaves, x: jax.Array, seen: list[jax.Array], start: jax.Array, *picture: jax.Array
    ) -> jax.Array:
        queries, keys, values = seen
        own = attended(c, lax.dynamic_slice_in_dim(queries, start, part, 1), keys, values, *picture[1:])
        behind_them = behind(c, leaves, lax.dynamic_slice_in_dim(x, start, part), own)
        return lax.dynamic_update_slice_in_dim(x, behind_them, start, 0)

    if part == rows:
        name = program_name(LAYER, rows=rows)
        return [Program(name=name, function=whole, arguments=(leaves, x, *picture), donate=(1,))]
    return [
        Program(name=program_name(HEADS, rows=rows), function=of_all, arguments=(leaves, x, *picture)),
        Program(
            name=program_name(ROWS, rows=rows),
            function=of_part,
            arguments=(leaves, x, seen, count, *picture),
            donate=(1,),
        ),
    ]


def layer(
    c: Config,
    leaves: Leaves,
    x: jax.Array,
    angles: jax.Array | None = None,
    count: jax.Array | None = None,
) -> jax.Array:
    """The residual stream `[R, D]` after a layer. angles: see `heads`. count: see `attended`."""
    queries, keys, values = heads(c, leaves, x, angles)
    return behind(c, leaves, x, attended(c, queries, keys, values, count))


def heads(c: Config, leaves: Leaves, x: jax.Array, angles: jax.Array | None = None) -> list[jax.Array]:
    """Queries, keys and values of `x [R, D]`: `[H, R, Dh]` each.

    angles: cosines and sines by which queries and keys turn, float32 `[R, 2, Dh/2]`; None: they do not.
    """
    dtype = leaves["qkv"].dtype
    made = linear(leaves, "qkv", normed(leaves, "norm1", x, c.layer_norm_eps)).astype(dtype)
    split = made.reshape(len(x), 3, c.num_attention_heads, c.head_dim)
    if angles is None:
        return list(split.transpose(1, 2, 0, 3))
    own = [split[:, at].astype(jnp.float32) for at in (0, 1)]
    if "q_norm" in leaves:
        norms = (leaves["q_norm"], leaves["k_norm"])
        own = [rms_norm(each, norm, c.layer_norm_eps) for each, norm in zip(own, norms, strict=True)]
    values = split[:, 2]
    if isinstance(c, PatchConfig) and c.pooled is not None:
        turned = [_turned_by_halves(each, angles).astype(dtype) for each in own]
        no_scale = jnp.ones(c.head_dim, jnp.float32)
        values = rms_norm(values.astype(jnp.float32), no_scale, c.layer_norm_eps).astype(dtype)
    else:
        turned = [apply_rope(each, angles).astype(dtype) for each in own]
    return [each.transpose(1, 0, 2) for each in (*turned, values)]


def _turned_by_halves(x: jax.Array, angles: jax.Array) -> jax.Array:
    """As `apply_rope`, but each half of a head `[R, H, Dh]` has pairs of its own, and half of the angles."""
    parts = zip(jnp.split(x, 2, axis=-1), jnp.split(angles, 2, axis=-1), strict=True)
    return jnp.concatenate([apply_rope(half, turn) for half, turn in parts], axis=-1)


def attended(
    c: Config, queries: jax.Array, keys: jax.Array, values: jax.Array, count: jax.Array | None = None
) -> jax.Array:
    """What queries `[H, Q, Dh]` see of the first `count` of R rows, or of all: float32 `[Q, D]`."""
    scores = batched(queries, keys, 2)  # [H, Q, R]
    if not (isinstance(c, PatchConfig) and c.pooled is not None):
        scores = scores * (1 / math.sqrt(c.head_dim))
    if count is not None:
        scores = jnp.where(jnp.arange(keys.shape[1], dtype=jnp.int32) < count, scores, -jnp.inf)
    seen = batched(jax.nn.softmax(scores, axis=-1).astype(values.dtype), values, 1)
    return seen.transpose(1, 0, 2).reshape(-1, c.num_attention_heads * c.head_dim)


def behind(c: Config, leaves: Leaves, x: jax.Array, seen: jax.Array) -> jax.Array:
    """The residual stream `[N, D]` after the rest of a layer, behind attention."""
    x = added(c, leaves, "output", seen, x)
    before = normed(leaves, "norm2", x, c.layer_norm_eps)
    if "gate_up" in leaves:
        hidden = gated(leaves, "gate_up", before, activation(c))
    else:
        hidden = jax.nn.gelu(linear(leaves, "up", before), approximate=True)
    return added(c, leaves, "down", hidden, x)


def added(c: Config, leaves: Leaves, name: str, hidden: jax.Array, x: jax.Array) -> jax.Array:
    """`x` plus a linear layer of `hidden`. The order of the two additions is part of a tower's bits."""
    if isinstance(c, PatchConfig):
        out = linear(leaves, name, hidden)
        norm = leaves.get(f"{name}_norm")
        return x + (out if norm is None else rms_norm(out, norm, c.layer_norm_eps))
    return x + rows_first(leaves[name], hidden) + leaves[f"{name}_bias"]


def linear(leaves: Leaves, name: str, x: jax.Array) -> jax.Array:
    """A product, plus its bias if it has one.

    With bounds `[4 n]`, each of the n parts of the leaf has its own: least and largest of its inputs, then of its
    outputs.
    """
    bounds = leaves.get(f"{name}_bounds")
    if bounds is not None:
        own = bounds.reshape(-1, 4)
        weights = jnp.split(leaves[name], len(own))
        parts = [
            jnp.clip(rows_first(weight, jnp.clip(x, own[at, 0], own[at, 1])), own[at, 2], own[at, 3])
            for at, weight in enumerate(weights)
        ]
        return jnp.concatenate(parts, axis=-1)
    product = rows_first(leaves[name], x)
    return product + leaves[f"{name}_bias"] if f"{name}_bias" in leaves else product


def activation(c: Config) -> Callable[[jax.Array], jax.Array]:
    """Of the gate of a layer's MLP."""
    if isinstance(c, PatchConfig) and c.pooled is not None:
        return functools.partial(jax.nn.gelu, approximate=True)
    return jax.nn.silu


def gated(
    leaves: Leaves, name: str, x: jax.Array, activate: Callable[[jax.Array], jax.Array] = jax.nn.silu
) -> jax.Array:
    """The inner features `[N, F]` of an MLP with a gate (Shazeer 2020). The first half of the leaf makes the gate."""
    gate, up = jnp.split(linear(leaves, name, x), 2, axis=-1)
    return activate(gate) * up


def normed(leaves: Leaves, name: str, x: jax.Array, eps: float) -> jax.Array:
    """`layer_norm`, or RMSNorm (Zhang and Sennrich 2019) if the norm has no bias."""
    return layer_norm(leaves, name, x, eps) if f"{name}_bias" in leaves else rms_norm(x, leaves[name], eps)


def layer_norm(leaves: Leaves, name: str, x: jax.Array, eps: float) -> jax.Array:
    """LayerNorm (Ba et al. 2016) of `x [N, D]`, float32."""
    return rms_norm(centred(x), leaves[name], eps) + leaves[f"{name}_bias"]


def batched(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Contract the last axis of `left [H, M, K]` with `axis` of right: float32 `[H, M, N]`."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left,
        right,
        (((2,), (axis,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
