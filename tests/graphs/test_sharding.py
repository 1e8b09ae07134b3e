"""How a model is split over devices: every feature once, heads whole, and the parts make up the weights."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import TINY
from tests.support.tensor_parallel import MODELS, WIDE, WIDE_MODELS
from tests.support.tiers import default
from xla_engine.graphs.attention.backend import Attention
from xla_engine.graphs.attention.native import NativeAttention
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.forms import RoutedExperts
from xla_engine.graphs.kv_cache.cache import keys_of, make_cache
from xla_engine.graphs.linear.native import NativeProducts
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.sharding import Kind, Sharding, _held, _order
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.weights import read_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "families"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_every_query_head_is_on_one_device_with_its_keys(heads: int, queries: int, devices: int) -> None:
    sharding = Sharding(
        replace(TINY, num_attention_heads=heads * queries, num_key_value_heads=heads), devices
    )
    held = [_held(sharding, kind)[:, ::16] // 16 for kind in ("queries", "keys")]
    assert sorted(held[0][held[0] >= 0]) == list(range(heads * queries))
    local = sharding.local
    assert [each.shape[1] for each in held] == [local.num_attention_heads, local.num_key_value_heads]
    with_each = local.num_attention_heads // local.num_key_value_heads
    for own, keys in zip(*held, strict=True):
        for place, head in enumerate(own):
            assert head < 0 or head // queries == keys[place // with_each]
    if heads % devices == 0 or (devices % heads == 0 and queries % (devices // heads) == 0):
        assert (held[0] >= 0).all()  # nothing is padded where it comes out even


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_caches_have_the_heads_that_each_layer_has_on_a_device(
    heads: int, fewer: int, queries: int, devices: int
) -> None:
    """Of layers of two sizes of heads, with other numbers of key/value heads."""
    model = replace(
        TINY,
        num_attention_heads=math.lcm(heads, fewer) * queries,
        num_key_value_heads=heads,
        layer_types=("sliding_attention", "full_attention"),
        sliding_window=16,
        global_head_dim=32,
        num_global_key_value_heads=fewer,
    )
    sharding = Sharding(model, devices)
    for index in range(2):
        own = replace(sharding, config=model.layer(index))
        for cache, layer in ((sharding.local, own.local), (sharding.across, own.across)):
            assert cache.layer(index).num_key_value_heads == layer.num_key_value_heads


@pytest.mark.parametrize("attention", [XlaAttention(), NativeAttention("avx2")], ids=lambda each: each.name)
def test_values_that_are_the_keys_have_one_shape_on_any_number_of_devices(attention: Attention) -> None:
    """They are empty, so they cannot be split; each device has all keys, for its own queries."""
    spec = ModelSpec(MODELS["latent"], jnp.dtype(jnp.bfloat16), attention, devices=4)
    local, across = (
        keys_of(jax.eval_shape(functools.partial(make_cache, spec, 2, 256, config=config)))
        for config in (spec.local, spec.sharding.across)
    )
    for mine, every in zip(local, across, strict=True):
        assert mine.values == every.values and mine.values.size == 0
        assert every.keys.size == 4 * mine.keys.size


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([1, 32]))
def test_features_come_out_even_in_whole_tasks(count: int, devices: int, task: int) -> None:
    held = _held(Sharding(replace(TINY, vocab_size=count), devices, task), "vocabulary")
    assert held.reshape(-1)[:count].tolist() == list(range(count)) and held.shape[1] % task == 0
    assert (held.reshape(-1)[count:] == -1).all() and (held.shape[1] - task) * devices < count


@pytest.mark.parametrize("devices", default([3, 2, 4]))
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_every_weight_make_the_whole(
    name: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row is on some device, and the parts on a device have the shapes that it computes with."""
    monkeypatch.setattr("xla_engine.graphs.model.spec.LEAST", 1)
    checkpoint = load_checkpoint(GOLDEN / name)
    spec = ModelSpec(checkpoint.config, np.dtype("float32"), devices=devices)
    expected = _local_shapes(spec.sharding)
    for leaf, shape in parameter_shapes(checkpoint.config).items():
        cut = spec.leaves[leaf].cut
        if cut is None:
            last = leaf.rsplit(".", 1)[-1]
            whole = (
                "norm",
                "norm_bias",
                "router",
                "router_bias",
                "correction",
                "shared_gate",
                "scale",
                "head_bias",
                *("q_a", "q_a_bias", "kv_a", "kv_a_bias"),  # of latent attention
                *("end_gate", "end_output", "scalar", "projection"),  # of embeddings for each layer
                *("prediction", "correction", "laurel_left", "laurel_right", "factors"),
            )
            assert (
                leaf.startswith("streams")
                or last.endswith(whole)
                or (".delta." in leaf and not spec.sharding.cuts_recurrent)
                or any(f".{kind}." in leaf for kind in ("conv", "mamba"))
            )
            continue
        rows = [cut.flat_rows(device, shape) for device in range(devices)]
        every = int(np.prod(shape[:-1])) if len(shape) > 1 else shape[0]
        assert set(np.concatenate(rows).tolist()) - {-1} == set(range(every)), leaf
        if not leaf.endswith(
            (".output", "down", "down_bias", "output_bias", "embed", "head", "table", "into", "out_of")
        ):
            assert spec.leaves[leaf].on_devices().shape == expected[leaf]


