"""Pictures of a prompt: where their tokens are, one result for each broken file, and errors that name the picture."""

from __future__ import annotations

import os
import random
import resource
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.images.test_features import model
from xla_engine.engine.requests.validation import ImageForm, RequestValidator
from xla_engine.errors import ImageTooLargeError, InvalidImageError, InvalidRequestError, TokenLimitError
from xla_engine.images.decoder import ImageLimits
from xla_engine.images.encoder import ImageEncoder
from xla_engine.images.pictures import MAX_PICTURES, PictureReader, tiles_sha256
from xla_engine.model_loader.model_files import open_model
from xla_engine.prompts import Picture, PicturedPrompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage

__all__ = ["model"]


@pytest.fixture(scope="module")
def reader(model: Path) -> Any:
    found = PictureReader.of_model(open_model(model))
    assert found is not None
    yield found
    found.close()


def picture(width: int = 30, height: int = 20, form: str = "PNG") -> bytes:
    file = BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(file, form)
    return file.getvalue()


def read(reader: PictureReader, *sources: Any) -> PicturedPrompt:
    return reader.prompt(
        "<image>" * len(sources), [Picture(each, f"images[{n}]") for n, each in enumerate(sources)]
    )


def test_places_and_tiles_are_those_of_the_encoder(reader: PictureReader, model: Path) -> None:
    files = [picture(60, 30), picture(20, 20, "JPEG")]
    found = reader.prompt("a<image>b<image>", [Picture(file, "x") for file in files])
    with ImageEncoder(model) as encoder:
        placed = encoder.prompt("a<image>b<image>", [encoder.grid(file) for file in files])
        assert (found.token_ids, reader.image_seq_len) == (placed.token_ids, encoder.config.tokens)
        assert [list(each.starts) for each in found.pictures] == [
            [span.start for span in placed.spans if span.image == image] for image in (0, 1)
        ]
        tiles = [reader.tiles(each) for each in found.pictures]
        for file, mine in zip(files, tiles, strict=True):
            np.testing.assert_array_equal(mine, encoder.decoder.tiles(file))
    assert found.tiles == sum(map(len, tiles)) == 17
    first, second = found.pictures
    assert first.digest != second.digest and tiles_sha256(tiles[0]) != tiles_sha256(tiles[1])
    assert read(reader, files[0]).pictures[0].digest == first.digest


def test_a_digest_depends_on_the_processor(reader: PictureReader, model: Path) -> None:
    one = PictureReader.of_model(open_model(model), mm_processor_kwargs={"do_image_splitting": False})
    assert one is not None and read(one, picture()).tiles == 1
    assert read(one, picture()).pictures[0].digest != read(reader, picture()).pictures[0].digest
    one.close()


def test_models_without_a_tower_have_no_reader(tmp_path: Path) -> None:
    from xla_engine.environment import embedded_model_directory

    assert PictureReader.of_model(open_model(embedded_model_directory())) is None


def test_errors_name_the_picture(reader: PictureReader) -> None:
    good = picture()
    for bad, code in (
        (b"GIF89a", "invalid_image"),
        ("a.png", "image_not_allowed"),
        (b"x" * (21 << 20), "image_too_large"),
    ):
        with pytest.raises(InvalidImageError, match=r"^images\[1\]: ") as caught:
            read(reader, good, bad)
        assert caught.value.code == code
    cut = read(reader, good, picture(300, 200, "JPEG")[:-99])  # its header is whole
    with pytest.raises(InvalidImageError, match=r"^images\[1\]: "):
        reader.tiles(cut.pictures[1])
    with pytest.raises(InvalidRequestError, match="17 pictures; at most 16"):
        read(reader, *[good] * (MAX_PICTURES + 1))
    with pytest.raises(InvalidRequestError, match="2 <image> and 1 pictures"):
        reader.prompt("<image><image>", [Picture(good, "x")])
    with pytest.raises(InvalidRequestError, match="1 <image> and 0 pictures"):
        reader.prompt("what does <image> mean?", [])


def test_images_of_the_caller_may_have_more_bytes_than_files(model: Path) -> None:
    limits = ImageLimits(max_image_bytes=1000, max_image_pixels=2000)
    small = PictureReader.of_model(open_model(model), limits=limits)
    assert small is not None
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    assert small.tiles(read(small, Image.fromarray(pixels)).pictures[0]).shape == (10, 24, 24, 3)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    for large, message in (
        (file.getvalue(), "max_image_bytes"),
        (np.zeros((50, 50, 3), np.uint8), "2500|pixels"),
    ):
        with pytest.raises(ImageTooLargeError, match=message):
            read(small, large)
    small.close()


