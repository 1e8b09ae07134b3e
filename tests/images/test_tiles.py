"""Sizes, tiles and pixels are those of transformers' PIL backend; bad files get one clear error."""

from __future__ import annotations

import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from xla_engine.errors import CheckpointError, ImageTooLargeError, InvalidImageError
from xla_engine.images.decoder import ImageDecoder, ImageLimits
from xla_engine.images.processor import ImageProcessor, read_image_processor, value_table

SMALL = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
# That of SmolVLM-256M-Instruct.
PUBLISHED = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Idefics3ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 512},
    "processor_class": "Idefics3Processor",
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 2048},
}


# That of gemma-3-4b-it, which states what it leaves out.
GEMMA3 = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}


def processor_of(directory: Path, fields: dict[str, Any], **overrides: Any) -> ImageProcessor:
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    return read_image_processor(directory, overrides)


def as_file(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> ImageDecoder:
    return ImageDecoder(processor_of(tmp_path_factory.mktemp("processor"), SMALL))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 8))])
def test_tiles_and_pixels_are_those_of_transformers(
    script: SimpleNamespace, golden: dict[str, Any], tmp_path: Path, part: int
) -> None:
    """Sizes from 1 x 1, all modes, lossless formats and orientations, with and without splitting, two filters."""
    # Mean and deviation of ImageNet's are the class's own defaults; real files state theirs.
    standard = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    decoders = {
        name: ImageDecoder(processor_of(tmp_path, standard | fields))
        for name, fields in script.PROCESSORS.items()
    }
    assert len(golden["pictures"]) >= 500
    for (name, kind, data), expected in zip(
        script.pictures(part, 8), golden["pictures"][part::8], strict=True
    ):
        decoder = decoders[kind]
        grid = decoder.grid(data)
        tiles = decoder.tiles(data, grid)
        pixels = value_table(decoder.processor)[np.arange(3), tiles]
        found = [name, grid.rows, grid.columns, script.digest(tiles), script.digest(pixels)]
        assert found == expected
    for decoder in decoders.values():
        decoder.close()


def test_tiles_and_pixels_of_gemma3_are_those_of_transformers(
    script: SimpleNamespace, golden: dict[str, Any], tmp_path: Path
) -> None:
    """Of every eighth picture; the oracle test compares all."""
    decoders = {
        name: ImageDecoder(processor_of(tmp_path, GEMMA3 | fields)) for name, fields in script.GEMMA3.items()
    }
    compare_gemma3(script, golden["gemma3"], decoders, 8)
    for decoder in decoders.values():
        decoder.close()


def compare_gemma3(script: SimpleNamespace, golden: dict[str, Any], decoders: Any, step: int) -> None:
    files = script.pictures(0, step, script.GEMMA3)
    for (name, kind, data), expected in zip(files, golden["pictures"], strict=True):
        decoder = decoders[kind]
        assert decoder.grid(data).tiles == 1
        tiles = decoder.tiles(data)
        pixels = value_table(decoder.processor)[np.arange(3), tiles]
        assert [name, script.digest(tiles), script.digest(pixels)] == expected


@pytest.mark.oracle
def test_all_pictures_of_gemma3_are_those_of_transformers(script: SimpleNamespace, tmp_path: Path) -> None:
    decoders = {
        name: ImageDecoder(processor_of(tmp_path, GEMMA3 | fields)) for name, fields in script.GEMMA3.items()
    }
    theirs = script.golden_gemma3(1)
    assert len(theirs["pictures"]) >= 500
    compare_gemma3(script, theirs, decoders, 1)


@pytest.mark.oracle
def test_goldens_of_images_are_rederived(script: SimpleNamespace, golden: dict[str, Any]) -> None:
    assert script.golden() == golden


@pytest.mark.oracle
def test_lossy_pictures_of_real_size_are_those_of_transformers(
    script: SimpleNamespace, tmp_path: Path
) -> None:
    """JPEGs with EXIF, whose pixels depend on the version of libjpeg, through the published processor."""
    from PIL import ImageOps
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    decoder = ImageDecoder(processor_of(tmp_path, PUBLISHED))
    theirs = Idefics3ImageProcessorPil(**PUBLISHED)
    for seed, size in enumerate(((640, 480), (333, 1000), (900, 900))):
        exif = Image.Exif()
        exif[0x0112] = 6 + seed
        data = as_file(script.picture(seed, "RGB", size), "JPEG", exif=exif, quality=80)
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        expected = theirs(upright, return_tensors="np")["pixel_values"][0].transpose(0, 2, 3, 1)
        found = value_table(decoder.processor)[np.arange(3), decoder.tiles(data)]
        np.testing.assert_array_equal(found, expected)


