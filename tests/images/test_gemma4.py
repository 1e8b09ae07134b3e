"""Gemma 4's pictures: sizes, pixels and prompts are transformers'; what does not fit is refused by name."""

from __future__ import annotations

import json
import runpy
import shutil
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.images.conftest import GOLDEN
from tests.images.test_features import changed
from tests.images.test_features import picture as as_file
from xla_engine import LLM, SamplingParams
from xla_engine.config import EngineConfig
from xla_engine.engine.inspection import inspect_model
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.graphs.vision.config import SOFT_TOKENS
from xla_engine.images.decoder import ImageDecoder
from xla_engine.images.encoder import ImageEncoder
from xla_engine.images.processor import SoftTokenProcessor, read_image_processor, value_table
from xla_engine.images.prompt import expand, prompt_form
from xla_engine.model_loader.vision import load_vision
from xla_engine.runner.vision_tower import patches_of

MODEL = GOLDEN / "families" / "gemma4_vision"
PUBLISHED = {  # within processor_config.json of gemma-4-E2B-it and the larger ones
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_seq_length": 280,
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": 280,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}


def processor_of(directory: Path, fields: dict[str, Any], **overrides: Any) -> SoftTokenProcessor:
    """Of a processor_config.json, as published."""
    whole = {"processor_class": "Gemma4Processor", "image_processor": PUBLISHED | fields}
    (directory / "processor_config.json").write_text(json.dumps(whole))
    found = read_image_processor(directory, overrides)
    assert isinstance(found, SoftTokenProcessor)
    return found


def rows_of(script: SimpleNamespace, directory: Path, step: int) -> list[list[Any]]:
    """What this library makes of the pictures, as `make_golden_patches.seen_softly` tells it."""
    processors = {name: processor_of(directory, each) for name, each in script.SOFT_PROCESSORS.items()}
    decoders = {name: ImageDecoder(each) for name, each in processors.items()}
    found = []
    for name, kind, data in script.BASE.pictures(0, step):
        size = processors[kind].patch_size
        (tile,) = decoders[kind].tiles(data)
        values = value_table(processors[kind])[np.arange(3)[:, None, None], patches_of(tile, size, 1)]
        digest = script.BASE.digest(values.transpose(0, 2, 3, 1))
        found.append([name, tile.shape[0] // size, tile.shape[1] // size, digest])
    for decoder in decoders.values():
        decoder.close()
    return found


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(GOLDEN / "make" / "make_golden_patches.py")))


def test_pixels_are_those_of_transformers(script: SimpleNamespace, tmp_path: Path) -> None:
    golden = json.loads((GOLDEN / "images" / "patches.json").read_text())["gemma4"]
    assert len(golden) > 70
    assert rows_of(script, tmp_path, script.STEP) == golden


@pytest.mark.oracle
def test_all_pixels_are_those_of_transformers(script: SimpleNamespace, tmp_path: Path) -> None:
    every = script.seen_softly(1)
    assert len(every) >= 500 and rows_of(script, tmp_path, 1) == every


@pytest.mark.oracle
@given(
    width=st.integers(1, 6000) | st.integers(1, 40),
    height=st.integers(1, 6000) | st.integers(1, 40),
    tokens=st.sampled_from(SOFT_TOKENS),
)
def test_sizes_are_those_of_transformers(width: int, height: int, tokens: int) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

    values = {"resample": 3, "rescale_factor": None, "image_mean": None, "image_std": None}
    ours = SoftTokenProcessor(max_soft_tokens=tokens, patch_size=16, merge_size=3, **values)
    theirs = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
    assert ours.grid(width, height).whole == theirs[::-1]


def test_sizes_of_the_published_processor(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, {})
    sizes = ((640, 480), (1, 1), (1654, 2339), (4000, 20), (20, 4000))
    grids = [processor.grid(*size) for size in sizes]
    assert [grid.whole for grid in grids] == [(912, 672), (768, 768), (672, 912), (11328, 48), (48, 11328)]
    assert [grid.tokens for grid in grids] == [266, 256, 266, 236, 236]
    assert max(processor.grid(at, 1000).tokens or 0 for at in range(1, 9999, 7)) == 280
    smaller = processor_of(tmp_path, {}, max_soft_tokens=70)
    assert smaller.grid(640, 480).whole == (432, 336)


def test_prompts_are_expanded_as_in_transformers(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, {})
    grids = [processor.grid(640, 480), processor.grid(9, 9)]
    found, runs = expand("a<|image|>b<|image|>", grids, 0, prompt_form("gemma4"))
    runs_of = [f"<|image>{'<|image|>' * (grid.tokens or 0)}<image|>" for grid in grids]
    assert found == f"a{runs_of[0]}b{runs_of[1]}" and len(runs) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_soft_tokens": 300}, "max_soft_tokens = 300: must be one of 70, 140, 280"),
        ({"do_normalize": True, "image_mean": [0.5] * 3}, "image_mean"),
        ({"do_resize": False}, "do_resize"),
        ({"num_crops": 3}, "num_crops"),
        ({"patch_size": 0}, "patch_size"),
    ],
)
def test_fields_that_would_change_pixels_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        processor_of(tmp_path, change)


