"""Small files that say they are large, or unpack to much: each has one result, soon, in the memory of the worker."""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable
from io import BytesIO

import pytest
from PIL import Image

from tests.images.test_features import model
from tests.images.test_pictures import picture, read, reader
from xla_engine.errors import InvalidImageError
from xla_engine.images.pictures import PictureReader
from xla_engine.utils.resident import resident_bytes

__all__ = ["model", "reader"]

ZEROS = zlib.compress(bytes(100 << 20), 9)  # 100 KB that unpack to 100 MiB


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *more: bytes, depth: int = 8, mode: int = 2, pixels: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, mode, 0, 0, 0)
    rest = chunk(b"IDAT", pixels or zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(more) + rest


def tiff(*tags: tuple[int, int, int, int], after: int = 0) -> bytes:
    """One directory of (tag, type, count, value). after: the offset of the next."""
    entries = b"".join(struct.pack("<HHII", *each) for each in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<I", after)


def sized(width: int, height: int) -> tuple[tuple[int, int, int, int], ...]:
    return ((256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1))


def gif(width: int, height: int, frames: int) -> bytes:
    frame = b"\x2c\0\0\0\0\x01\0\x01\0\0\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + frame * frames + b";"


def bmp(width: int, height: int, compression: int = 0) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, compression, 0, 0, 0, 2, 0)
    return b"BM" + struct.pack("<IHHI", 100, 0, 0, 62) + info + bytes(8) + b"\xff\0" * 500


def jpeg(*segments: bytes) -> bytes:
    whole = picture(16, 16, "JPEG")
    return whole[:2] + b"".join(segments) + whole[2:]


def jpeg_of(width: int, height: int) -> bytes:
    whole = bytearray(picture(16, 16, "JPEG"))
    at = whole.index(b"\xff\xc0")
    whole[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(whole)


def webp_of(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + canvas + picture(8, 8, "WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def exif(data: bytes) -> bytes:
    return b"\xff\xe1" + struct.pack(">H", len(data) + 8) + b"Exif\0\0" + data


def large_of_one_bit() -> bytes:
    """As many pixels as are allowed, in a few KB: the most that decoding may cost."""
    file = BytesIO()
    Image.new("1", (9400, 9400)).save(file, "PNG")
    return file.getvalue()


BOMBS: dict[str, Callable[[], bytes]] = {
    "PNG of 2^31 pixels a side": lambda: png(2**31 - 1, 2**31 - 1),
    "PNG of 50,000 pixels a side": lambda: png(50_000, 50_000),
    "PNG of no pixels": lambda: png(0, 0),
    "PNG of one row": lambda: png(65_535, 1),
    "PNG whose pixels unpack to 100 MiB": lambda: png(10, 10, pixels=ZEROS),
    "PNG with a text of 100 MiB": lambda: png(10, 10, chunk(b"zTXt", b"Comment\0\0" + ZEROS)),
    "PNG with XMP of 100 MiB": lambda: png(10, 10, chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + ZEROS)),
    "PNG with a profile of 100 MiB": lambda: png(10, 10, chunk(b"iCCP", b"icc\0\0" + ZEROS)),
    "PNG with 10,000 texts": lambda: png(10, 10, *[chunk(b"tEXt", b"a\0" + b"x" * 100)] * 10_000),
    "PNG of animation without end": lambda: png(10, 10, chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))),
    "GIF of 65,535 pixels a side": lambda: gif(65_535, 65_535, 1),
    "GIF of 10,000 frames": lambda: gif(10, 10, 10_000),
    "BMP of 2^31 pixels a side": lambda: bmp(2**31 - 1, 2**31 - 1),
    "BMP of runs": lambda: bmp(9000, 9000, 1),
    "BMP upside down": lambda: bmp(9000, -(2**31)),
    "TIFF of 60,000 pixels a side": lambda: tiff(*sized(60_000, 60_000)),
    "TIFF that goes on with itself": lambda: tiff(*sized(10, 10), after=8),
    "TIFF with a strip of 4 GiB": lambda: tiff(*sized(10, 10), (273, 4, 1, 8), (279, 4, 1, 2**32 - 1)),
    "TIFF with 2^32 values": lambda: tiff(*sized(10, 10), (273, 4, 2**32 - 1, 8)),
    "JPEG of 65,500 pixels a side": lambda: jpeg_of(65_500, 65_500),
    "JPEG with 10,000 segments": lambda: jpeg(*[b"\xff\xe2\0\x10" + b"x" * 14] * 10_000),
    "JPEG whose EXIF goes on with itself": lambda: jpeg(exif(tiff((0x8769, 4, 1, 8), after=8))),
    "JPEG whose EXIF has 2^32 values": lambda: jpeg(exif(tiff((0x0112, 3, 2**32 - 1, 8)))),
    "WEBP of 16,384 pixels a side": lambda: webp_of(16_384, 16_384),
    "a program": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n{} loop",
    "a PDF": lambda: b"%PDF-1.7\n",
    "a ZIP": lambda: b"PK\3\4" + ZEROS,
}
SLOW: dict[str, Callable[[], bytes]] = {
    "as many pixels as are allowed": large_of_one_bit,
    "JPEG of 9,000 pixels a side, nearly without data": lambda: jpeg_of(9_000, 9_000),
}


@pytest.mark.parametrize("name", [*BOMBS, *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)])
def test_a_bomb_has_one_result_soon(reader: PictureReader, name: str) -> None:
    bomb = (BOMBS | SLOW)[name]()
    good = picture()
    assert len(read(reader, good).pictures) == 1 and len(bomb) < 4 << 20
    process, before = reader.decoder._process.process, resident_bytes() or 0
    began = time.process_time()
    try:
        (found,) = read(reader, bomb).pictures
        assert reader.tiles(found).shape == (found.grid.tiles, 24, 24, 3)
    except InvalidImageError as error:
        assert str(error).startswith("images[0]: ") and len(str(error)) < 500
    assert time.process_time() - began < 5  # of this process; the worker has its own limit
    assert (resident_bytes() or 0) - before < 100 << 20
    assert len(read(reader, good).pictures) == 1
    assert reader.decoder._process.process is process  # it did not crash
