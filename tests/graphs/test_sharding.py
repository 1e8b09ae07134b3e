"""How a model lies on devices: every feature once, heads whole, and weights that come together again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import TINY
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.model.decoder import ModelSpec, parameter_shapes
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


@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from([1, 32]))
def test_features_come_out_even_in_whole_tasks(count: int, devices: int, task: int) -> None:
    held = _held(Sharding(replace(TINY, vocab_size=count), devices, task), "vocabulary")
    assert held.reshape(-1)[:count].tolist() == list(range(count)) and held.shape[1] % task == 0
    assert (held.reshape(-1)[count:] == -1).all() and (held.shape[1] - task) * devices < count


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_every_weight_make_the_whole(name: str, devices: int) -> None:
    """Each row is somewhere, and what stands side by side on a device has the shapes that it computes with."""
    checkpoint = load_checkpoint(GOLDEN / name)
    spec = ModelSpec(checkpoint.config, np.dtype("float32"), devices=devices)
    expected = parameter_shapes(_with_local_sizes(spec.sharding))
    for leaf, shape in parameter_shapes(checkpoint.config).items():
        cut = spec.sharding.cut(leaf)
        if cut is None:
            assert leaf.rsplit(".", 1)[-1].endswith(("norm", "router", "router_bias", "shared_gate", "scale"))
            continue
        rows = [cut.flat_rows(device, shape) for device in range(devices)]
        every = int(np.prod(shape[:-1])) if len(shape) > 1 else shape[0]
        assert set(np.concatenate(rows).tolist()) - {-1} == set(range(every)), leaf
        if not leaf.endswith(
            (".output", ".down", "down_bias", "output_bias", "shared_down", "embed", "head")
        ):
            assert spec.local_shape(leaf) == expected[leaf]


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
    """A model whose weights have the shapes of one device's, but for those cut by the residual stream's features."""
    local, experts = sharding.local, sharding.config.experts
    width = {kind: _held(sharding, kind).shape[1] for kind in ("mlp",)}
    if experts is not None:
        experts = replace(
            experts,
            moe_intermediate_size=_held(sharding, "expert").shape[1],
            shared_expert_intermediate_size=_held(sharding, "shared_expert").shape[1],
        )
    return replace(local, intermediate_size=width["mlp"], experts=experts)
