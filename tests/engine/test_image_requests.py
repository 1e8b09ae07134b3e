"""Pictures in requests: what a valid one is, and how bad ones are refused."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from xla_engine.engine.requests.validation import ImageForm, RequestValidator
from xla_engine.errors import InvalidRequestError, TokenLimitError
from xla_engine.prompts import PicturedPrompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage, Request

FORM = ImageForm(
    tokens={(8, 8, 3): 4}.get,
    grid=lambda shape: None,
    place_tokens=4,
    places=3,  # of tiles of 8 x 8 pixels
)
VALIDATOR = RequestValidator(vocab_size=50, eos_token_ids=(), max_model_len=64, tokenizer=None, images=FORM)
GREEDY = SamplingParams(temperature=0, max_tokens=2)


def picture(*starts: int, length: int = 4) -> PromptImage:
    tiles = np.zeros((len(starts), 8, 8, 3), np.uint8)
    spans = tuple((start, length) for start in starts)
    return PromptImage(digest=sha256(b"picture").hexdigest(), tiles=tiles, spans=spans)


def checked(*images: PromptImage, validator: RequestValidator = VALIDATOR, **fields: Any) -> Any:
    prompt = PicturedPrompt("text", tuple(range(20)), images)
    params = replace(GREEDY, **fields)
    return validator.checked(prompt, params, {}, add_special_tokens=False).images


def test_pictures_pass_with_their_prompt() -> None:
    images = (picture(1, 5), picture(16))
    assert checked(*images) == images


@pytest.mark.parametrize(
    ("images", "why"),
    [
        ((picture(17),), "positions 17 to 20 of 20"),
        ((picture(3), picture(6)), "positions 6 to 9 of 20"),
        ((picture(8), picture(2)), "positions 2 to 5 of 20"),
        ((picture(-1),), "positions -1 to 2 of 20"),
    ],
)
def test_spans_lie_in_the_prompt_in_order(images: tuple[PromptImage, ...], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        checked(*images)
    with pytest.raises(ValueError, match=why):
        Request(request_id="a", prompt_token_ids=range(20), max_tokens=1, images=images)


def test_a_picture_has_a_digest_and_one_span_for_each_tile() -> None:
    fields = {"digest": "0" * 64, "tiles": np.zeros((1, 8, 8, 3), np.uint8), "spans": ((0, 4),)}
    for wrong, why in (
        ({"digest": "0" * 63 + "G"}, "sha256"),
        ({"spans": ((0, 4), (4, 4))}, "1 tiles and 2 spans"),
        ({"spans": ((0, 0),)}, "at least one position"),
        ({"tiles": (), "spans": ()}, "0 tiles"),
    ):
        with pytest.raises(ValueError, match=why):
            PromptImage(**{**fields, **wrong})  # type: ignore[arg-type]


def test_tiles_are_those_of_the_model() -> None:
    wide = PromptImage(digest="0" * 64, tiles=np.zeros((1, 9, 8, 3), np.uint8), spans=((0, 4),))
    bright = PromptImage(digest="0" * 64, tiles=np.zeros((1, 8, 8, 3), np.float32), spans=((0, 4),))
    for image in (wide, bright):
        with pytest.raises(InvalidRequestError, match="make it uint8 as the checkpoint's"):
            checked(image)
    with pytest.raises(InvalidRequestError, match="3 positions, and a tile has 4"):
        checked(picture(0, length=3))
    with pytest.raises(TokenLimitError, match=r"16 tokens; .* room for 12: raise image_cache_bytes"):
        checked(picture(0, 4, 8, 12))


def test_engines_without_a_tower_refuse_pictures() -> None:
    validator = replace(VALIDATOR, images="this engine has no tower; take another")
    with pytest.raises(InvalidRequestError, match="this engine has no tower; take another"):
        checked(picture(0), validator=validator)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs are not supported for prompts with pict"):
        checked(picture(0), prompt_logprobs=0)