COUNT = int(os.environ.get("XLA_ENGINE_BROKEN_PICTURES", "300"))  # findings/images.md tells of a larger one


def test_each_broken_file_has_one_result(reader: PictureReader) -> None:
    """Bytes changed, cut, doubled and joined, in every format: tiles or an error that names the picture."""
    draw = random.Random(0)
    whole = [picture(37, 23, form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")]
    results, workers = Counter[str](), set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(COUNT):
        data = bytearray(draw.choice(whole))
        match draw.randrange(5):
            case 0:
                del data[draw.randrange(len(data)) :]
            case 1:
                data += draw.choice(whole)[draw.randrange(20) :]
            case 2:
                at = draw.randrange(len(data))
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case _:
                for _ in range(draw.randrange(1, 6)):
                    data[draw.randrange(len(data))] = draw.randrange(256)
        try:
            (found,) = read(reader, bytes(data)).pictures
            tiles = reader.tiles(found)
            assert tiles.shape == (found.grid.tiles, 24, 24, 3)
            results["tiles"] += 1
        except InvalidImageError as error:
            assert str(error).startswith("images[0]: ")
            results[error.code] += 1
        workers.add(reader.decoder._process.process)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{dict(results)}, {len(workers)} workers, peak memory {before >> 10} then {after >> 10} MiB")
    assert sum(results.values()) == COUNT, results
    assert min(results["tiles"], results["invalid_image"]) > COUNT // 10, results
    assert read(reader, whole[0]).tiles == 7  # the reader goes on


def test_a_validator_reads_pictures_once_and_leaves_other_prompts_alone(reader: PictureReader) -> None:
    limits = {"vocab_size": 300, "eos_token_ids": (), "max_model_len": 400, "tokenizer": None}
    length = reader.image_seq_len
    form = ImageForm({(24, 24, 3): length}.get, lambda shape: None, length, places=99)
    takes, refuses = RequestValidator(**limits, pictures=reader, images=form), RequestValidator(**limits)
    prompt = {"prompt": "a<image>", "multi_modal_data": {"image": picture()}, "cache_salt": "s"}
    placed = takes.placed(prompt, add_special_tokens=False)
    assert isinstance(placed, PicturedPrompt) and takes.placed(placed, add_special_tokens=False) is placed
    assert (placed.text, placed.cache_salt, len(placed.pictures)) == ("a<image>", "s", 1)
    decoded = takes.decoded(prompt, add_special_tokens=False)
    assert isinstance(decoded, PicturedPrompt) and decoded.token_ids == placed.token_ids
    (image,), (undecoded,) = decoded.pictures, placed.pictures
    assert isinstance(image, PromptImage) and image.digest == undecoded.digest
    assert image.spans == tuple((start, reader.image_seq_len) for start in undecoded.starts)
    np.testing.assert_array_equal(image.tiles, reader.tiles(undecoded))
    for given in (placed, decoded):
        checked = takes.checked(given, SamplingParams(max_tokens=3), {}, add_special_tokens=False)
        assert (checked.token_ids, checked.images) == (decoded.token_ids, decoded.pictures)
    cut = {**prompt, "multi_modal_data": {"image": picture(300, 200, "JPEG")[:-99]}}  # its header is whole
    with pytest.raises(InvalidImageError, match=r"^multi_modal_data\.image\[0\]: "):
        takes.decoded(cut, add_special_tokens=False)
    for given in (
        "a",
        [1, 2],
        {"prompt": "a"},
        {"prompt": "a", "multi_modal_data": {}},
        {"prompt_token_ids": [1]},
    ):
        assert takes.decoded(given, add_special_tokens=True) is given
        assert refuses.placed(given, add_special_tokens=True) is given
    for given in ("<image>", {"prompt": "<image>"}):  # a place without a picture, which some user wrote
        with pytest.raises(InvalidRequestError, match="1 <image> and 0 pictures"):
            takes.placed(given, add_special_tokens=True)
        assert refuses.placed(given, add_special_tokens=True) is given
    for given in (prompt, placed):
        with pytest.raises(InvalidRequestError, match="reads no pictures"):
            refuses.placed(given, add_special_tokens=True)
    with pytest.raises(TokenLimitError):
        takes.checked(placed, SamplingParams(max_tokens=390), {}, add_special_tokens=False)
