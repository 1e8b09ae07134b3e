"""This year's models: each configuration is read, or refused with what it needs and what to use instead."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.architectures import PUBLISHED_THIS_YEAR
from xla_engine.cli import main
from xla_engine.config import EngineConfig
from xla_engine.errors import CheckpointError
from xla_engine.graphs.model.spec import parameter_shapes
from xla_engine.graphs.vision.config import PatchConfig
from xla_engine.graphs.vision.programs import leaf_shapes
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.config_only import open_named
from xla_engine.model_loader.describe import describe_decoder
from xla_engine.model_loader.families import ENCODERS, FAMILIES, tensor_sources
from xla_engine.model_loader.families.refused import REFUSED
from xla_engine.model_loader.vision import read_vision, vision_sources
from xla_engine.runner.vision_tower import TowerSlices

# name -> words of the refusal
REFUSALS = {
    "Phi-4-mini-flash": "Use Phi-4-mini",
    "granite-for-docling-500m": "Use Granite-Docling 258M",
}


def write(folder: Path, name: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(PUBLISHED_THIS_YEAR[name]))
    return path


@pytest.mark.parametrize("name", sorted(PUBLISHED_THIS_YEAR.keys() - REFUSALS))
def test_a_published_configuration_runs(name: str, tmp_path: Path) -> None:
    """Each leaf has its tensors."""
    model = describe_decoder(open_named(write(tmp_path, name)), EngineConfig(runner="auto"))
    assert tensor_sources(model.config, model.family).keys() == parameter_shapes(model.config).keys()


@pytest.mark.parametrize(
    ("name", "patches", "page", "tokens"),
    [
        ("PaddleOCR-VL", 27 * 27, (1988, 1400, 3), 3550),
        ("GLM-OCR", 0, (2212, 1708, 3), 4819),
        ("granite-docling-258M", None, (512, 512, 3), 64),
    ],
)
def test_the_tower_of_a_published_configuration_runs(
    name: str, patches: int | None, page: tuple[int, ...], tokens: int, tmp_path: Path
) -> None:
    """Each leaf has its tensors. patches: that have a learned position of their own; None if tiles do."""
    fields = open_named(write(tmp_path, name)).config_fields()
    text, family = transformers_model(fields)
    vision = read_vision(fields, family, text)
    assert vision_sources(vision, family).keys() == leaf_shapes(vision).keys()
    assert vision.tokens_of(page) == tokens and vision.text_size == text.hidden_size
    if isinstance(vision, PatchConfig):
        assert vision.position_side**2 == patches
        assert [vision.axes.count(axis) for axis in range(3)] == [16, 24, 24]


@pytest.mark.parametrize("name", [each for each in PUBLISHED_THIS_YEAR if each.startswith("gemma-4")])
def test_the_tower_of_a_published_gemma_4_runs(name: str, tmp_path: Path) -> None:
    """Each leaf has its tensors, small towers have bounds, and large decoders look ahead in layers with a window."""
    fields = open_named(write(tmp_path, name)).config_fields()
    text, family = transformers_model(fields)
    vision, large = read_vision(fields, family, text), not name.endswith(("E2B-it", "E4B-it"))
    shapes = leaf_shapes(vision)
    assert vision_sources(vision, family).keys() == shapes.keys()
    assert isinstance(vision, PatchConfig) and vision.text_size == text.hidden_size
    assert vision.tokens_of((912, 672, 3)) == 266 and vision.head_dim == (72 if large else 64)
    assert ("shift" in shapes, "layers.0.qkv_bounds" in shapes) == (large, not large)
    assert (vision.sees_ahead, vision.blank_token) == ("sliding_attention" if large else "none", 0)
    assert tuple(TowerSlices(vision, 280).parts) == (630, 1260, 2520)


def test_both_forms_of_deepseek_ocr_2_are_one_model(tmp_path: Path) -> None:
    """The hub's file, which transformers does not read without code of the repository, and transformers' own."""
    read = []
    for name in ("DeepSeek-OCR-2", "DeepSeek-OCR-2-hf"):
        fields = open_named(write(tmp_path, name)).config_fields()
        text, family = transformers_model(fields)
        vision = read_vision(fields, family, text)
        assert vision_sources(vision, family).keys() == leaf_shapes(vision).keys()
        read.append((text, vision, tensor_sources(text, family), vision_sources(vision, family)))
    assert read[0] == read[1]


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_another_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=REFUSALS[name]):
        describe_decoder(open_named(write(tmp_path, name)), EngineConfig(runner="auto"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}),
        ("DeepSeek-V3", {"topk_method": "greedy"}),
        ("DeepSeek-V3", {"n_group": 7}),
        ("Nemotron-3-Nano-30B-A3B", {"mlp_bias": True}),
        ("Nemotron-3-Nano-30B-A3B", {"n_shared_experts": 2}),
    ],
    ids=str,
)
def test_other_ways_to_choose_or_make_experts_are_refused_by_name(
    name: str, change: dict[str, object], tmp_path: Path
) -> None:
    path = write(tmp_path, name)
    path.write_text(json.dumps(PUBLISHED_THIS_YEAR[name] | change))
    with pytest.raises(CheckpointError, match=next(iter(change))):
        describe_decoder(open_named(path), EngineConfig(runner="auto"))


def test_inspect_says_so_from_a_config_json_alone(tmp_path: Path) -> None:
    for name, word in (
        ("all-MiniLM-L6-v2", "BertModel"),
        ("Phi-4-mini-flash", "cannot run: .*Use Phi-4-mini"),
    ):
        found = CliRunner().invoke(main, ["inspect", str(write(tmp_path, name))])
        assert re.search(word, found.output), found.output
        assert found.exit_code == (name in REFUSALS), found.output


def test_what_runs_is_not_listed_as_refused() -> None:
    assert not REFUSED.keys() & (FAMILIES | ENCODERS).keys()


def test_the_documentation_lists_what_is_refused() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [name for name in REFUSED if f"`{name}`" not in text] == []
