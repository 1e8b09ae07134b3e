"""Tensor parallelism: which part of each weight and cache a device holds, and how features are gathered.

Every weight is sharded by output features, so that each dot product runs over its whole width on one device, in the
same order as on a single device. Features are gathered before they become inputs. Gathering adds nothing, so results
are the same for any number of devices, as long as a feature's bits do not depend on the number of features in a
product. If a small number would change bits, every device has the whole weight and computes all features. Megatron
(Shoeybi et al. 2019) instead adds partial sums, in an order that depends on the devices.

Heads are not split: a device has key/value heads with their queries. With more devices than key/value heads, several
devices hold the same one and share its queries. Uneven shards are padded with zeros.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.recurrent.native import has_native_rule
from xla_engine.graphs.recurrent_forms import DeltaForm

AXIS = "tp"  # axis of the mesh

# The kinds of features: of query heads, of key/value heads; of latent attention's queries before and behind the keys'
# product, and of its values; of the residual stream, inside an MLP, inside an expert or the shared expert, of what
# experts take if that is not the stream, of the output of a recurrent layer, of the vocabulary.
Kind = Literal[
    "queries",
    "keys",
    "latent_queries",
    "latent_keys",
    "latent_values",
    "residual",
    "mlp",
    "expert",
    "shared_expert",
    "latent",
    "values",
    "vocabulary",
]
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is sharded.

    config: of the whole model.
    devices: how many; None: one, without a mesh.
    task: features that must stay together, because a product processes this many at once.
    least: the fewest features of a product on a device; 1: no limit. If a shard would have fewer, the weight is not
        sharded. Does not apply to the products of experts.
    """

    config: ModelConfig
    devices: int | None = None
    task: int = 1
    least: int = 1

    @property
    def local(self) -> ModelConfig:
        """The configuration with the heads of one device; all else is as in the whole model."""
        return self._with_heads(1)

    @property
    def across(self) -> ModelConfig:
        """The configuration with the heads of all devices, including padding and copies."""
        return self._with_heads(self.devices or 1)

    def gather(self, x: jax.Array, kind: Kind, axis: int = 1) -> jax.Array:
        """`x` with the features of all devices along `axis`, in the model's order; `x` itself if it has all."""
        if self.devices is None or _is_whole(_held(self, kind)):
            return x
        every = x if self.devices == 1 else lax.all_gather(x, AXIS, axis=axis, tiled=True)
        order = _order(self, kind)
        if np.array_equal(order, np.arange(len(order))):  # padding is at the end, if there is any
            every = lax.slice_in_dim(every, 0, len(order), axis=axis)
        else:
            every = jnp.take(every, order, axis=axis)
        # Otherwise XLA swaps a product's operands to avoid a transpose, and may not support the result in bf16.
        return lax.optimization_barrier(every) if self.devices > 1 else every

    def own(self, x: jax.Array, kind: Kind) -> jax.Array:
        """This device's features of `x [N, F]`, which has all of them; `x` itself without a mesh."""
        return x if self.devices is None else _part(x, _held(self, kind))

    def own_heads(self, qkv: jax.Array) -> jax.Array:
        """This device's queries, keys, values and gates from a projection `[N, F]`, which may contain all heads'."""
        return qkv if self.devices is None or self.cuts_qkv else _part(qkv, _qkv(self))

    def own_latent_queries(self, q: jax.Array) -> jax.Array:
        """The same of latent attention's queries, before the keys' product."""
        if self.devices is None or not _is_whole(_held(self, "latent_queries")):
            return q
        return _part(q, _latent(self, "latent_queries"))

    @property
    def cuts_recurrent(self) -> bool:
        """Whether the heads of recurrent layers are sharded.

        Only those of DeltaNet are, and not if XLA runs the rule, or the product before it: fewer heads then have
        other bits (findings/many_devices.md).
        """
        form = self.config.delta
        return form is not None and not form.gate_rank and self.least == 1 and has_native_rule(form)

    @property
    def cuts_qkv(self) -> bool:
        """Whether the projection of attention is sharded, so that each device computes only its own heads."""
        return _qkv(self).shape[1] >= self.least

    def looked_up(self, lookup: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> jax.Array:
        """`lookup(tokens [N])`, float32 `[N, ...]`, with a sharded vocabulary.

        The devices' bits are added as integers; all but one device's are zero.
        """
        held = None if self.devices is None else _held(self, "vocabulary")
        if held is None or _is_whole(held) or self.devices == 1:
            return lookup(tokens)
        width = held.shape[1]
        own = tokens - lax.axis_index(AXIS).astype(tokens.dtype) * width
        here = (own >= 0) & (own < width)
        bits = lax.bitcast_convert_type(lookup(jnp.where(here, own, 0)), jnp.int32)
        here = here.reshape(-1, *[1] * (bits.ndim - 1))
        return lax.bitcast_convert_type(lax.psum(jnp.where(here, bits, 0), AXIS), jnp.float32)

    def cut(self, kind: Kind, axis: int = 0, *, paired: bool = False) -> Cut | None:
        """How a weight is sharded whose features along `axis` are of this kind; None: it is replicated.

        paired: the features are gates of this kind, then ups. Weights are `[out, in]`, those of experts `[E, out,
            in]`.
        """
        if self.devices is None:
            return None
        held = _held(self, kind)
        return _cut(_side_by_side((held, int(held.max()) + 1), (held, 0)) if paired else held, axis)

    @property
    def cut_qkv(self) -> Cut | None:
        """How the fused projection of attention is sharded."""
        return _cut(_qkv(self)) if self.devices is not None and self.cuts_qkv else None

    @property
    def cut_sinks(self) -> Cut | None:
        """How vectors with one number per query head are sharded."""
        size = self.config.head_dim
        return None if self.devices is None else _cut(_held(self, "queries")[:, ::size] // size)

    @property
    def cut_recurrent(self) -> tuple[Cut | None, Cut | None, Cut | None]:
        """How a recurrent layer is sharded: its projection, its convolution, and vectors with one number per value
        head."""
        form, devices = self.config.delta, self.devices
        if form is None or devices is None or not self.cuts_recurrent:
            return None, None, None
        keys, values = _groups(form.key_heads, form.value_heads // form.key_heads, devices)
        key, value = _features(keys, form.key_dim), _features(values, form.value_dim)
        heads = _features(values, 1)
        mixed = [(key, form.key_heads * form.key_dim)] * 2 + [(value, form.inner_features)]
        ends = [(value, form.inner_features), (heads, form.value_heads), (heads, 0)]
        return _cut(_side_by_side(*mixed, *ends)), _cut(_side_by_side(*mixed)), _cut(heads)

    def _with_heads(self, times: int) -> ModelConfig:
        c = self.config
        if self.devices is None:
            return c
        delta = c.delta
        if delta is not None and self.cuts_recurrent:
            delta = _delta_of(delta, self.devices, times)

        def heads(keys: int) -> tuple[int, int]:
            """Key/value and query heads, if the model has `keys` key/value heads."""
            _, queries = _groups(keys, c.num_attention_heads // keys, self.devices or 1)
            return times * queries.shape[1], times * queries.shape[1] * queries.shape[2]

        keys, queries = heads(c.num_key_value_heads)
        # Layers of other heads (`ModelConfig.layer`) are asked for their keys only; their own sharding has all heads.
        other = None if c.num_global_key_value_heads is None else heads(c.num_global_key_value_heads)[0]
        return replace(
            c,
            num_key_value_heads=keys,
            num_attention_heads=queries if other is None else math.lcm(queries, other),
            num_global_key_value_heads=other,
            delta=delta,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How a weight is sharded along `axis`. rows `[devices, width]`: each device's indices, -1 for zeros."""

    axis: int
    rows: Indices

    def shape(self, whole: tuple[int, ...], devices: int = 1) -> tuple[int, ...]:
        """The shape of what `devices` devices together hold of a weight of shape `whole`."""
        return (*whole[: self.axis], devices * self.rows.shape[1], *whole[self.axis + 1 :])

    def flat(self, count: int, size: int) -> Cut:
        """The same for `count` vectors of `size` features each, flattened into one."""
        first = np.arange(count)[:, None] * size
        rows = self.rows[:, None]
        return Cut(0, np.where(rows < 0, -1, first + rows).reshape(len(rows), -1))

    def by_rows(self, whole: tuple[int, ...]) -> Cut:
        """The same of a weight viewed as `[rows, columns]`."""
        return Cut(0, np.stack([self.flat_rows(device, whole) for device in range(len(self.rows))]))

    def flat_rows(self, device: int, whole: tuple[int, ...]) -> Indices:
        """A device's rows of a weight viewed as `[rows, columns]`, or its entries of a vector."""
        rows = self.rows[device]
        if self.axis == 0:
            return rows
        first = np.arange(whole[0])[:, None] * whole[1]
        return np.where(rows < 0, -1, first + rows).reshape(-1)


def _groups(heads: int, queries: int, devices: int) -> tuple[Indices, Indices]:
    """The key/value heads of each device `[devices, U]`, and their query heads `[devices, U, Q]`; -1 for padding.

    Each of `heads` key/value heads has `queries` consecutive query heads.
    """
    shares = min(max(devices // heads, 1), queries)  # devices that hold the same key/value head
    each, units = -(-queries // shares), heads * shares
    width = -(-units // devices)
    unit = np.arange(devices * width).reshape(devices, width)
    head, share = np.where(unit < units, unit // shares, -1), unit % shares
    place = share[:, :, None] * each + np.arange(each)
    there = (head[:, :, None] >= 0) & (place < queries)
    return head, np.where(there, head[:, :, None] * queries + place, -1)


def _delta_of(form: DeltaForm, devices: int, times: int) -> DeltaForm:
    """The form with the heads of `times` of the devices."""
    _, values = _groups(form.key_heads, form.value_heads // form.key_heads, devices)
    keys = times * values.shape[1]
    return replace(form, key_heads=keys, value_heads=keys * values.shape[2])


def _part(x: jax.Array, rows: Indices) -> jax.Array:
    """This device's features `rows` of `x [N, F]`, zero for padding."""
    devices, width = rows.shape
    if _is_whole(rows):
        return x
    if not _is_consecutive(rows):
        mine = jnp.asarray(np.where(rows < 0, x.shape[1], rows), jnp.int32)[lax.axis_index(AXIS)]
        return x.at[:, mine].get(mode="fill", fill_value=0)
    missing = rows.size - x.shape[1]
    padded = jnp.pad(x, ((0, 0), (0, missing))) if missing else x
    if devices == 1:
        return padded
    return lax.dynamic_slice_in_dim(padded, lax.axis_index(AXIS) * width, width, axis=1)


def _features(heads: Indices, size: int) -> Indices:
    """The features `[devices, F]` of heads `[devices, ...]` with `size` features each."""
    features = np.where(heads[..., None] < 0, -1, heads[..., None] * size + np.arange(size))
    return features.reshape(len(heads), -1)


def _even(count: int, devices: int, task: int) -> Indices:
    """Distribute `count` features evenly, in multiples of `task`: `[devices, F]`."""
    return _up_to(count, devices, -(-count // (devices * task)) * task)


def _odd(count: int, devices: int, task: int) -> Indices:
    """The same if `count` is no multiple of `task`: then no device's number is one, either, because products treat
    other numbers differently and may add a residual in other steps."""
    width = -(-count // (devices * (task // 2))) * (task // 2)
    return _up_to(count, devices, width if width % task else width + task // 2)


def _up_to(count: int, devices: int, width: int) -> Indices:
    features = np.arange(devices * width).reshape(devices, width)
    return np.where(features < count, features, -1)


@functools.cache
def _held(sharding: Sharding, kind: Kind) -> Indices:
    """The features of a kind that each device holds, `[devices, width]`, -1 for padding."""
    c, devices = sharding.config, sharding.devices
    assert devices is not None
    if kind in ("queries", "keys"):
        keys, queries = _groups(
            c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads, devices
        )
        return _features(queries if kind == "queries" else keys, c.head_dim)
    if c.latent is not None and kind in ("latent_queries", "latent_keys", "latent_values"):
        # A product by head has the same bits for any number of heads.
        held = _latent(sharding, kind)
        is_small = kind == "latent_queries" and held.shape[1] < sharding.least
        return _everywhere(c.num_attention_heads * c.latent.query_dim, devices) if is_small else held
    if kind == "values":
        assert c.recurrent is not None
        if c.delta is None or not sharding.cuts_recurrent:
            return _everywhere(c.recurrent.inner_features, devices)
        _, values = _groups(c.delta.key_heads, c.delta.value_heads // c.delta.key_heads, devices)
        return _features(values, c.delta.value_dim)
    sizes = {"residual": c.hidden_size, "mlp": c.intermediate_size, "vocabulary": c.vocab_size}
    if c.experts is not None:
        sizes["expert"] = c.experts.moe_intermediate_size
        sizes["shared_expert"] = c.experts.shared_expert_intermediate_size
        sizes["latent"] = c.experts.moe_latent_size
    is_odd = kind == "residual" and c.hidden_size % sharding.task
    held = (_odd if is_odd else _even)(sizes[kind], devices, sharding.task)
    is_whole = kind != "expert" and held.shape[1] < sharding.least
    return _everywhere(sizes[kind], devices) if is_whole else held


def _latent(sharding: Sharding, kind: Kind) -> Indices:
    """The features of latent attention that each device's query heads have."""
    c, devices = sharding.config, sharding.devices
    assert c.latent is not None and devices is not None
    _, heads = _groups(1, c.num_attention_heads, devices)
    sizes = {"latent_queries": c.latent.query_dim, "latent_keys": c.latent.kv_lora_rank}
    return _features(heads, sizes.get(kind, c.latent.v_head_dim))


@functools.cache
def _order(sharding: Sharding, kind: Kind) -> Indices:
    """Where each feature of the model is among those of all devices side by side; of copies the first."""
    found, place = np.unique(_held(sharding, kind).reshape(-1), return_index=True)
    return place[found >= 0]


def _everywhere(count: int, devices: int) -> Indices:
    return np.tile(np.arange(count), (devices, 1))


def _is_whole(rows: Indices) -> bool:
    """Whether each device has all rows."""
    return bool((rows == np.arange(rows.shape[1])).all())


def _is_consecutive(held: Indices) -> bool:
    flat = held.reshape(-1)
    count = int((flat >= 0).sum())
    return np.array_equal(flat[:count], np.arange(count))


def _cut(rows: Indices, axis: int = 0) -> Cut | None:
    return None if _is_whole(rows) else Cut(axis, rows)


@functools.cache
def _qkv(sharding: Sharding) -> Indices:
    """The rows of the fused projection that go with each device's heads, `[devices, F]`."""
    c, held = sharding.config, functools.partial(_held, sharding)
    queries, keys, count = held("queries"), held("keys"), c.num_key_value_heads * c.head_dim
    parts = [(queries, c.num_attention_heads * c.head_dim), *[(keys, count)] * c.stored_parts]
    return _side_by_side(*parts, *[(queries, 0)] * c.attn_output_gate)


def _side_by_side(*parts: tuple[Indices, int]) -> Indices:
    """Parts of a leaf's rows that each device holds `[devices, ...]`, and how many rows each has in the leaf."""
    first, found = 0, []
    for held, size in parts:
        found.append(np.where(held < 0, -1, first + held))
        first += size
    return np.concatenate(found, axis=1)
