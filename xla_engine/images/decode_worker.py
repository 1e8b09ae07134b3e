"""Decodes, turns, resizes and cuts pictures in a worker process (`text.worker_main`): bytes of strangers come here.

Pillow is a C library that reads a dozen formats, so it runs under limits of the kernel, and a crash costs one request.
Answers are {"size": [width, height]}, {"tiles": base64 of bytes}, or {"error": why} with "large" if a limit is meant.
"""

from __future__ import annotations

import base64
import struct
from io import BytesIO
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

# Bytes of address space. Of the largest picture, 89 million pixels, two copies exist at a time: 0.7 GiB.
MEMORY_LIMIT = 2 << 30
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")

_ORIENTATION = 0x0112
_STRIP_PIXELS = 1 << 20
_TURNED = (5, 6, 7, 8)  # orientations whose upright picture has width and height exchanged
_LATE = (
    b"eXIf",
    b"iTXt",
    b"zTXt",
    b"tEXt",
)  # PNG chunks that can hold an orientation, if they follow the pixels

Image.MAX_IMAGE_PIXELS = None  # `check` looks at the header


class RefusedError(Exception):
    """The picture cannot be used; `is_large` if it exceeds a limit."""

    def __init__(self, message: str, *, is_large: bool = False) -> None:
        super().__init__(message)
        self.is_large = is_large


def answer(
    data: str,
    max_pixels: int,
    max_ratio: int,
    size: list[int] | None = None,
    resizes: list[list[int]] | None = None,
    tile: list[int] | None = None,
    resample: int = 0,
    view: list[Any] | None = None,
) -> dict[str, Any]:
    """The upright size of a picture; with `resizes`, its tiles.

    data: base64. size: the upright size that the caller expects. resizes: sizes, in order; the picture of the last one
    is cut into tiles, rows from the top, and if there are several, a copy of the size of one tile follows.
    view: side of a tile, size of the copy of the picture in its middle, and colour of the margins; this tile follows
    instead. Then there may be no resizes, and no other tiles.
    """
    try:
        file = base64.b64decode(data)
        image = opened(file, max_pixels, max_ratio)
        if resizes is None or tile is None:
            return {"size": upright_size(image, file)}
        ImageOps.exif_transpose(image, in_place=True)
        upright = as_rgb(image)
        del image
        if list(upright.size) != size:
            raise RefusedError("its pixels are turned otherwise than its header says")
        behind = None if view is None else within_margins(upright, *view, resample=resample)
        for each in resizes:
            upright = upright.resize((each[0], each[1]), resample=resample)
        tiles = cut(upright, (tile[0], tile[1]), resample, behind) if resizes or behind is None else behind
        return {"tiles": base64.b64encode(tiles).decode("ascii")}
    except RefusedError as error:
        return {"error": str(error), "large": error.is_large}
    except MemoryError:
        return {"error": "it needs too much memory", "large": True}
    except Exception as error:  # Pillow's readers raise nearly anything for broken files
        return {"error": f"{type(error).__name__}: {error}"[:300], "large": False}


def opened(file: bytes, max_pixels: int, max_ratio: int) -> Image.Image:
    """The picture, checked by its header; no pixel is decoded."""
    try:
        image = Image.open(BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError:
        raise RefusedError(f"it is not a picture in one of the formats {', '.join(FORMATS)}") from None
    width, height = image.size
    if width < 1 or height < 1:
        raise RefusedError("it has no pixels")
    if width * height > max_pixels:
        raise RefusedError(f"it has {width} x {height} pixels; at most {max_pixels}", is_large=True)
    if max(width, height) > max_ratio * min(width, height):
        raise RefusedError(
            f"it has {width} x {height} pixels; sides differ by more than {max_ratio} times", is_large=True
        )
    # A JPEG of several pictures (MPO) holds views or depths beside the picture itself, which is the first.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise RefusedError("it has several frames; send one as a picture of its own")
    return image


def upright_size(image: Image.Image, file: bytes) -> list[int]:
    """Width and height after the orientation of EXIF or XMP is applied."""
    width, height = image.size
    if image.format == "TIFF":  # whose size Pillow has turned
        return [width, height]
    if image.format == "PNG" and has_late_chunks(file):
        image.load()
    # PngImageFile's own `getexif` decodes all pixels to find chunks after them.
    turned = Image.Image.getexif(image).get(_ORIENTATION) in _TURNED
    return [height, width] if turned else [width, height]


def has_late_chunks(file: bytes) -> bool:
    """Whether a PNG has texts or EXIF after its pixels."""
    at, is_after = 8, False  # behind the signature
    while at + 8 <= len(file):
        length, name = struct.unpack_from(">I4s", file, at)
        if is_after and name in _LATE:
            return True
        is_after = is_after or name == b"IDAT"
        at += 12 + length
    return False


def as_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB. It is converted in strips, because Pillow's conversions make up to four copies."""
    if image.mode == "RGB" and image.info.get("transparency") is None:
        image.load()
        return image
    width, height = image.size
    rows = max(_STRIP_PIXELS // width, 1)
    whole = Image.new("RGB", image.size)
    for top in range(0, height, rows):
        whole.paste(_rgb(image.crop((0, top, width, min(top + rows, height)))), (0, top))
    return whole


def _rgb(image: Image.Image) -> Image.Image:
    """A picture in RGB: transparency onto white, 16 bits scaled to 8, other modes as Pillow converts them."""
    if image.mode.startswith("I;16"):
        return image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L").convert("RGB")
    if image.mode in ("I", "F"):
        raise RefusedError(
            "it has 32 bits in a pixel's only channel, and no known range; save it with 8 or 16 bits"
        )
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def within_margins(
    picture: Image.Image, side: int, size: list[int], colour: list[int], *, resample: int
) -> bytes:
    """uint8 `[side, side, 3]`: a copy of the picture of this size in the middle of a square."""
    square = Image.new("RGB", (side, side), tuple(colour))
    copy = picture.resize((size[0], size[1]), resample=resample)
    square.paste(copy, ((side - size[0]) // 2, (side - size[1]) // 2))
    return square.tobytes()


def cut(whole: Image.Image, tile: tuple[int, int], resample: int, behind: bytes | None = None) -> bytes:
    """uint8 `[tiles, height, width, 3]`. tile: width and height of one. behind: a last tile of another size, instead
    of a copy of the whole."""
    (width, height), (across, down) = whole.size, tile
    tiles = [
        whole.crop((left, top, left + across, top + down)).tobytes()
        for top in range(0, height, down)
        for left in range(0, width, across)
    ]
    if behind is not None:
        tiles.append(behind)
    elif len(tiles) > 1:
        tiles.append(whole.resize(tile, resample=resample).tobytes())
    return b"".join(tiles)
