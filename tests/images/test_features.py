"""Features are transformers', and a function of one tile; the decoder beside the tower stays a plain Llama."""

from __future__ import annotations

import json
import runpy
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.images.conftest import GOLDEN
from tests.support.pixel_values import UNIT_TABLE
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.images.encoder import ImageEncoder
from xla_engine.model_loader.config_json import read_config
from xla_engine.model_loader.vision import load_vision
from xla_engine.runner.vision_tower import VisionTower

CASES = ("idefics3", "smolvlm", "gemma3_vision")


def tower_of(name: str, dtype: str) -> VisionTower:
    found = load_vision(GOLDEN / "families" / name, dtype=dtype)
    return VisionTower(found.config, found.dtype, found.weights, UNIT_TABLE)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_features_are_those_of_transformers(name: str) -> None:
    golden = np.load(GOLDEN / "families" / name / "golden.npz")
    tower = tower_of(name, "float32")
    found = np.stack([tower(tile) for tile in golden["tiles"]])
    assert found.shape == golden["features"].shape and found.shape[1] == tower.config.tokens
    assert difference(found, golden["features"]) < 1e-5
    # The comparison can fail: with channels swapped, or the picture turned, features are others.
    for wrong in (golden["tiles"][0, ..., ::-1], golden["tiles"][0].transpose(1, 0, 2)):
        assert difference(tower(np.ascontiguousarray(wrong)), golden["features"][0]) > 1e-2
    tower.close()


@pytest.mark.oracle
@pytest.mark.parametrize("name", CASES)
def test_golden_features_are_rederived(name: str) -> None:
    import torch
    import transformers

    families = runpy.run_path(str(GOLDEN / "make" / "make_golden_families.py"))
    directory = GOLDEN / "families" / name
    committed = np.load(directory / "golden.npz")
    kind = getattr(transformers, families["CASES"][name][0])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    derived = families["seen"](model, int(committed["seed"]))
    np.testing.assert_array_equal(derived["tiles"], committed["tiles"])
    assert difference(derived["features"], committed["features"]) < 1e-5


