"""Pictures in patches: these, prompts and features are transformers', and features are of one picture alone."""

from __future__ import annotations

import json
import runpy
import shutil
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from safetensors.numpy import load_file, save_file

from tests.images.conftest import GOLDEN
from tests.images.test_features import changed, difference
from tests.images.test_features import picture as as_file
from tests.support.command_line import invoke
from tests.support.tiers import default
from xla_engine import LLM, SamplingParams
from xla_engine.config import EngineConfig
from xla_engine.engine.inspection import inspect_model
from xla_engine.errors import CheckpointError, ImageTooLargeError, InvalidRequestError
from xla_engine.images.decoder import ImageDecoder
from xla_engine.images.encoder import ImageEncoder
from xla_engine.images.processor import PatchProcessor, read_image_processor, value_table
from xla_engine.images.prompt import QWEN3_VL, PlacedPicture, expand
from xla_engine.images.tower import load_reader, load_tower
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.model_files import open_model
from xla_engine.model_loader.vision import load_vision
from xla_engine.prompts import Picture
from xla_engine.runner.self_check.check import tile_differences
from xla_engine.runner.vision_tower import TowerSlices, VisionTower, patches_of

MODEL = GOLDEN / "families" / "qwen3_vl"
TABLE = value_table(SimpleNamespace(rescale_factor=1 / 255, image_mean=(0.5,) * 3, image_std=(0.5,) * 3))
PUBLISHED = {  # that of Qwen3-VL-2B-Instruct
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def processor_of(directory: Path, fields: dict[str, Any], **overrides: Any) -> PatchProcessor:
    whole = {"image_processor_type": "Qwen2VLImageProcessor", **fields}
    (directory / "preprocessor_config.json").write_text(json.dumps(whole))
    found = read_image_processor(directory, overrides)
    assert isinstance(found, PatchProcessor)
    return found


@pytest.fixture(scope="module")
def patches() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(GOLDEN / "make" / "make_golden_patches.py")))


# By the names of the golden file: the processor, whether its patches are in lines, and how often each is seen.
KINDS = {
    "pictures": ("Qwen2VLImageProcessor", False, 2),
    "paddleocr_vl": ("PaddleOCRVLImageProcessor", True, 1),
    "glm46v": ("Glm46VImageProcessor", False, 2),
}


