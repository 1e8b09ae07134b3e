"""Make `tests/golden/images/`: what transformers' PIL backend makes of generated pictures and of prompts with them.

    python tests/golden/make/make_golden_images.py

Run with the `oracle` extra and Pillow installed. Pictures are saved without loss, so that no version of a codec
changes a bit. `golden.json` holds, for each picture of `pictures()`, its rows and columns of tiles, digests of the
uint8 tiles and the float32 pixels; and for each prompt of `PROMPTS`, its token ids. The same under `gemma3`, of every
eighth picture. It imports nothing of this package, and transformers only in `golden`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

GOLDEN = Path(__file__).parents[1] / "images"
SIZES = (
    *((1, 1), (1, 2), (2, 1), (3, 7), (7, 3), (16, 16), (31, 33), (32, 32), (33, 32), (32, 33), (40, 10)),
    *((10, 40), (64, 64), (65, 63), (100, 75), (75, 100), (128, 128), (129, 127), (160, 90), (90, 160)),
    *((200, 1), (1, 200), (150, 4), (4, 150), (97, 89), (257, 255), (300, 200)),
)
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")
FORMATS = {
    "CMYK": ("TIFF",),
    "RGB": ("PNG", "BMP", "TIFF", "WEBP"),
    "RGBA": ("PNG", "WEBP"),
    "P": ("GIF", "PNG"),
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "small": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}},
    "whole": {
        "size": {"longest_edge": 96},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": False,
    },
    "bicubic": {"size": {"longest_edge": 70}, "max_image_size": {"longest_edge": 28}, "resample": 3},
}
GEMMA3: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 28, "width": 28}},
    "gemma3 larger": {"size": {"height": 112, "width": 112}},
    "gemma3 bicubic": {"size": {"height": 56, "width": 56}, "resample": 3},
}
IMAGE_SEQ_LEN = 4
# Prompts and the sizes of their pictures, for the processor `small`.
PROMPTS: tuple[tuple[str, tuple[tuple[int, int], ...]], ...] = (
    ("<image>", ((64, 64),)),
    ("User:<image>What is this?<end_of_utterance>\nAssistant:", ((100, 75),)),
    ("a\n<image>\n\nb<image><image> c", ((10, 40), (1, 1), (160, 90))),
    ("no picture", ()),
    ("é<image>ü\n", ((300, 200),)),
)


GEMMA3_PROMPTS = tuple(
    (text.replace("<image>", "<start_of_image>"), sizes)
    for text, sizes in (*PROMPTS, ("\n<image>\n\n\n<image>", ((5, 5), (9, 9))))
)


def picture(seed: int, mode: str, size: tuple[int, int]) -> Image.Image:
    """Waves with noise: edges for the filters, and every value."""
    draw = np.random.default_rng(seed)
    width, height = size
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    channels = {"RGB": 3, "RGBA": 4, "CMYK": 4, "LA": 2}.get(mode, 1)
    waves = np.stack(
        [np.sin(x * draw.uniform(0.01, 2) + y * draw.uniform(0.01, 2) + k) for k in range(channels)], axis=-1
    )
    values = 127.5 + 110 * waves + draw.normal(0, 30, waves.shape)
    array = np.clip(values, 0, 255).astype(np.uint8)
    if mode == "P":
        image = Image.fromarray(array[..., 0] // 4 * 4)
        image.putpalette(draw.integers(0, 256, 768, dtype=np.uint8).tobytes())
        if seed % 2:
            image.info["transparency"] = int(array[0, 0, 0]) // 4 * 4
        return image
    if mode == "1":
        return Image.fromarray(np.where(array[..., 0] > 127, 255, 0).astype(np.uint8)).convert("1")
    if channels == 4:
        return Image.frombytes(mode, size, array.tobytes())
    return Image.fromarray(array if channels > 1 else array[..., 0], None)


def saved(image: Image.Image, form: str, orientation: int) -> bytes:
    """The file of a picture, without loss."""
    file = BytesIO()
    options: dict[str, Any] = {"lossless": True, "exact": True} if form == "WEBP" else {}
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    if "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    image.save(file, form, **options)
    return file.getvalue()


def pictures(
    first: int = 0, step: int = 1, processors: Iterable[str] = PROCESSORS
) -> Iterator[tuple[str, str, bytes]]:
    """Name, processor and file of each picture: every size in every mode, formats and orientations in turn.

    first, step: which of them.
    """
    seed = 0
    for size in SIZES:
        for mode in MODES:
            for processor in processors:
                seed += 1
                if (seed - 1) % step != first:
                    continue
                forms = FORMATS.get(mode, ("PNG",))
                form = forms[seed % len(forms)]
                orientation = 1 + seed % 8 if form in ("PNG", "TIFF", "WEBP") else 1
                name = f"{size[0]}x{size[1]} {mode} {form} {orientation} {processor}"
                yield name, processor, saved(picture(seed, mode, size), form, orientation)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def tokenizer() -> Any:
    """Bytes as tokens, two line ends as one, and the special tokens of Idefics3."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*alphabet, "ĊĊ"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    around = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
    places = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    gemma3 = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    special = around + places + gemma3
    made.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in special])
    return made