def test_a_tile_has_the_same_bits_whatever_came_before() -> None:
    """In bfloat16 too, whose features are near those of float32."""
    golden = np.load(GOLDEN / "families" / "idefics3" / "golden.npz")
    first, second = golden["tiles"]
    tower = tower_of("idefics3", "bfloat16")
    alone = tower(first)
    tower(second)
    assert np.array_equal(tower(first), alone) and not np.array_equal(tower(second), alone)
    assert np.array_equal(alone.astype(ml_dtypes.bfloat16).astype(np.float32), alone)
    assert difference(alone, golden["features"][0]) < 0.05
    assert [report.name for report in tower.reports] == [
        "vision_embed[rows=36]",
        "vision_layer[rows=36]",
        "vision_project[rows=36]",
    ]
    tower.close()
    with pytest.raises(RuntimeError, match="not in the inventory"):
        tower(first)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with processor and tokenizer."""
    directory = tmp_path_factory.mktemp("model") / "idefics3"
    shutil.copytree(GOLDEN / "families" / "idefics3", directory)
    shutil.copy(GOLDEN / "images" / "tokenizer.json", directory)
    processor = {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_processor_type": "Idefics3ImageProcessor",
        "max_image_size": {"longest_edge": 24},
        "size": {"longest_edge": 72},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_len": 9}))
    return directory


def picture(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(file, "PNG")
    return file.getvalue()


def test_features_of_a_picture_fit_its_prompt(model: Path) -> None:
    with ImageEncoder(model, dtype="float32") as encoder:
        files = [picture(60, 30), picture(20, 20)]
        grids = [encoder.grid(file) for file in files]
        features = [encoder.encode(file) for file in files]
        assert [grid.tiles for grid in grids] == [7, 10]
        assert [len(rows) for rows in features] == [encoder.tokens(grid) for grid in grids] == [63, 90]
        prompt = encoder.prompt("<image> or <image>?", grids)
        for image, rows in enumerate(features):
            assert sum(span.length for span in prompt.spans if span.image == image) == len(rows)
        tower = tower_of("idefics3", "float32")
        alone = tower(encoder.decoder.tiles(files[0])[3])
        np.testing.assert_array_equal(alone, features[0][3 * 9 : 4 * 9])
        whole = ImageEncoder(model, mm_processor_kwargs={"do_image_splitting": False})
        assert whole.grid(files[0]).tiles == 1
        whole.close()
        with pytest.raises(InvalidRequestError, match="1 <image> and 2 pictures"):
            encoder.prompt("<image>", grids)


@pytest.mark.parametrize("name", CASES[:2])
def test_the_decoder_beside_a_tower_is_a_plain_llama(name: str, tmp_path: Path) -> None:
    """Its ModelConfig, of which every program of an engine is a function, is that of the text model alone."""
    text = json.loads((GOLDEN / "families" / name / "config.json").read_text())["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text | {"architectures": ["LlamaForCausalLM"]}))
    assert read_config(GOLDEN / "families" / name) == read_config(tmp_path)


def changed(source: Path, directory: Path, change: dict[str, Any]) -> Path:
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    vision = change.pop("vision_config", {})
    config |= change
    config["vision_config"] = None if vision is None else config["vision_config"] | vision
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "vision_config"),
        ({"vision_config": {"num_channels": 4}}, "num_channels"),
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
        ({"vision_config": {"num_attention_heads": 5}}, "num_attention_heads"),
        ({"vision_config": {"patch_size": 5}}, "patch_embedding"),
        ({"scale_factor": 4}, "not a multiple of scale_factor"),
        ({"vision_config": {"num_hidden_layers": 1}}, r"encoder\.layers\.1\."),
        ({"vision_config": {"num_hidden_layers": 3}}, r"encoder\.layers\.2\..* is missing"),
        ({"scale_factor": 3}, "modality_projection"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_vision(changed(model, tmp_path / "changed", change))


def test_models_and_processors_without_a_fitting_tower_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no vision tower that is supported"):
        load_vision(GOLDEN / "families" / "mistral3_vision")
    other = changed(model, tmp_path / "other", {})
    (other / "processor_config.json").write_text(json.dumps({"image_seq_len": 64}))
    with pytest.raises(CheckpointError, match="image_seq_len = 64: the tower makes 9 tokens"):
        ImageEncoder(other)
    processor = json.loads((other / "preprocessor_config.json").read_text())
    processor["max_image_size"] = {"longest_edge": 36}
    (other / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(CheckpointError, match="tiles of 36 pixels"):
        ImageEncoder(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_tokens_per_image": 24}, "must be the square of a divisor of 10"),
        ({"mm_tokens_per_image": 9}, "must be the square of a divisor of 10"),
        ({"vision_config": {"num_hidden_layers": 1}}, r"encoder\.layers\.1\."),
        ({"vision_config": {"hidden_size": 48}}, r"patch_embedding\.weight has shape"),
    ],
)
def test_what_does_not_fit_gemma3_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_vision(changed(GOLDEN / "families" / "gemma3_vision", tmp_path / "changed", change))


def test_gemma3_has_the_names_of_its_published_files_too(tmp_path: Path) -> None:
    """With a head over the tower, which no decoder reads, and without defaults."""
    source = GOLDEN / "families" / "gemma3_vision"
    renamed = changed(source, tmp_path / "renamed", {})
    tensors = load_file(renamed / "model.safetensors")
    tensors["vision_tower.head.probe"] = np.zeros((1, 1, 36), np.float32)
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): each for name, each in tensors.items()
    }
    save_file(named, renamed / "model.safetensors", metadata={"format": "pt"})
    expected, found = (load_vision(each).weights for each in (source, renamed))
    assert list(found) == list(expected)
    for leaf in ("patch", "layers.1.qkv", "soft_norm", "projection"):
        np.testing.assert_array_equal(found[leaf], expected[leaf])


def test_layers_of_many_patches_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With transformers' features, too."""
    golden = np.load(GOLDEN / "families" / "gemma3_vision" / "golden.npz")
    monkeypatch.setattr("xla_engine.graphs.vision.layers._SCORES", 50 * 100)
    tower = tower_of("gemma3_vision", "float32")
    assert tower.slices.parts == {100: 50}
    assert difference(np.stack([tower(tile) for tile in golden["tiles"]]), golden["features"]) < 1e-5
    tower.close()


def test_a_tower_with_infinite_weights_is_refused(model: Path, tmp_path: Path) -> None:
    broken = changed(model, tmp_path / "broken", {})
    tensors = load_file(broken / "model.safetensors")
    tensors["model.vision_model.post_layernorm.weight"][0] = np.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"post_layernorm\.weight holds NaN or infinite"):
        ImageEncoder(broken)


def test_sides_whose_positions_transformers_rounds_are_refused() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    common = {**sizes, "patch_size": 2, "layer_norm_eps": 1e-6, "scale_factor": 1, "text_size": 8}
    for published in (26, 27, 32):  # Idefics3-8B, SmolVLM-2.2B, SmolVLM-256M and -500M
        assert VisionConfig(image_size=2 * published, **common).patches == published**2
    with pytest.raises(ValueError, match="rounds their positions"):
        VisionConfig(image_size=50, **common)


@pytest.mark.oracle
def test_transformers_rounds_positions_of_these_sides_only() -> None:
    """As `Idefics3VisionEmbeddings` numbers the patches of a whole tile."""
    import torch

    from xla_engine.graphs.vision.config import _ROUNDED

    rounded = set()
    for side in range(1, 100):
        boundaries = torch.arange(1 / side, 1.0, 1 / side)
        places = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side]))
        buckets = torch.bucketize(places.clamp(max=1 - 1e-6), boundaries, right=True)
        if buckets.tolist() != list(range(side)):
            rounded.add(side)
    assert rounded == _ROUNDED