def rows_of(patches: SimpleNamespace, directory: Path, step: int, name: str) -> list[list[Any]]:
    """What this library makes of the pictures, as `make_golden_patches.seen` tells it."""
    kind, in_lines, frames = KINDS[name]
    processors = {
        name: processor_of(directory, fields | {"image_processor_type": kind})
        for name, fields in patches.PROCESSORS.items()
    }
    decoders = {name: ImageDecoder(each) for name, each in processors.items()}
    found = []
    for name, kind, data in patches.BASE.pictures(0, step):
        processor, decoder = processors[kind], decoders[kind]
        (tile,) = decoder.tiles(data)
        size = processor.patch_size
        cut = value_table(processor)[
            np.arange(3)[:, None, None], patches_of(tile, size, 1 if in_lines else processor.merge_size)
        ]
        seen = np.broadcast_to(cut[:, :, None], (len(cut), 3, frames, size, size))
        found.append([name, tile.shape[0] // size, tile.shape[1] // size, patches.BASE.digest(seen)])
        assert decoder.grid(data).tokens == len(cut) // processor.merge_size**2
    for decoder in decoders.values():
        decoder.close()
    return found


@pytest.mark.parametrize("name", default(KINDS))
def test_pixels_in_patches_are_those_of_transformers(
    patches: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    golden = json.loads((GOLDEN / "images" / "patches.json").read_text())[name]
    assert len(golden) > 70
    assert rows_of(patches, tmp_path, patches.STEP, name) == golden


@pytest.mark.oracle
def test_all_pixels_are_those_of_transformers(patches: SimpleNamespace, tmp_path: Path) -> None:
    every = patches.golden(1)
    for name in (*KINDS, "gemma4"):
        assert len(every[name]) >= 500
    for name in KINDS:
        assert rows_of(patches, tmp_path, 1, name) == every[name]
    committed = json.loads((GOLDEN / "images" / "patches.json").read_text())
    assert patches.golden() == committed


@pytest.mark.oracle
@given(
    width=st.integers(1, 4000) | st.integers(1, 40),
    height=st.integers(1, 4000) | st.integers(1, 40),
    unit=st.sampled_from((14, 28, 32)),
)
def test_sizes_are_those_of_transformers(width: int, height: int, unit: int) -> None:
    from transformers.models.glm46v.image_processing_pil_glm46v import smart_resize as of_glm
    from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import smart_resize as of_paddle
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_qwen

    if max(width, height) > 150 * min(width, height):  # enlarged and rounded, more than 200 are refused there
        return
    common = {"resample": 3, "rescale_factor": None, "image_mean": None, "image_std": None}
    edges = {"shortest_edge": 65536, "longest_edge": 2**20}
    qwen = PatchProcessor(patch_size=unit, merge_size=1, **edges, **common)
    assert qwen.grid(width, height).whole == of_qwen(height, width, unit, 65536, 2**20)[::-1]
    paddle = replace(qwen, enlarged="side by side")
    assert paddle.grid(width, height).whole == of_paddle(height, width, unit, 65536, 2**20)[::-1]
    glm = replace(qwen, enlarged="at once", frames=2)
    assert glm.grid(width, height).whole == of_glm(2, height, width, 2, unit, 65536, 2**20)[::-1]


def test_prompts_are_expanded_as_in_transformers(patches: SimpleNamespace, tmp_path: Path) -> None:
    processor = processor_of(tmp_path, patches.PROCESSORS["small"])
    golden = json.loads((GOLDEN / "images" / "patches.json").read_text())["prompts"]
    for (text, sizes), expected in zip(patches.PROMPTS, golden, strict=True):
        assert expand(text, [processor.grid(*size) for size in sizes], 0, QWEN3_VL)[0] == expected


def test_sizes_of_the_published_processor(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, PUBLISHED)
    sizes = ((640, 480), (1, 1), (33, 31), (48, 80), (5000, 4000), (200, 1))
    assert [processor.grid(*size).whole for size in sizes] == [
        (640, 480),
        (256, 256),
        (288, 256),
        (224, 352),
        (4576, 3648),
        (3648, 32),
    ]
    smaller = processor_of(tmp_path, PUBLISHED, size={"shortest_edge": 1024, "longest_edge": 65536})
    assert smaller.grid(640, 480).tokens == 54
    assert processor_of(tmp_path, PUBLISHED, min_pixels=1024, max_pixels=65536) == smaller


PADDLE = {  # that of PaddleOCR-VL
    "auto_map": {"AutoImageProcessor": "image_processing_paddleocr_vl.PaddleOCRVLImageProcessor"},
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "PaddleOCRVLImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_pixels": 2822400,
    "merge_size": 2,
    "min_pixels": 147384,
    "patch_size": 14,
    "processor_class": "PaddleOCRVLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "temporal_patch_size": 1,
}


GLM = {  # that of GLM-OCR
    "size": {"shortest_edge": 12544, "longest_edge": 9633792},
    "do_rescale": True,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Glm46VImageProcessor",
    "processor_class": "Glm46VProcessor",
}


def test_sizes_of_processors_that_read_pages(tmp_path: Path) -> None:
    """A page of 200 dots an inch, and a line of text that is lower than a square. Files name edges in three ways."""
    processor = processor_of(tmp_path, PADDLE)
    assert [processor.grid(*size).whole for size in ((1654, 2339), (900, 20))] == [(1400, 1988), (2576, 84)]
    assert processor.grid(1654, 2339).tokens == 3550
    pixels = {"min_pixels": 147384, "max_pixels": 2822400}
    without = {name: value for name, value in PADDLE.items() if name not in pixels}
    edges = {"shortest_edge": 147384, "longest_edge": 2822400}
    for size in (edges, pixels):
        assert processor_of(tmp_path, without | {"size": size}) == processor
    assert processor_of(tmp_path, PADDLE | {"size": {"min_pixels": 3, "shortest_edge": 4}}) == processor
    assert processor_of(tmp_path, PADDLE, max_pixels=10**6).longest_edge == 10**6
    assert processor_of(tmp_path, without).longest_edge == 1536**2
    with pytest.raises(CheckpointError, match=r"mm_processor_kwargs: num_crops.* for PaddleOCR-VL"):
        processor_of(tmp_path, PADDLE, num_crops=3)
    glm = processor_of(tmp_path, GLM)
    sizes = ((1654, 2339), (900, 20), (20, 10), (6000, 4000))
    assert [glm.grid(*size).whole for size in sizes] == [(1652, 2352), (1260, 28), (112, 56), (2688, 1792)]
    assert processor_of(tmp_path, GLM, max_pixels=6422528).grid(1654, 2339).tokens == 4028
    assert processor_of(tmp_path, GLM | {"temporal_patch_size": 1}).grid(6000, 4000).tokens == 12150
    assert replace(
        processor_of(tmp_path, {"image_processor_type": GLM["image_processor_type"]}), frames=1
    ) == (replace(glm, longest_edge=28**2 * 15000, frames=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_pixels": 3136}, "min_pixels = 3136: not supported for Qwen3-VL"),
        ({"size": {"height": 2, "width": 2}}, "size.height"),
        ({"size": {"shortest_edge": 9, "longest_edge": 4}}, "longest_edge"),
        ({"do_resize": False}, "do_resize"),
        ({"image_std": [1, 1, 0]}, "not 0"),
        ({"patch_size": 0}, "patch_size"),
    ],
)
def test_fields_that_would_change_pixels_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        processor_of(tmp_path, PUBLISHED | change)
    for overrides, message in (
        ({"max_pixels": 3}, "longest_edge = 3"),
        ({"min_pixels": "few"}, "mm_processor_kwargs: min_pixels"),
        ({"num_crops": 3}, "mm_processor_kwargs: num_crops"),
        ({"max_pixels": 9999, "size": {}}, "mm_processor_kwargs: size"),
    ):
        with pytest.raises(CheckpointError, match=message):
            processor_of(tmp_path, PUBLISHED, **overrides)


def tower_of(dtype: str, most_tokens: int = 80, name: str = "qwen3_vl") -> VisionTower:
    found = load_vision(GOLDEN / "families" / name, dtype=dtype)
    slices = TowerSlices(found.config, most_tokens)
    return VisionTower(found.config, found.dtype, found.weights, TABLE, slices=slices)


TOWERS = ["qwen3_vl", "qwen3_vl_moe", "qwen3_5_vision", "qwen3_5_moe_vision", "paddleocr_vl", "glm_ocr"]
TOWERS += ["gemma4_vision", "gemma4_vision_windows"]


@pytest.mark.parametrize("name", TOWERS)
def test_features_are_those_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each bucket: spare rows change nothing but roundings, and the bucket follows from the picture alone."""
    golden = np.load(GOLDEN / "families" / name / "golden.npz")
    tower = tower_of("float32", name=name)
    assert tuple(tower.slices.parts) == tower.config.buckets[:2]
    pictures = [golden[f"tile{at}"] for at in range(4)]
    for at, tile in enumerate(pictures):
        expected = golden[f"features{at}"]
        found = tower(tile)
        assert found.shape == expected.shape
        # The embedding, and what taps add.
        for part in np.split(np.arange(found.shape[1]), 1 + len(tower.config.taps)):
            assert difference(found[:, part], expected[:, part]) < 1e-5
    first = tower(pictures[0])
    large = tower.slices.of(80)
    assert large[0] == tower.config.buckets[1]
    monkeypatch.setattr(tower.slices, "of", lambda _: large)
    assert 0 <= difference(tower(pictures[0]), first) < 1e-5
    monkeypatch.undo()
    for wrong in (pictures[0][..., ::-1], pictures[0][::-1]):
        assert difference(tower(np.ascontiguousarray(wrong)), golden["features0"]) > 1e-2
    tower.close()


def test_a_picture_has_the_same_bits_whatever_came_before() -> None:
    golden = np.load(MODEL / "golden.npz")
    few, many = tower_of("bfloat16", 10), tower_of("bfloat16", 80)
    alone = few(golden["tile0"])
    many(golden["tile3"])
    assert np.array_equal(many(golden["tile0"]), alone) and tile_differences(few) == []
    assert np.array_equal(alone.astype(ml_dtypes.bfloat16).astype(np.float32), alone)
    assert difference(alone, golden["features0"]) < 0.1
    assert few.tokens((8, 8 * 64, 3)) == 64 and few.tokens((8, 8 * 65, 3)) is None
    assert few.tokens((8, 12, 3)) is None and few.tokens((8, 8, 4)) is None
    few.close()
    many.close()


@pytest.mark.oracle
@pytest.mark.parametrize("name", TOWERS)
def test_golden_features_are_rederived(name: str) -> None:
    import torch
    import transformers

    families = runpy.run_path(str(GOLDEN / "make" / "make_golden_families.py"))
    directory = GOLDEN / "families" / name
    committed = np.load(directory / "golden.npz")
    kind = getattr(transformers, families["CASES"][name][0])
    model = kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    derived = families["seen"](model, int(committed["seed"]))
    for at in range(len(families["GRIDS"])):
        np.testing.assert_array_equal(derived[f"tile{at}"], committed[f"tile{at}"])
        assert difference(derived[f"features{at}"], committed[f"features{at}"]) < 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a processor, and a tokenizer of bytes whose ids end as the model's do."""
    directory = tmp_path_factory.mktemp("model") / "qwen3_vl"
    shutil.copytree(MODEL, directory)
    letters = [chr(33 + at) for at in range(90)]
    vocabulary = {letter: at for at, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="!"))
    made.add_tokens([f"filler {at}" for at in range(195 - len(letters))])
    made.add_special_tokens(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    made.save(str(directory / "tokenizer.json"))
    fields = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4}
    processor_of(directory, PUBLISHED | fields)
    return directory


TEXT = "What<|vision_start|><|image_pad|><|vision_end|>?"


@pytest.mark.full
def test_a_question_about_a_file(model: Path, tmp_path: Path) -> None:
    """Through `LLM`: the same answer alone and beside others; places count as many tokens as the picture has."""
    small, wide = as_file(20, 30), as_file(64, 16)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = {"max_num_seqs": 2, "max_model_len": 128, "chunk_size": 16, "prefill_lanes": (2,)}
    options |= {"self_check": False}

    def asked(*files: bytes) -> dict[str, Any]:
        images = [Image.open(BytesIO(file)) for file in files]
        return {"prompt": TEXT * len(files), "multi_modal_data": {"image": images}}

    llm = LLM(model, **options)
    (first,) = llm.generate([asked(small)], params)
    with ImageEncoder(model) as encoder:
        tokens = [encoder.tokens(encoder.grid(file)) for file in (small, wide)]
        assert len(encoder.encode(small)) == tokens[0] == 8
    assert first.prompt_token_ids is not None
    assert list(first.prompt_token_ids).count(197) == tokens[0]
    again, both, text = llm.generate([asked(small), asked(small, wide), "Why?"], params)
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert list(both.prompt_token_ids or ()).count(197) == sum(tokens)
    assert len(text.outputs[0].token_ids) == 6
    with pytest.raises(InvalidRequestError, match=r"2 <\|image_pad\|> and 1 pictures"):
        llm.generate([asked(small) | {"prompt": TEXT * 2}], params)
    report = inspect_model(model, EngineConfig(**options))
    features = llm.engine.runner.features
    assert report.vision is not None and features is not None
    assert report.vision["features"] == features.rows.nbytes
    llm.close()


MARKS = {  # of a family: what is before a picture, what stands for it, and what is behind
    "paddleocr_vl": ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
    "glm_ocr": ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>"),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "fields"), [("paddleocr_vl", PADDLE), ("glm_ocr", GLM)])
def test_a_batch_of_pages(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Through `LLM`, in a conversation: each page has the answer that it has alone."""
    directory, marks = tmp_path / name, MARKS[name]
    shutil.copytree(GOLDEN / "families" / name, directory)
    letters = {chr(33 + at): at for at in range(90)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[], unk_token="!"))
    made.add_tokens([f"filler {at}" for at in range(195 - len(letters))])
    made.add_special_tokens([marks[0], marks[2], marks[1], "<|video|>"])
    made.save(str(directory / "tokenizer.json"))
    template = (
        "{% for part in messages[0].content %}"
        f"{{% if part.type == 'text' %}}{{{{ part.text }}}}{{% else %}}{''.join(marks)}{{% endif %}}"
        "{% endfor %}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    small = {"size": {"shortest_edge": 256, "longest_edge": 8192}, "min_pixels": None, "max_pixels": None}
    processor_of(directory, fields | small | {"patch_size": 4})
    pages = [Image.open(BytesIO(as_file(*size))) for size in ((20, 30), (64, 16), (3, 40))]
    chats = [
        [
            {
                "role": "user",
                "content": [{"type": "image_pil", "image_pil": page}, {"type": "text", "text": "OCR:"}],
            }
        ]
        for page in pages
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    llm = LLM(
        directory, max_num_seqs=3, max_model_len=96, chunk_size=16, prefill_lanes=(2,), self_check=False
    )
    alone = [llm.chat([chat], params)[0] for chat in chats]
    together = llm.chat(chats, params)
    with ImageEncoder(directory) as encoder:
        counts = [encoder.tokens(encoder.grid(as_file(*size))) for size in ((20, 30), (64, 16), (3, 40))]
    for one, other, count in zip(alone, together, counts, strict=True):
        assert one.prompt_token_ids is not None and list(one.prompt_token_ids).count(197) == count
        assert one.prompt_token_ids[0] == 195 and one.outputs == other.outputs
    assert len({each.images_sha256 for each in together}) == 3
    llm.close()


def test_a_dry_run_counts_pictures_as_the_engine_does(model: Path, tmp_path: Path) -> None:
    """Tiles and tokens by headers, also with other limits of pixels."""
    folder, source = tmp_path / "pictures", tmp_path / "in.jsonl"
    folder.mkdir()
    files = {"small.png": as_file(20, 30), "wide.png": as_file(64, 16), "large.png": as_file(60, 60)}
    for name, file in files.items():
        (folder / name).write_bytes(file)
    lines = [{"prompt": TEXT, "images": [name]} for name in files]
    lines += [{"prompt": TEXT + TEXT, "images": ["small.png", "wide.png"]}, {"prompt": TEXT}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def counted(**overrides: int) -> tuple[int, str]:
        """Tokens of the prompts, and the report of a dry run."""
        given = ["--mm-processor-kwargs", json.dumps(overrides)] if overrides else []
        options = ["--max-model-len", "96", "--max-tokens", "6", "--allowed-local-media-path", folder]
        result = invoke("run", source, "--dry-run", "--model", model, *options, *given)
        with ImageEncoder(model, mm_processor_kwargs=overrides) as encoder:
            grids = {name: encoder.grid(file) for name, file in files.items()}
            prompts = [
                encoder.prompt(str(line["prompt"]), [grids[name] for name in line["images"]])
                for line in lines[:-1]
            ]
        return sum(len(prompt.token_ids) for prompt in prompts), str(result.output)

    tokens, found = counted()
    assert f"prompt tokens        {tokens}\n" in found and "tiles of pictures    5" in found
    assert "5: 4 ok, 1 would fail" in found and "invalid" in found
    fewer, found = counted(max_pixels=512)
    assert fewer < tokens and f"prompt tokens        {fewer}\n" in found
    assert "mm_processor_kwargs: max_tiles" in counted_error(model, source, '{"max_tiles": 3}')
    assert "mm_processor_kwargs must be an object" in counted_error(model, source, "3")


def counted_error(model: Path, source: Path, given: str) -> str:
    result = invoke("run", source, "--dry-run", "--model", model, "--mm-processor-kwargs", given)
    assert result.exit_code
    return str(result.output)


def test_overrides_of_the_processor_are_part_of_the_fingerprint(model: Path) -> None:
    """And of the digests by which caches know pictures."""
    found = []
    for overrides in (None, {"max_pixels": 512}, {"size": {"shortest_edge": 256, "longest_edge": 512}}):
        options = EngineConfig(mm_processor_kwargs=overrides, max_model_len=96)
        described = describe(open_model(model), options)
        tower, reader = load_tower(described), load_reader(described)
        assert isinstance(tower, VisionTower) and reader is not None
        (placed,) = reader.prompt(TEXT, [Picture(as_file(60, 60), "a")]).pictures
        assert isinstance(placed, PlacedPicture)
        found.append((tower.fingerprint, placed.digest, placed.grid.tokens))
        assert options.options().get("mm_processor_kwargs") == overrides
        reader.close()
        tower.close()
    assert found[1] == found[2] and not set(found[0]) & set(found[1])


def test_a_picture_beyond_the_largest_bucket_is_refused(tmp_path: Path) -> None:
    decoder = ImageDecoder(processor_of(tmp_path, PUBLISHED))
    assert decoder.grid(as_file(2048, 2048)).tokens == 4096
    with pytest.raises(ImageTooLargeError, match="4160 tokens; the vision tower reads at most 4096"):
        decoder.grid(as_file(2048, 2080))
    decoder.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"in_channels": 4}}, "in_channels"),
        ({"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
        ({"vision_config": {"num_heads": 3}}, "num_heads"),
        (
            {"vision_config": {"out_hidden_size": 41}},
            "out_hidden_size = 41: must be the decoder's hidden_size, 40",
        ),
        ({"vision_config": {"deepstack_visual_indexes": [0, 3]}}, "deepstack_visual_indexes"),
        ({"vision_config": {"deepstack_visual_indexes": [0]}}, r"deepstack_merger_list\.1\..* is not part"),
        ({"vision_config": {"num_position_embeddings": 35}}, "num_position_embeddings = 35"),
        ({"vision_config": {"spatial_merge_size": 3}}, "spatial_merge_size = 3"),
        ({"vision_config": {"depth": 4}}, r"blocks\.3\..* is missing"),
        ({"vision_config": None}, "vision_config"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    model: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_vision(changed(model, tmp_path / "changed", change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("paddleocr_vl", {"vision_config": {"hidden_act": "silu"}}, "hidden_act"),
        ("paddleocr_vl", {"vision_config": {"num_channels": 1}}, "num_channels"),
        ("paddleocr_vl", {"vision_config": {"image_size": 2}}, "image_size"),
        ("paddleocr_vl", {"vision_config": {"image_size": 28}}, r"position_embedding\.weight has shape"),
        ("glm_ocr", {"vision_config": {"attention_bias": False}}, "attention_bias = false"),
        ("glm_ocr", {"vision_config": {"hidden_act": "gelu"}}, "only silu"),
        ("glm_ocr", {"vision_config": {"out_hidden_size": 41}}, "out_hidden_size = 41"),
        ("glm_ocr", {"vision_config": {"spatial_merge_size": 4}}, r"downsample\.weight has shape"),
    ],
)
def test_towers_that_read_pages_are_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_vision(changed(GOLDEN / "families" / name, tmp_path / "changed", change))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("qwen3_vl", {"mrope_section": [9, 9, 9]}, "mrope_section"),
        ("qwen3_vl", {"mrope_interleaved": False}, "mrope_interleaved = false"),
        ("paddleocr_vl", {"mrope_section": None}, "mrope_section"),
        ("glm_ocr", {"mrope_section": [2, 3, 2]}, "add up to the 8 angles"),
    ],
)
def test_other_positions_are_refused(tmp_path: Path, name: str, fields: dict[str, Any], message: str) -> None:
    directory = changed(GOLDEN / "families" / name, tmp_path / "changed", {})
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= fields
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_vision(directory)


def test_a_processor_of_another_tower_is_refused(model: Path, tmp_path: Path) -> None:
    other = changed(model, tmp_path / "other", {})
    processor_of(other, PUBLISHED)
    with pytest.raises(CheckpointError, match="makes patches of "):
        ImageEncoder(other)
    broken = changed(model, tmp_path / "broken", {})
    tensors = load_file(broken / "model.safetensors")
    tensors["model.visual.merger.norm.weight"][0] = np.inf
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"merger\.norm\.weight holds NaN or infinite"):
        ImageEncoder(broken)


def test_pictures_of_the_published_size_are_upright(tmp_path: Path) -> None:
    """EXIF's orientation comes first, as in transformers' `load_image`."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = BytesIO()
    Image.linear_gradient("L").resize((64, 32)).convert("RGB").save(file, "PNG", exif=exif)
    decoder = ImageDecoder(processor_of(tmp_path, PUBLISHED))
    (tile,) = decoder.tiles(file.getvalue())
    upright = ImageOps.exif_transpose(Image.open(file))
    expected = upright.resize(decoder.grid(file.getvalue()).whole, resample=Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(tile, np.asarray(expected))
    decoder.close()
