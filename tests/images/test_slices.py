"""A tower's calls are cut into slices that are short beside prefill calls, and the cut changes no bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.images.test_features import difference
from tests.support.architectures import PUBLISHED_THIS_YEAR
from tests.support.pixel_values import UNIT_TABLE
from tests.support.tiers import default
from xla_engine.config import EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.vision import layers
from xla_engine.graphs.vision.config import PatchConfig, VisionConfig
from xla_engine.graphs.vision.layers import HEADS, LAYER, Config
from xla_engine.graphs.vision.programs import leaf_shapes
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.vision import read_vision
from xla_engine.runner.vision_tower import TowerSlices, VisionTower, operations, slice_operations

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "patch_size": 2,
    "text_size": 24,
}
TILES = VisionConfig(**SIZES, num_hidden_layers=2, image_size=64, layer_norm_eps=1e-6, scale_factor=4)
PATCHES = PatchConfig(
    **SIZES,
    num_hidden_layers=3,
    frames=2,
    merge_size=2,
    position_side=6,
    rope_theta=1e4,
    taps=(0, 1),
    axes=(0, 1, 2, 0),
)
FORMS: dict[str, Config] = {
    "idefics3": TILES,
    "gemma3": replace(TILES, averages=True),
    "qwen3_vl": PATCHES,
    "qwen3_5": replace(PATCHES, taps=()),
    "paddleocr_vl": replace(PATCHES, taps=(), frames=1, flat=True),
    "glm_ocr": replace(PATCHES, taps=(), position_side=0, gated=True),
}


def tower_of(config: Config, dtype: str, limit: float | None) -> VisionTower:
    draw, kind = np.random.default_rng(0), np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    weights = {
        name: draw.normal(0, 0.3, shape).astype(kind if len(shape) > 1 else np.float32)
        for name, shape in leaf_shapes(config).items()
    }
    slices = TowerSlices(config, 256 if isinstance(config, PatchConfig) else None, limit)
    return VisionTower(config, dtype, weights, UNIT_TABLE, slices=slices)


def pictures(config: Config) -> list[np.ndarray[Any, Any]]:
    """Two of one size; or that end in the first, in the second and in the last part of programs for 1,024 patches."""
    shapes = [(64, 64), (64, 64)] if isinstance(config, VisionConfig) else [(8, 260), (36, 36), (64, 64)]
    return [
        np.random.default_rng(at).integers(0, 256, (*shape, 3), dtype=np.uint8)
        for at, shape in enumerate(shapes)
    ]


def taken(tower: VisionTower, tile: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Features, one slice after the other, as beside rows that decode."""
    stream = None
    for stage in range(tower.stages(tile.shape)):
        stream = tower.advance(tile, stream, stage, stage + 1)
    assert stream is not None
    return np.concatenate(stream.features)[: tower.tokens(tile.shape)]


