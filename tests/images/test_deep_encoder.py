"""DeepSeek-OCR-2: tiles, views, features and tokens are transformers', and bits are those of a picture alone."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.engine.test_images import SMALL, run
from tests.images.conftest import GOLDEN
from tests.images.test_features import changed
from tests.support.architectures import PUBLISHED_THIS_YEAR
from tests.support.pixel_values import UNIT_TABLE
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.record import _image, _image_to_json
from xla_engine.errors import CheckpointError
from xla_engine.graphs.vision.config import DeepEncoderConfig
from xla_engine.graphs.vision.deep_encoder import shrinking, stretching
from xla_engine.graphs.vision.programs import leaf_shapes
from xla_engine.images.decoder import ImageDecoder
from xla_engine.images.pictures import tiles_sha256
from xla_engine.images.processor import read_image_processor, value_table
from xla_engine.images.prompt import expand, prompt_form
from xla_engine.images.tower import check_processor
from xla_engine.images.views import ViewProcessor
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.model_loader.config_json import transformers_model
from xla_engine.model_loader.json_fields import Fields
from xla_engine.model_loader.vision import load_vision, read_vision, vision_sources
from xla_engine.prompts import PicturedPrompt
from xla_engine.runner.self_check.check import tile_differences
from xla_engine.runner.vision_tower import HEADS, LAYER, NECK, QUERY_LAYER, VisionTower
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage

MODEL = GOLDEN / "families" / "deepseek_ocr2"
IMAGE = 197
ENGINE = replace(SMALL, max_model_len=640, prefill_lanes=(4,))


def processor_of(directory: Path, **fields: Any) -> ViewProcessor:
    whole = {"image_processor_type": "DeepseekOcr2ImageProcessor", **fields}
    (directory / "preprocessor_config.json").write_text(json.dumps(whole))
    found = read_image_processor(directory)
    assert isinstance(found, ViewProcessor)
    return found


@pytest.fixture(scope="module")
def patches() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(GOLDEN / "make" / "make_golden_patches.py")))


def rows_of(patches: SimpleNamespace, directory: Path, names: set[str], step: int) -> list[list[Any]]:
    """What this library makes of the pictures, as `make_golden_patches.seen_in_views` tells it."""
    processors = {kind: processor_of(directory, **fields) for kind, fields in patches.VIEW_PROCESSORS.items()}
    decoders, found = {kind: ImageDecoder(each) for kind, each in processors.items()}, []
    for name, kind, data in patches.BASE.pictures(0, step):
        if name in names:
            table, tiles = value_table(processors[kind]), decoders[kind].tiles(data)
            values = [table[np.arange(3), tile].transpose(2, 0, 1).reshape(-1) for tile in tiles]
            found.append([name, len(tiles) - 1, patches.BASE.digest(np.concatenate(values))])
    for decoder in decoders.values():
        decoder.close()
    return found


def test_pixels_are_those_of_transformers(patches: SimpleNamespace, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "images" / "patches.json").read_text())["deepseek_ocr2"]
    assert len(golden) > 60 and {count for _, count, _ in golden} == {0, 2, 4, 6}
    assert rows_of(patches, tmp_path, {name for name, _, _ in golden}, patches.STEP) == golden


@pytest.mark.oracle
def test_all_pixels_are_those_of_transformers(patches: SimpleNamespace, tmp_path: Path) -> None:
    every = patches.seen_in_views(1)
    assert len(every) >= 500
    assert rows_of(patches, tmp_path, {name for name, _, _ in every}, 1) == every


def test_a_page_of_the_published_processor(tmp_path: Path) -> None:
    """Sizes by hand, and the runs of tokens: six parts and the view. The published file has other fields."""
    published = {
        "add_special_token": False,
        "candidate_resolutions": [[1024, 1024]],
        "downsample_ratio": 4,
        "ignore_id": -100,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": "<image>",
        "mask_prompt": False,
        "normalize": True,
        "pad_token": "<pad>",
        "patch_size": 16,
        "processor_class": "DeepseekVLV2Processor",
        "sft_format": "deepseek",
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(published))
    processor = read_image_processor(tmp_path)
    assert processor == processor_of(tmp_path)
    page, small = processor.grid(1654, 2339), processor.grid(768, 400)
    assert (page.columns, page.rows, page.tiles, page.whole) == (2, 3, 7, (1536, 2304))
    assert page.sizes == [(768, 768)] * 6 + [(1024, 1024)] and page.tile_tokens(48) == [144] * 6 + [257]
    assert page.view is not None and page.view.copy == (724, 1024)
    assert (small.tiles, small.sizes, small.tile_tokens(48)) == (1, [(1024, 1024)], [257])
    text, runs = expand("<image>\nFree OCR.", [page], 48, prompt_form("deepseek_vl_v2"))
    assert text == "<image>" * (6 * 144 + 257) + "\nFree OCR."
    assert [begin for _, _, begin in runs] == [len("<image>") * 144 * at for at in range(7)]
    few = read_image_processor(tmp_path, {"min_patches": 1, "max_patches": 1})
    assert few.grid(1654, 2339).tiles == 2
    assert processor.grid(200, 1).view.copy == (1024, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"crop_to_patches": False}, "pictures without tiles"),
        ({"size": {"height": 1024, "width": 768}}, "the view is square"),
        ({"background_color": [1, 2, 300]}, "three numbers from 0 to 255"),
        ({"min_patches": 7}, "min_patches = 7"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan.*not supported for DeepSeek-OCR-2"),
    ],
)
def test_other_processors_are_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        processor_of(tmp_path, **fields)


def test_a_processor_of_other_tiles_is_refused(tmp_path: Path) -> None:
    config = load_vision(MODEL).config
    check_processor(config, processor_of(tmp_path, size={"height": 128, "width": 128}, tile_size=96))
    with pytest.raises(CheckpointError, match=r"tiles of \(768, 1024\) pixels .*reads \(96, 128\)"):
        check_processor(config, processor_of(tmp_path))


@pytest.fixture(scope="module")
def towers() -> Iterator[dict[str, VisionTower]]:
    found = {}
    for dtype in ("float32", "bfloat16"):
        vision = load_vision(MODEL, dtype=dtype)
        found[dtype] = VisionTower(vision.config, vision.dtype, vision.weights, UNIT_TABLE)
    yield found
    for tower in found.values():
        tower.close()


@pytest.fixture(scope="module")
def golden() -> Any:
    return np.load(MODEL / "golden.npz")


def test_features_are_those_of_transformers(towers: dict[str, VisionTower], golden: Any) -> None:
    """Of a part of a picture, and of its view with the separator behind it."""
    for at, tokens in enumerate((144, 257)):
        found, expected = towers["float32"](golden[f"tile{at}"]), golden[f"features{at}"]
        assert found.shape == expected.shape == (tokens, 40)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        rough = towers["bfloat16"](golden[f"tile{at}"])
        assert np.abs(rough - expected).mean() < 0.1 * np.abs(expected).mean()


def test_features_are_of_one_tile_alone(towers: dict[str, VisionTower], golden: Any) -> None:
    """In one piece and one slice after the other, with other tiles between; and the self-check sees no difference."""
    tower = towers["bfloat16"]
    for at in (0, 1):
        tile = golden[f"tile{at}"]
        right, stream = tower(tile), None
        for stage in range(tower.stages(tile.shape)):
            tower.glance(golden["tile0"][::-1])
            stream = tower.advance(tile, stream, stage, stage + 1)
        assert stream is not None
        assert np.concatenate(stream.features)[: len(right)].tobytes() == right.tobytes()
    assert tile_differences(tower) == []
    calls = [call for of_slice in tower.slices.of(257)[1] for call in of_slice]
    numbers = {kind: [call.number for call in calls if call.kind == kind] for kind in (LAYER, HEADS, NECK)}
    assert numbers == {LAYER: [0, 2], HEADS: [1], NECK: [0]}
    assert [call.number for call in calls if call.kind == QUERY_LAYER] == [0, 1]


def test_filters_by_hand() -> None:
    """Weights of four inputs for two outputs: the bicubic filter sees all, and the linear one neighbours."""
    # Keys's filter is 111/128 at 1/4, 29/128 at 3/4 and -9/128 at 5/4.
    values = np.array([111, 111, 29, -9]) / 128
    found = shrinking(4, 2)
    np.testing.assert_allclose(found[0], values / values.sum(), rtol=1e-6)
    np.testing.assert_allclose(found, found[::-1, ::-1])
    np.testing.assert_allclose(stretching(4, 2), [[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    np.testing.assert_allclose(stretching(2, 4), [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]])


def image_of(tiles: list[Any], starts: list[int]) -> PromptImage:
    lengths = [257 if len(tile) == 128 else 144 for tile in tiles]
    digest = sha256(b"".join(tile.tobytes() for tile in tiles)).hexdigest()
    return PromptImage(digest=digest, tiles=tuple(tiles), spans=tuple(zip(starts, lengths, strict=True)))


def prompts_of(golden: Any) -> list[PicturedPrompt]:
    """A picture that is its view alone, and one with a part: those of the golden file."""
    made = json.loads((GOLDEN / "images" / "tokens.json").read_text())["deepseek_ocr2"]
    return [
        PicturedPrompt(
            "",
            tuple(each["prompt"]),
            (image_of([golden[f"tile{at}"] for at in each["tiles"]], each["starts"]),),
        )
        for each in made
    ]


@pytest.fixture(scope="module")
def engine(towers: dict[str, VisionTower]) -> Iterator[XlaBatchEngine]:
    config = replace(ENGINE, dtype="float32")
    engine = XlaBatchEngine(load_checkpoint(MODEL, dtype="float32"), config=config, tower=towers["float32"])
    yield engine
    engine.close()


def test_greedy_tokens_are_those_of_transformers(engine: XlaBatchEngine, golden: Any) -> None:
    made = json.loads((GOLDEN / "images" / "tokens.json").read_text())["deepseek_ocr2"]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for at, prompt in enumerate(prompts_of(golden)):
        engine.submit(prompt, params, request_id=str(at))
    found = {output.request_id: output for output in engine.drain()}
    for at, each in enumerate(made):
        assert list(found[str(at)].outputs[0].token_ids) == each["tokens"]


def test_alone_and_among_peers(engine: XlaBatchEngine, golden: Any) -> None:
    """Also with a prefix in the cache, and beside text."""
    prompts = prompts_of(golden)
    alone = []
    for prompt in prompts:
        engine.reset_prefix_cache()
        alone += run(engine, prompt)
    engine.reset_prefix_cache()
    assert run(engine, *prompts, [3, 1, 4, 1, 5])[:2] == alone
    assert run(engine, *reversed(prompts)) == alone[::-1]
    assert engine.stats().cached_tokens > 0


def test_tiles_of_two_sizes_are_recorded(golden: Any) -> None:
    image = image_of([golden["tile0"], golden["tile1"]], [0, 144])
    found = _image(json.loads(json.dumps(_image_to_json(image))))
    assert found.spans == image.spans and tiles_sha256(found.tiles) == tiles_sha256(image.tiles)
    assert [tile.shape for tile in found.tiles] == [tile.shape for tile in image.tiles]


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("sam_config", {"hidden_act": "silu"}, "only gelu"),
        ("sam_config", {"use_rel_pos": False}, "use_rel_pos = false"),
        ("sam_config", {"image_size": 96}, "image_size = 96: must be 64 patches of 2 pixels"),
        ("sam_config", {"downsample_channels": [12, 25]}, "the second stage's size"),
        ("sam_config", {"global_attn_indexes": [3]}, "a list of the 3 layers"),
        ("sam_config", {"mlp_dim": 24}, r"lin1\.weight has shape"),
        ("encoder_config", {"use_sliding_window": True}, "windowed attention"),
        ("encoder_config", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ("encoder_config", {"rope_parameters": {"rope_type": "yarn"}}, 'only "default"'),
    ],
)
def test_other_towers_are_refused_by_name(
    tmp_path: Path, path: str, change: dict[str, Any], message: str
) -> None:
    config = json.loads((MODEL / "config.json").read_text())["vision_config"]
    with pytest.raises(CheckpointError, match=message):
        load_vision(changed(MODEL, tmp_path / "changed", {"vision_config": {path: config[path] | change}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"norm_topk_prob": True}, "sum to one"),
        ({"scoring_func": "sigmoid"}, "only softmax"),
    ],
)
def test_other_decoders_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    config["text_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        transformers_model(Fields(MODEL / "config.json", config))


@pytest.mark.parametrize("name", ["DeepSeek-OCR-2", "DeepSeek-OCR-2-hf"])
def test_the_tower_of_a_published_configuration(name: str) -> None:
    """SAM-B and Qwen2 0.5B, as the published file and transformers' say it."""
    fields = Fields(Path("config.json"), PUBLISHED_THIS_YEAR[name])
    text, family = transformers_model(fields)
    vision = read_vision(fields, family, text)
    assert isinstance(vision, DeepEncoderConfig) and vision.text_size == text.hidden_size == 1280
    shapes = leaf_shapes(vision)
    assert vision_sources(vision, family).keys() == shapes.keys()
    assert shapes["layers.2.relative_rows"] == (127, 64) and shapes["layers.3.relative_rows"] == (27, 64)
    assert shapes["neck.quarter"] == (896, 9 * 512) and shapes["encoder.23.gate_up"] == (2 * 4864, 896)
    assert [vision.tokens_of((side, side, 3)) for side in (768, 1024, 512)] == [144, 257, None]


@pytest.mark.full
def test_a_batch_of_pages(tmp_path: Path) -> None:
    """Through `LLM`: each page has the answer that it has alone, and large pages have parts."""
    import tokenizers

    from xla_engine import LLM

    directory = tmp_path / "model"
    shutil.copytree(MODEL, directory)
    fields = {"size": {"height": 128, "width": 128}, "tile_size": 96}
    processor_of(directory, **fields)
    words = {chr(at): at for at in range(32, 127)} | {"<unk>": 0}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made.add_special_tokens(["<image>"])
    stored = json.loads(made.to_str())
    stored["added_tokens"][0]["id"] = IMAGE
    (directory / "tokenizer.json").write_text(json.dumps(stored))
    pages = [Image.effect_noise(size, 90).convert("RGB") for size in ((90, 60), (150, 100), (90, 61))]
    options = {"max_model_len": 640, "max_num_seqs": 4, "mm_processor_kwargs": {"max_patches": 2}}
    with LLM(directory, **options) as llm:
        prompts = [{"prompt": "<image> read", "multi_modal_data": {"image": page}} for page in pages]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        alone = [llm.generate([each], params)[0].outputs[0].token_ids for each in prompts]
    assert together == alone