def test_tile_counts_of_the_published_processor(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, PUBLISHED)
    counts = {
        size: processor.grid(*size).tiles
        for size in ((640, 480), (512, 512), (100, 100), (2000, 500), (1, 9))
    }
    assert counts == {(640, 480): 13, (512, 512): 17, (100, 100): 17, (2000, 500): 5, (1, 9): 5}
    whole = processor_of(tmp_path, PUBLISHED, do_image_splitting=False)
    assert whole.grid(640, 480).tiles == 1
    smaller = processor_of(tmp_path, PUBLISHED, size={"longest_edge": 512})
    assert smaller.grid(640, 480).tiles == 1


@given(width=st.integers(1, 5000), height=st.integers(1, 5000))
def test_whole_tiles_cover_every_picture(width: int, height: int) -> None:
    processor = ImageProcessor(
        longest_edge=2048,
        tile=512,
        do_image_splitting=True,
        resample=1,
        rescale_factor=None,
        image_mean=None,
        image_std=None,
    )
    grid = processor.grid(width, height)
    assert all(side >= 1 and side % 512 == 0 for side in grid.whole)
    assert grid.tiles == 1 or grid.rows * grid.columns * 512**2 == grid.whole[0] * grid.whole[1]
    assert grid.tiles <= 17


@settings(deadline=None, max_examples=30)
@given(
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    orientation=st.integers(0, 9),
    form=st.sampled_from(("JPEG", "PNG", "TIFF", "WEBP")),
)
def test_the_header_gives_the_size_that_pixels_have(
    decoder: ImageDecoder, size: tuple[int, int], orientation: int, form: str
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = as_file(Image.new("RGB", size, (1, 2, 3)), form, exif=exif)
    grid = decoder.grid(data)
    turned = orientation in (5, 6, 7, 8)
    assert grid.picture == (size[::-1] if turned else size)
    assert decoder.tiles(data, grid).shape == (grid.tiles, 32, 32, 3)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def test_an_orientation_behind_the_pixels_of_a_png_is_found(decoder: ImageDecoder) -> None:
    data = as_file(Image.new("RGB", (20, 10)))
    exif = Image.Exif()
    exif[0x0112] = 6
    end = data.index(b"IEND") - 4
    late = data[:end] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + data[end:]
    assert decoder.grid(data).picture == (20, 10)
    assert decoder.grid(late).picture == (10, 20)
    assert decoder.tiles(late).shape[1:] == (32, 32, 3)


def test_sixteen_bits_are_scaled(decoder: ImageDecoder) -> None:
    """Pillow's own conversion makes everything above 255 white."""
    values = np.array([[0, 257, 32896, 65535]], np.uint16).repeat(4, 0)
    for form in ("PNG", "TIFF"):
        tiles = decoder.tiles(as_file(Image.fromarray(values), form))
        expected = decoder.tiles(as_file(Image.fromarray((values // 257).astype(np.uint8))))
        np.testing.assert_array_equal(tiles, expected)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 16))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_every_bad_file_gets_one_error_and_the_next_picture_is_read(decoder: ImageDecoder) -> None:
    good = as_file(Image.new("RGB", (8, 8), "red"))
    expected = decoder.tiles(good)
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    noisy = Image.effect_noise((64, 64), 90).convert("RGB")
    jpeg, noise = as_file(noisy, "JPEG"), as_file(noisy)
    cases: list[tuple[bytes, type[Exception], str]] = [
        (b"", InvalidImageError, "not a picture in one of the formats JPEG, PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", InvalidImageError, "not a picture"),
        (as_file(Image.new("RGB", (8, 8)), "ICO"), InvalidImageError, "not a picture"),
        (as_file(Image.new("RGB", (8, 8)), "PPM"), InvalidImageError, "not a picture"),
        (
            as_file(frames[0], "GIF", save_all=True, append_images=frames[1:]),
            InvalidImageError,
            "several frames",
        ),
        (jpeg[: len(jpeg) // 2], InvalidImageError, "truncated"),
        (noise[: len(noise) // 2], InvalidImageError, "truncated"),
        (as_file(Image.new("F", (8, 8)), "TIFF"), InvalidImageError, "32 bits"),
        (bomb(50_000, 50_000), ImageTooLargeError, "50000 x 50000 pixels; at most 89478485"),
        (bomb(1_000, 4), ImageTooLargeError, "more than 200 times"),
        (bytes((20 << 20) + 1), ImageTooLargeError, "max_image_bytes"),
    ]
    for data, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            decoder.tiles(data)
        assert type(caught.value) is kind and caught.value.code in ("invalid_image", "image_too_large")
        np.testing.assert_array_equal(decoder.tiles(good), expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damaged_files_give_tiles_or_an_error(decoder: ImageDecoder, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")))
    file = bytearray(as_file(Image.linear_gradient("L").resize((40, 30)).convert("RGB"), form))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    try:
        grid = decoder.grid(bytes(file))
        assert decoder.tiles(bytes(file), grid).shape == (grid.tiles, 32, 32, 3)
    except InvalidImageError as error:
        assert str(error)


def test_a_crash_of_the_worker_costs_one_picture(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = as_file(Image.new("RGB", (8, 8), "red"))
    expected = decoder.tiles(good)
    monkeypatch.setattr("xla_engine.images.decoder.CPU_LIMIT_S", 1e-6)
    with pytest.raises(InvalidImageError, match="processor time"):
        decoder.tiles(as_file(Image.effect_noise((2000, 2000), 90)))
    monkeypatch.undo()
    np.testing.assert_array_equal(decoder.tiles(good), expected)


def test_limits_can_be_set() -> None:
    processor = ImageProcessor(
        longest_edge=32,
        tile=32,
        do_image_splitting=True,
        resample=1,
        rescale_factor=None,
        image_mean=None,
        image_std=None,
    )
    decoder = ImageDecoder(processor, ImageLimits(max_image_pixels=99))
    assert decoder.grid(as_file(Image.new("RGB", (11, 9)))).tiles == 1
    with pytest.raises(ImageTooLargeError, match="at most 99"):
        decoder.grid(as_file(Image.new("RGB", (10, 10))))
    decoder.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan = true: not supported"),
        ({"patch_size": 14}, "patch_size = 14: not supported"),
        ({"image_processor_type": "FuyuImageProcessor"}, "Idefics3ImageProcessor"),
        ({"do_resize": False}, "do_resize"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"size": {"height": 2, "width": 2}}, "size.height"),
        ({"size": {"longest_edge": 5000}}, "1 to 4096"),
        ({"size": None}, "longest_edge"),
        ({"max_image_size": {"longest_edge": 64}}, "at most 16 tiles"),
        ({"resample": 6}, "0 to 5"),
        ({"image_std": [1, 1, 0]}, "not 0"),
        ({"image_mean": [1, 1]}, "three numbers"),
        ({"rescale_factor": -1}, "rescale_factor"),
    ],
)
def test_fields_that_would_change_pixels_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json") as caught:
        processor_of(tmp_path, PUBLISHED | change)
    assert message in str(caught.value)
    with pytest.raises(CheckpointError, match="mm_processor_kwargs: resample"):
        processor_of(tmp_path, PUBLISHED, resample=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan = true: not supported"),
        ({"do_image_splitting": True}, "do_image_splitting = true: not supported"),
        ({"size": {"longest_edge": 896}}, "size.longest_edge"),
        ({"size": {"height": 896, "width": 448}}, "must be the height, 896"),
        ({"size": None}, '"height": PIXELS'),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
    ],
)
def test_fields_of_gemma3_that_would_change_pixels_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    found = processor_of(tmp_path, GEMMA3, do_pan_and_scan=False)
    assert (found.tile, found.resample, found.grid(3000, 20).tiles) == (896, 2, 1)
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json") as caught:
        processor_of(tmp_path, GEMMA3 | change)
    assert message in str(caught.value)
    with pytest.raises(CheckpointError, match="mm_processor_kwargs: size"):
        processor_of(tmp_path, GEMMA3, size={"height": 448, "width": 448})


def test_the_processor_is_read_from_the_newer_file_too(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PUBLISHED}))
    newer = read_image_processor(tmp_path)
    assert newer == processor_of(tmp_path, PUBLISHED | {"video_sampling": {"fps": 1}, "do_center_crop": None})
    assert value_table(newer).shape == (3, 256) and value_table(newer)[0, 255] == 1
