"""Pictures that cost more than they seem to: the worker's memory is bounded, and so is what a host may send."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.images.test_sources import answer, site
from xla_engine.errors import ImageTooLargeError, ImageUnreachableError
from xla_engine.images import decode_worker
from xla_engine.images.decoder import ImageLimits
from xla_engine.utils.digits import number_of


@pytest.mark.parametrize("zeros", [0, 1, 19, 20, 21, 4000])
@pytest.mark.parametrize("size", [1001, 10**9, 10**40])
def test_a_length_with_zeros_before_it_is_that_length(zeros: int, size: int) -> None:
    """Twenty zeros hid a length from the limit, and the whole answer was read into memory."""
    body = answer(b"x" * 2000, f"Content-Length: {'0' * zeros}{size}")
    with site(lambda _: body) as (_, fetcher), pytest.raises(ImageTooLargeError, match="at most 1000"):
        fetcher.start("http://pictures.example/a.png").result(600)


@pytest.mark.parametrize("zeros", [1, 21, 4000])
def test_a_small_picture_may_have_zeros_before_its_length(zeros: int) -> None:
    body = answer(b"x" * 500, f"Content-Length: {'0' * zeros}500")
    with site(lambda _: body) as (_, fetcher):
        assert fetcher.start("http://pictures.example/a.png").result(600) == b"x" * 500
    with site(lambda _: body[:-1]) as (_, fetcher), pytest.raises(ImageUnreachableError):
        fetcher.start("http://pictures.example/a.png").result(600)


@settings(deadline=None)
@given(zeros=st.integers(0, 50), number=st.integers(0, 10**30), most=st.integers(1, 10**12))
def test_digits_are_a_number_up_to_a_bound(zeros: int, number: int, most: int) -> None:
    assert number_of("0" * zeros + str(number), most) == min(number, most + 1)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1_0", " 1", "²", "٣", "0x1", "1e3"])
def test_what_is_no_number_in_digits_is_none(text: str) -> None:
    assert number_of(text, 100) is None


MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "RGBa", "RGBX")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transparent", [False, True])
def test_strips_have_the_pixels_of_the_whole(
    mode: str, transparent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (13, 37)
    bands = 2 if mode == "I;16" else len(Image.new(mode, (1, 1)).tobytes())
    count = len(Image.new(mode, size).tobytes())
    image = Image.frombytes(mode, size, bytes((7 * n + n // 11 * bands) % 256 for n in range(count)))
    if mode in ("P", "PA"):
        image.putpalette([(5 * n) % 256 for n in range(768)])
    if transparent and mode in ("P", "L", "RGB"):
        image.info["transparency"] = (14, 21, 28) if mode == "RGB" else 7
    expected = decode_worker._rgb(image.copy())
    monkeypatch.setattr(decode_worker, "_STRIP_PIXELS", 60)
    found = decode_worker.as_rgb(image)
    assert (found.mode, found.size, found.tobytes()) == ("RGB", size, expected.tobytes())


MEASURE = """
import json, re, resource, runpy, sys
worker = runpy.run_path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (worker["MEMORY_LIMIT"],) * 2)
answer = worker["answer"](**json.loads(sys.stdin.read()))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])  # `ru_maxrss` is the parent's, too
print(json.dumps([peak, sorted(answer)]))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "RGB", "P", "CMYK"])
def test_the_largest_picture_costs_at_most_800_megabytes(mode: str) -> None:
    """A file of 369 KB cost 1.7 GB."""
    side = int(ImageLimits().max_image_pixels ** 0.5)
    file = BytesIO()
    Image.new(mode, (side, side)).save(file, "TIFF" if mode == "CMYK" else "PNG", compression="tiff_deflate")
    request: dict[str, Any] = {
        "data": base64.b64encode(file.getvalue()).decode(),
        "max_pixels": ImageLimits().max_image_pixels,
        "max_ratio": 200,
        "size": [side, side],
        "resizes": [[2048, 2048], [2048, 2048]],
        "tile": [512, 512],
        "resample": 1,
    }
    command = [sys.executable, "-c", MEASURE, decode_worker.__file__]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=True)
    kilobytes, names = json.loads(done.stdout)
    assert names == ["tiles"] and kilobytes < 800 << 10