def golden() -> dict[str, Any]:
    from PIL import ImageOps
    from transformers import PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    processors = {name: Idefics3ImageProcessorPil(**fields) for name, fields in PROCESSORS.items()}
    found = []
    for name, kind, data in pictures():
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        processor = processors[kind]
        pixels = processor(upright, return_tensors="np", return_row_col_info=True)
        bytes_only = processor(upright, return_tensors="np", do_rescale=False, do_normalize=False)
        tiles = digests(bytes_only["pixel_values"][0], pixels["pixel_values"][0])
        found.append([name, pixels["rows"][0][0], pixels["cols"][0][0], *tiles])
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    whole = Idefics3Processor(processors["small"], backend, image_seq_len=IMAGE_SEQ_LEN)
    return {"pictures": found, "prompts": token_ids(whole, PROMPTS), "gemma3": golden_gemma3()}


def golden_gemma3(step: int = 8) -> dict[str, Any]:
    """step: which pictures, as in `pictures`."""
    from PIL import ImageOps
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    processors = {name: Gemma3ImageProcessorPil(**fields) for name, fields in GEMMA3.items()}
    found = []
    for name, kind, data in pictures(0, step, GEMMA3):
        upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
        pixels = processors[kind](upright, return_tensors="np")["pixel_values"]
        bytes_only = processors[kind](upright, return_tensors="np", do_rescale=False, do_normalize=False)
        found.append([name, *digests(bytes_only["pixel_values"], pixels)])
    marks = {
        "boi_token": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "eoi_token": "<end_of_image>",
    }
    backend = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), extra_special_tokens=marks)
    whole = Gemma3Processor(processors["gemma3"], backend, image_seq_length=IMAGE_SEQ_LEN)
    return {"pictures": found, "prompts": token_ids(whole, GEMMA3_PROMPTS)}


def digests(as_bytes: np.ndarray, values: np.ndarray) -> tuple[str, str]:
    """Of tiles `[tiles, 3, side, side]` in bytes, and of what a tower reads."""
    tiles = as_bytes.astype(np.uint8)
    assert (tiles == as_bytes).all() and values.dtype == np.float32
    return digest(tiles.transpose(0, 2, 3, 1)), digest(values.transpose(0, 2, 3, 1))


def token_ids(processor: Any, prompts: Any) -> list[list[int]]:
    found = []
    for seed, (text, sizes) in enumerate(prompts):
        images = [picture(seed, "RGB", size) for size in sizes]
        given = {"images": [images]} if images else {}
        found.append(list(map(int, processor(text=[text], **given)["input_ids"][0])))
    return found


def _listed(made: dict[str, Any]) -> str:
    """Pictures and prompts as JSON, one a line."""
    rows, prompts = (",\n".join(map(json.dumps, made[name])) for name in ("pictures", "prompts"))
    return f'"pictures": [\n{rows}\n],\n"prompts": [\n{prompts}\n]'


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    tokenizer().save(str(GOLDEN / "tokenizer.json"), pretty=False)
    made = golden()
    text = f'{{{_listed(made)},\n"gemma3": {{{_listed(made["gemma3"])}}}}}\n'
    (GOLDEN / "golden.json").write_text(text)
    print(f"{len(made['pictures'])} pictures, {len(text)} bytes")


if __name__ == "__main__":
    main()