def test_overrides_are_checked(tmp_path: Path) -> None:
    for overrides, message in (
        ({"max_soft_tokens": 71}, "mm_processor_kwargs: max_soft_tokens = 71"),
        ({"max_pixels": 9}, "mm_processor_kwargs: max_pixels"),
    ):
        with pytest.raises(CheckpointError, match=message):
            processor_of(tmp_path, {}, **overrides)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads = 1: must be num_attention_heads, 3"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"head_dim": 6}, "head_dim = 6 is not a multiple of four"),
        ({"use_clipped_linears": False}, r"input_max' is not part of the model"),
        ({"standardize": True}, r"std_bias is missing"),
        ({"position_embedding_size": 99}, r"position_embedding_table has shape"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_vision(changed(MODEL, tmp_path / "changed", {"vision_config": change}))


def test_a_processor_of_another_tower_is_refused(tmp_path: Path) -> None:
    other = changed(MODEL, tmp_path / "other", {})
    processor_of(other, {})
    with pytest.raises(CheckpointError, match="makes patches of "):
        ImageEncoder(other)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a processor, a chat template, and a tokenizer of bytes whose ids end as the model's do."""
    directory = tmp_path_factory.mktemp("model") / "gemma4"
    shutil.copytree(MODEL, directory)
    letters = {chr(33 + at): at for at in range(90)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[], unk_token="!"))
    made.add_tokens([f"filler {at}" for at in range(195 - len(letters))])
    made.add_special_tokens(["<|image>", "<image|>", "<|image|>", "<|audio|>"])
    made.save(str(directory / "tokenizer.json"))
    template = (
        "{% for part in messages[0].content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% else %}<|image|>{% endif %}{% endfor %}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    processor_of(directory, {"max_soft_tokens": 70, "patch_size": 2})
    return directory


@pytest.mark.full
def test_a_batch_of_pictures(model: Path) -> None:
    """Through `LLM`, in a conversation: each picture has the answer that it has alone. Sound is refused by name."""
    sizes = ((20, 30), (64, 16), (3, 200))
    chats = [
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What"},
                    {"type": "image_pil", "image_pil": Image.open(BytesIO(as_file(*size)))},
                ],
            }
        ]
        for size in sizes
    ]
    options = {"max_num_seqs": 3, "max_model_len": 128, "chunk_size": 16, "prefill_lanes": (2,)}
    llm = LLM(model, self_check=False, **options)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    alone = [llm.chat([chat], params)[0] for chat in chats]
    together = llm.chat(chats, params)
    with ImageEncoder(model) as encoder:
        counts = [encoder.tokens(encoder.grid(as_file(*size))) for size in sizes]
    for one, other, count in zip(alone, together, counts, strict=True):
        ids = list(one.prompt_token_ids or ())
        assert ids.count(197) == count and [ids[-count - 2], ids[-1]] == [195, 196]
        assert one.outputs == other.outputs
    assert len({each.images_sha256 for each in together}) == 3
    sound = [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
    with pytest.raises(InvalidRequestError, match="input_audio"):
        llm.chat([[{"role": "user", "content": sound}]], params)
    report = inspect_model(model, EngineConfig(**options))
    features = llm.engine.runner.features
    assert report.vision is not None and features is not None
    assert report.vision["features"] == features.rows.nbytes
    llm.close()