@pytest.mark.parametrize("name", default(FORMS))
def test_layers_in_parts_give_the_features_of_whole_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within roundings, and the same bits however calls are packed into slices."""
    config, sized = FORMS[name], pictures(FORMS[name])
    whole = tower_of(config, "float32", None)
    monkeypatch.setattr(layers, "_SCORES", 256 * 1024)
    towers = [tower_of(config, "float32", limit) for limit in (None, 1e7, 1e12)]
    assert whole.slices.parts[1024] == 1024
    assert all(tower.slices.parts == towers[0].slices.parts for tower in towers)
    assert towers[0].slices.parts[1024] == 256
    found = []
    for tile in sized:
        features = taken(towers[0], tile)
        assert features.shape == (config.tokens_of(tile.shape), config.feature_size)
        assert difference(features, whole(tile)) < 1e-5 and np.isfinite(features).all()
        for tower in towers[1:]:
            np.testing.assert_array_equal(taken(tower, tile), features, strict=True)
        np.testing.assert_array_equal(towers[0](tile), features, strict=True)
        found.append(features)
    assert len(set(map(bytes, found))) == len(found)
    stages = [tower.stages(sized[-1].shape) for tower in towers]
    assert stages[0] > stages[1] > stages[2] == 1
    for tower in (whole, *towers):
        tower.close()


def test_parts_with_spare_rows_only_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_SCORES", 256 * 1024)
    slices = TowerSlices(PATCHES, 256, 1)
    assert slices.parts == {256: 256, 1024: 256}
    # Patches, and for each layer one call for all and one of each part, two taps, the end.
    assert slices.by_tokens == ((64, 1 + 3 + 2 + 1), *((64 * n, 1 + 3 + (3 + 2 + 1) * n) for n in (2, 3, 4)))
    assert [slices.of(tokens)[0] for tokens in (1, 64, 65, 256)] == [256, 256, 1024, 1024]


COMMON: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 32768}
SMOLVLM = (
    VisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=512,
        patch_size=16,
        layer_norm_eps=1e-6,
        scale_factor=4,
        text_size=576,
    ),
    ModelConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        **COMMON,
    ),
)
GEMMA3_4B = (
    VisionConfig(
        hidden_size=1152,
        intermediate_size=4304,
        num_hidden_layers=27,
        num_attention_heads=16,
        image_size=896,
        patch_size=14,
        layer_norm_eps=1e-6,
        scale_factor=4,
        text_size=2560,
        averages=True,
    ),
    ModelConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=34,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        **COMMON,
    ),
)
QWEN3_VL_2B = (
    PatchConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        patch_size=16,
        frames=2,
        merge_size=2,
        position_side=48,
        rope_theta=1e4,
        taps=(5, 11, 17),
        text_size=2048,
        axes=(0,) * 64,
    ),
    ModelConfig(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        **COMMON,
    ),
)


@pytest.mark.parametrize("lanes", [(2, 8), (1, 4)])
@pytest.mark.parametrize("shapes", [SMOLVLM, GEMMA3_4B, QWEN3_VL_2B], ids=["smolvlm", "gemma3", "qwen3_vl"])
def test_slices_of_published_shapes_are_short(
    shapes: tuple[Config, ModelConfig], lanes: tuple[int, ...]
) -> None:
    """Half of the largest prefill call at most, and one with half of the lanes, as operations are counted.

    Every call runs once, in order, and is the same whatever the limit is. Neighbours would not fit into one slice.
    """
    config, text = shapes
    limit = slice_operations(text, EngineConfig(prefill_lanes=lanes))
    cut, apart = TowerSlices(config, limit=limit), TowerSlices(config)

    def needed(rows: int, of_slice: Any) -> int:
        return sum(operations(config, call.kind, rows, cut.parts[rows]) for call in of_slice)

    for tokens, count in cut.by_tokens:
        rows, slices = cut.of(tokens)
        assert len(slices) == count
        assert [
            call.number for of_slice in slices for call in of_slice if call.kind in (LAYER, HEADS)
        ] == list(range(config.num_hidden_layers))
        spent = [needed(rows, each) for each in slices]
        assert max(spent) <= limit * (1 if lanes[-1] == 8 else 2)
        for one, other in pairwise(slices):
            assert needed(rows, (*one, other[0])) > limit
        assert [call for each in apart.of(tokens)[1] for call in each] == [
            call for each in slices for call in each
        ]


@pytest.mark.parametrize(("name", "tokens"), [("PaddleOCR-VL", 3550), ("GLM-OCR", 4028)])
def test_pages_wait_and_cost_what_the_pages_of_documentation_say(name: str, tokens: int) -> None:
    """No slice is longer than the largest prefill call. A page of 1,024 tokens takes a ninth of the operations."""
    fields = Fields(Path("config.json"), PUBLISHED_THIS_YEAR[name])
    text, family = transformers_model(fields)
    config, limit = read_vision(fields, family, text), slice_operations(text, EngineConfig())
    cut = TowerSlices(config, limit=limit)

    def spent(tokens: int) -> list[int]:
        rows, slices = cut.of(tokens)
        return [
            sum(operations(config, call.kind, rows, cut.parts[rows]) for call in of_slice)
            for of_slice in slices
        ]

    assert max(map(max, map(spent, (tokens, 1024)))) <= 2 * limit
    assert 8.5 < sum(spent(tokens)) / sum(spent(1024)) < 10
