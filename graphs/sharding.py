"""One model over several devices: which part of each weight and cache a device holds, and how it gets the others'.

Every weight is cut by output features, so that each dot product runs over its whole width on one device, in the order
in which one device alone would take it. Where features become inputs they are gathered. Gathering moves bits and adds
nothing: results are the same for any number of devices, as far as a feature's bits do not depend on how many features
a product has. Where few would make a difference, every device has the whole weight and computes all of them.
Megatron's way (Shoeybi et al. 2019) adds up partial sums, in an order that depends on the devices.

Heads stay whole: a device has key/value heads with their queries. Where there are more devices than key/value heads,
several devices hold the same one and share its queries. What does not come out even is padded with zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_engine.graphs.config import DeltaForm, ModelConfig
from xla_engine.graphs.delta_net.native import fits

AXIS = "tp"  # of the mesh

# What features are: of query heads, of key/value heads, of the residual stream, inside an MLP, inside an expert or the
# shared expert, of the value heads of a linear layer, of the vocabulary.
Kind = Literal["queries", "keys", "residual", "mlp", "expert", "shared_expert", "values", "vocabulary"]
Indices = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model lies on devices.

    config: of the whole model.
    devices: how many; None: one, and programs know no mesh.
    task: features that stay together, because a product takes so many at once.
    least: features of a product that a device has at least; 1 is for products without such a bound. Where it would
        have fewer, no device's weight is cut. The products of experts are free of this.
    """

    config: ModelConfig
    devices: int | None = None
    task: int = 1
    least: int = 1

    @property
    def local(self) -> ModelConfig:
        """The model with the heads that one device has; all else is as in the whole model."""
        return self._with_heads(1)

    @property
    def across(self) -> ModelConfig:
        """The model with the heads of all devices, padding and copies among them."""
        return self._with_heads(self.devices or 1)

    def gather(self, x: jax.Array, kind: Kind, axis: int = 1) -> jax.Array:
        """`x` with the features of all devices along `axis`, in the model's order; x itself where it has all."""
        if self.devices is None or _is_whole(_held(self, kind)):
            return x
        every = x if self.devices == 1 else lax.all_gather(x, AXIS, axis=axis, tiled=True)
        order = _order(self, kind)
        if np.array_equal(order, np.arange(len(order))):  # padding is at the end, if there is any
            every = lax.slice_in_dim(every, 0, len(order), axis=axis)
        else:
            every = jnp.take(every, order, axis=axis)
        # Else XLA turns a product around to get rid of a gather's transpose, into one it may not have in bf16.
        return lax.optimization_barrier(every) if self.devices > 1 else every

    def own(self, x: jax.Array, kind: Kind) -> jax.Array:
        """The device's features of `x [N, F]`, where all devices have all of them; x itself without a mesh."""
        return x if self.devices is None else _part(x, _held(self, kind))

    def own_heads(self, qkv: jax.Array) -> jax.Array:
        """The device's queries, keys, values and gates of a projection `[N, F]`, of which it may have computed all."""
        return qkv if self.devices is None or self.cuts_qkv else _part(qkv, _qkv(self))

    @property
    def cuts_recurrent(self) -> bool:
        """Whether each device has some heads of recurrent layers, and not all.

        Where XLA runs the rule, or the product before it, fewer heads were found to have other bits (findings/050).
        """
        return self.config.delta is not None and self.least == 1 and fits(self.config.delta)

    @property
    def cuts_qkv(self) -> bool:
        """Whether each device computes the projection of its own heads alone."""
        return _qkv(self).shape[1] >= self.least

    def looked_up(self, lookup: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> jax.Array:
        """`lookup(tokens [N])`, float32 `[N, ...]`, which a device can do for tokens of its part of the vocabulary.

        The bits are added up as integers, all but one of them zero.
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

    def cut(self, leaf: str) -> Cut | None:
        """How the weight `leaf` is cut; None: every device has all of it."""
        found = None if self.devices is None else _cut(self, leaf)
        return None if found is None or _is_whole(found.rows) else found

    def _with_heads(self, times: int) -> ModelConfig:
        c = self.config
        if self.devices is None:
            return c
        delta = c.delta
        if delta is not None and self.cuts_recurrent:
            delta = _delta_of(delta, self.devices, times)
        _, queries = _groups(
            c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads, self.devices
        )
        heads = times * queries.shape[1]
        return replace(
            c, num_key_value_heads=heads, num_attention_heads=heads * queries.shape[2], delta=delta
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """axis: along which a weight is cut. rows `[devices, width]`: the indices that each device holds, -1: zeros."""

    axis: int
    rows: Indices

    def shape(self, whole: tuple[int, ...], devices: int = 1) -> tuple[int, ...]:
        """What so many devices hold of a weight of shape `whole`."""
        return (*whole[: self.axis], devices * self.rows.shape[1], *whole[self.axis + 1 :])

    def flat_rows(self, device: int, whole: tuple[int, ...]) -> Indices:
        """The device's rows of a weight seen as `[rows, columns]`; of a vector its entries."""
        rows = self.rows[device]
        if self.axis == 0:
            return rows
        first = np.arange(whole[0])[:, None] * whole[1]
        return np.where(rows < 0, -1, first + rows).reshape(-1)


def _groups(heads: int, queries: int, devices: int) -> tuple[Indices, Indices]:
    """Key/value heads of each device `[devices, U]`, and the query heads that go with each `[devices, U, Q]`.

    `queries` go with each of `heads`, consecutive ones. -1: padding.
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
    """The form with the heads that so many of the devices have together."""
    _, values = _groups(form.key_heads, form.value_heads // form.key_heads, devices)
    keys = times * values.shape[1]
    return replace(form, key_heads=keys, value_heads=keys * values.shape[2])


def _part(x: jax.Array, rows: Indices) -> jax.Array:
    """The features of `x [N, F]` that the device holds of `rows`, zero for padding."""
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
    """The features of heads `[devices, ...]` of so many features each, `[devices, F]`."""
    features = np.where(heads[..., None] < 0, -1, heads[..., None] * size + np.arange(size))
    return features.reshape(len(heads), -1)


def _even(count: int, devices: int, task: int) -> Indices:
    """`count` features in whole tasks, as evenly as these allow, `[devices, F]`."""
    return _up_to(count, devices, -(-count // (devices * task)) * task)


def _odd(count: int, devices: int, task: int) -> Indices:
    """The same where the features are no whole tasks: neither are a device's. Products take these another way, which
    may add a residual up in other steps."""
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
    if kind == "values":
        assert c.delta is not None
        if not sharding.cuts_recurrent:
            return _everywhere(c.delta.inner_features, devices)
        _, values = _groups(c.delta.key_heads, c.delta.value_heads // c.delta.key_heads, devices)
        return _features(values, c.delta.value_dim)
    sizes = {"residual": c.hidden_size, "mlp": c.intermediate_size, "vocabulary": c.vocab_size}
    if c.experts is not None:
        sizes["expert"] = c.experts.moe_intermediate_size
        sizes["shared_expert"] = c.experts.shared_expert_intermediate_size
    is_odd = kind == "residual" and c.hidden_size % sharding.task
    held = (_odd if is_odd else _even)(sizes[kind], devices, sharding.task)
    is_whole = kind != "expert" and held.shape[1] < sharding.least
    return _everywhere(sizes[kind], devices) if is_whole else held


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


@functools.cache
def _cut(sharding: Sharding, leaf: str) -> Cut | None:
    """See `Sharding.cut`. Weights are `[out, in]`, those of experts `[E, out, in]`; vectors go with their outputs."""
    c, held = sharding.config, functools.partial(_held, sharding)
    kind = leaf.split(".", 2)[2] if leaf.startswith("layers.") else leaf
    kind = kind.removesuffix("_scale")  # of a weight in eight bits, one for each row
    if kind in ("embed", "head"):
        return Cut(0, held("vocabulary"))
    if kind in ("output", "output_bias", "down", "down_bias", "experts.shared_down", "delta.output"):
        return Cut(0, held("residual"))
    if kind in ("gate_up", "gate_up_bias"):
        return Cut(0, _side_by_side((held("mlp"), c.intermediate_size), (held("mlp"), 0)))
    if kind in ("qkv", "qkv_bias"):
        return Cut(0, _qkv(sharding)) if sharding.cuts_qkv else None
    if kind == "sinks":
        return Cut(0, held("queries")[:, :: c.head_dim] // c.head_dim)
    if c.experts is not None and kind.startswith("experts."):
        return _expert_cut(sharding, kind.removeprefix("experts."))
    if kind.startswith("delta.") and sharding.cuts_recurrent:
        rows = _delta_rows(sharding, kind.removeprefix("delta."))
        return None if rows is None else Cut(0, rows)
    return None  # norms


@functools.cache
def _qkv(sharding: Sharding) -> Indices:
    """The rows of the fused projection that go with each device's heads, `[devices, F]`."""
    c, held = sharding.config, functools.partial(_held, sharding)
    queries, keys, count = held("queries"), held("keys"), c.num_key_value_heads * c.head_dim
    parts = [(queries, c.num_attention_heads * c.head_dim), (keys, count), (keys, count), (queries, 0)]
    return _side_by_side(*parts[: 4 if c.attn_output_gate else 3])


def _expert_cut(sharding: Sharding, kind: str) -> Cut | None:
    form = sharding.config.experts
    assert form is not None
    inner, shared = form.moe_intermediate_size, form.shared_expert_intermediate_size
    if kind == "shared_gate_up":
        held = _held(sharding, "shared_expert")
        return Cut(0, _side_by_side((held, shared), (held, 0)))
    if kind in ("gate_up", "gate_up_bias"):
        held = _held(sharding, "expert")
        rows, count = _side_by_side((held, inner), (held, 0)), 2 * inner
    elif kind in ("down", "down_bias"):
        rows, count = _held(sharding, "residual"), sharding.config.hidden_size
    else:
        return None  # the router, and the gate of the shared expert
    if kind.endswith("_bias"):  # one flat vector for all experts
        first = np.arange(form.num_experts)[:, None] * count
        return Cut(0, np.where(rows[:, None] < 0, -1, first + rows[:, None]).reshape(len(rows), -1))
    return Cut(1, rows)


def _delta_rows(sharding: Sharding, kind: str) -> Indices | None:
    """The rows of a recurrent layer's weight that go with each device's heads; None: it has none for each head."""
    form = sharding.config.delta
    assert form is not None and sharding.devices is not None
    keys, values = _groups(form.key_heads, form.value_heads // form.key_heads, sharding.devices)
    key, value = _features(keys, form.key_dim), _features(values, form.value_dim)
    heads = _features(values, 1)
    mixed = [(key, form.key_heads * form.key_dim)] * 2 + [(value, form.inner_features)]
    if kind == "projected":
        ends = [(value, form.inner_features), (heads, form.value_heads), (heads, 0)]
        return _side_by_side(*mixed, *ends)
    if kind == "convolution":
        return _side_by_side(*mixed)
    return heads if kind in ("decay", "step_bias") else None


def _side_by_side(*parts: tuple[Indices, int]) -> Indices:
    """Parts of a leaf's rows that each device holds `[devices, ...]`, and how many rows each has in the leaf."""
    first, found = 0, []
    for held, size in parts:
        found.append(np.where(held < 0, -1, first + held))
        first += size
    return np.concatenate(found, axis=1)