def test_where_a_device_would_have_few_features_it_has_all() -> None:
    """Each weight is decided by its own width; experts are always split, however few features a device gets."""
    experts = RoutedExperts(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=40)
    model = replace(WIDE, intermediate_size=500, vocab_size=1600, experts=experts, mlp_only_layers=(1,))
    spec = ModelSpec(model, np.dtype("float32"), devices=4)
    cut = {name.split(".", 2)[-1] for name, leaf in spec.leaves.items() if leaf.cut is not None}
    assert cut == {"embed", "head", "qkv", "output", "down", "experts.gate_up", "experts.down"}
    assert spec.leaves["layers.1.gate_up"].on_devices().shape == (1000, 768)
    assert spec.leaves["layers.0.experts.gate_up"].on_devices().shape == (3, 20, 768)
    narrow = ModelSpec(replace(model, head_dim=32, hidden_size=760), np.dtype("float32"), devices=4)
    cut = {name.split(".", 2)[-1] for name, leaf in narrow.leaves.items() if leaf.cut is not None}
    assert cut == {"embed", "head", "experts.gate_up"}  # of 128 features of q, k and v, and 190 of the others
    assert narrow.local.num_attention_heads == 2 and narrow.local.num_key_value_heads == 1


@pytest.mark.parametrize(("value_dim", "is_native"), [(48, True), (44, True), (48, False)])
def test_recurrent_layers_are_cut_as_one(value_dim: int, is_native: bool) -> None:
    """Projections and state are split together if heads are whole vectors and the products are in C++."""
    wide = WIDE_MODELS["wide_recurrent"]
    assert wide.delta is not None
    model = replace(wide, delta=replace(wide.delta, value_dim=value_dim))
    products = NativeProducts("avx512") if is_native else None
    spec = ModelSpec(model, np.dtype(jnp.bfloat16), products=products, devices=4)
    assert spec.local.delta is not None
    cut = {name.split(".")[-1] for name, leaf in spec.leaves.items() if ".delta." in name and leaf.cut}
    if value_dim == 48 and is_native:
        assert cut == {"projected", "convolution", "decay", "step_bias", "output"}
        assert spec.local.delta.value_heads == 2
    else:
        assert cut == {"output"}
        assert spec.local.delta == spec.sharding.across.delta == model.delta


@pytest.mark.parametrize("name", FAMILIES)
def test_a_part_of_a_leaf_is_read_as_the_whole_has_it(name: str) -> None:
    weights, draw = load_checkpoint(GOLDEN / name).weights, np.random.default_rng(0)
    for leaf, whole in weights.items():
        flat = whole.reshape(-1, whole.shape[-1]) if whole.ndim > 1 else whole
        index = draw.integers(-1, len(flat), 7)
        part = read_rows(weights, leaf, index)
        expected = np.where((index < 0).reshape(-1, *[1] * (flat.ndim - 1)), 0, flat[index])
        assert part.dtype == whole.dtype and part.tobytes() == expected.astype(whole.dtype).tobytes(), leaf


@pytest.mark.parametrize("kind", ["queries", "keys", "residual", "mlp", "vocabulary"])
def test_gathered_features_stand_in_the_model_s_order(kind: Kind) -> None:
    for devices in (1, 2, 3, 4, 5):
        sharding = Sharding(TINY, devices)
        side_by_side = _held(sharding, kind).reshape(-1)
        found = side_by_side[_order(sharding, kind)]
        assert found.tolist() == list(range(len(found)))


def _with_local_sizes(sharding: Sharding) -> ModelConfig:
    """A model with the weight shapes of one device, except for weights split by the residual stream's features."""
    local, experts = sharding.local, sharding.config.experts
    width = {kind: _held(sharding, kind).shape[1] for kind in ("mlp",)}
    if experts is not None:
        experts = replace(
            experts,
            moe_intermediate_size=_held(sharding, "expert").shape[1],
            shared_expert_intermediate_size=_held(sharding, "shared_expert").shape[1],
        )
    return replace(local, intermediate_size=width["mlp"], experts=experts)


def _local_shapes(sharding: Sharding) -> dict[str, tuple[int, ...]]:
    """The shapes of the leaves on one device, each layer's by its own heads and widths."""
    config = sharding.config
    found = dict(parameter_shapes(_with_local_sizes(sharding)))
    for index in range(config.num_hidden_layers):
        own = replace(sharding, config=config.layer(index))
        shapes = parameter_shapes(_with_local_sizes(own))
        found |= {leaf: shape for leaf, shape in shapes.items() if leaf.startswith(f"layers.{index}.")}
    return found
