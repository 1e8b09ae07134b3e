"""Prompts with pictures have transformers' token ids, and spans by place."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.images.conftest import GOLDEN
from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.images.processor import ImageProcessor
from xla_engine.images.prompt import GEMMA3, IDEFICS3, image_prompt
from xla_engine.text.tokenizer import Tokenizer

PROCESSOR = ImageProcessor(
    longest_edge=128,
    tile=32,
    do_image_splitting=True,
    resample=1,
    rescale_factor=1 / 255,
    image_mean=None,
    image_std=None,
)
ONE_TILE = replace(PROCESSOR, longest_edge=None, do_image_splitting=False)
TOKENIZER = Tokenizer(tokenizers.Tokenizer.from_file(str(GOLDEN / "images" / "tokenizer.json")))
IMAGE_ID = TOKENIZER.plain_ids("<image>")[0]


def test_token_ids_are_those_of_transformers(script: SimpleNamespace, golden: dict[str, Any]) -> None:
    for (text, sizes), expected in zip(script.PROMPTS, golden["prompts"], strict=True):
        grids = [PROCESSOR.grid(*size) for size in sizes]
        prompt = image_prompt(text, grids, script.IMAGE_SEQ_LEN, TOKENIZER, IDEFICS3)
        assert list(prompt.token_ids) == expected
        assert len(prompt.spans) == sum(grid.tiles for grid in grids)


def test_token_ids_of_gemma3_are_those_of_transformers(
    script: SimpleNamespace, golden: dict[str, Any]
) -> None:
    """Line ends around a picture merge with those of the text."""
    soft = TOKENIZER.plain_ids("<image_soft_token>")[0]
    for (text, sizes), expected in zip(script.GEMMA3_PROMPTS, golden["gemma3"]["prompts"], strict=True):
        grids = [ONE_TILE.grid(*size) for size in sizes]
        prompt = image_prompt(text, grids, script.IMAGE_SEQ_LEN, TOKENIZER, GEMMA3)
        assert list(prompt.token_ids) == expected
        covered = [at for span in prompt.spans for at in range(span.start, span.start + span.length)]
        assert covered == [at for at, token in enumerate(expected) if token == soft]
        assert [span.image for span in prompt.spans] == list(range(len(sizes)))
    with pytest.raises(InvalidRequestError, match="1 <start_of_image> and 2 pictures"):
        image_prompt("<start_of_image>", grids[:1] * 2, 4, TOKENIZER, GEMMA3)
    with pytest.raises(InvalidRequestError, match="Write <start_of_image> where a picture is"):
        image_prompt("<start_of_image> <image_soft_token>", grids[:1], 4, TOKENIZER, GEMMA3)


@given(
    texts=st.lists(st.text("a\né ", max_size=3), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=3, max_size=3),
    run=st.integers(1, 5),
)
def test_spans_are_the_image_tokens_in_order(
    texts: list[str], sizes: list[tuple[int, int]], run: int
) -> None:
    grids = [PROCESSOR.grid(*size) for size in sizes[: len(texts) - 1]]
    prompt = image_prompt("<image>".join(texts), grids, run, TOKENIZER, IDEFICS3)
    covered = [at for span in prompt.spans for at in range(span.start, span.start + span.length)]
    assert covered == [at for at, token in enumerate(prompt.token_ids) if token == IMAGE_ID]
    assert [(span.image, span.tile) for span in prompt.spans] == [
        (image, tile) for image, grid in enumerate(grids) for tile in range(grid.tiles)
    ]
    assert all(span.length == run for span in prompt.spans)


def test_spans_do_not_move_with_tokens_that_a_tokenizer_adds() -> None:
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "images" / "tokenizer.json"))
    special = [("<end_of_utterance>", TOKENIZER.plain_ids("<end_of_utterance>")[0])]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<end_of_utterance> $A <end_of_utterance>", special_tokens=special
    )
    grids = [PROCESSOR.grid(20, 20)]
    plain = image_prompt("<image>", grids, 2, TOKENIZER, IDEFICS3)
    added = image_prompt("<image>", grids, 2, Tokenizer(backend), IDEFICS3)
    assert [span.start for span in added.spans] == [span.start + 1 for span in plain.spans]


@pytest.mark.parametrize(("text", "count"), [("no", 1), ("<image>", 0), ("<image> or <image>", 1)])
def test_placeholders_and_pictures_must_be_equally_many(text: str, count: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"and {count} pictures"):
        image_prompt(text, [PROCESSOR.grid(8, 8)] * count, 2, TOKENIZER, IDEFICS3)


def test_a_tokenizer_without_the_token_is_refused() -> None:
    backend = tokenizers.Tokenizer.from_str(
        (GOLDEN / "images" / "tokenizer.json").read_text().replace('"<image>"', '"<picture>"')
    )
    with pytest.raises(CheckpointError, match="does not read <image> as one token"):
        image_prompt("<image>", [PROCESSOR.grid(8, 8)], 2, Tokenizer(backend), IDEFICS3)
