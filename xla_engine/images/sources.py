"""Where pictures come from: bytes, PIL images and arrays of the caller; `data:` URIs; and, if the operator allows
them, local files and http(s).

Every form becomes the bytes of a picture file, so that one decoder reads all.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from xla_engine.errors import (
    ConfigError,
    ImageNotAllowedError,
    ImageTooLargeError,
    ImageUnreachableError,
    InvalidImageError,
)
from xla_engine.images.decoder import ImageLimits
from xla_engine.images.fetch import Fetcher
from xla_engine.utils.extras import install
from xla_engine.utils.shown import shown

FORMS = "bytes of a picture file, a data: URI, a PIL image or a uint8 array [height, width, 3]"
_STORED = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")  # modes that PNG keeps
_OTHER_MEDIA = {
    "application/pdf": "PDF is not supported; render its pages to pictures",
    "audio": "audio is not supported; only pictures are",
    "video": "video is not supported; send single frames as pictures",
    "image/svg+xml": "SVG is not supported; render it to a PNG",
    "image/heic": "HEIC is not supported; save it as JPEG",
    "image/heif": "HEIF is not supported; save it as JPEG",
    "image/avif": "AVIF is not supported; save it as JPEG",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAccess:
    """Where pictures may come from, apart from the request itself.

    allowed_local_media_path: a folder; files in it may be named. allowed_media_domains: hosts, by exact name.
    """

    allowed_local_media_path: str | os.PathLike[str] | None = None
    allowed_media_domains: tuple[str, ...] = ()


class ImageSources:
    """Reads pictures, within limits on their bytes. Thread-safe."""

    def __init__(
        self,
        access: ImageAccess | None = None,
        limits: ImageLimits | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        """fetcher: replaces the one of the allowed domains. Raises ConfigError for a folder that does not exist."""
        access = access or ImageAccess()
        self._max_bytes = (limits or ImageLimits()).max_image_bytes
        self._folder = _folder(access.allowed_local_media_path)
        self._fetcher = fetcher or Fetcher(access.allowed_media_domains, max_bytes=self._max_bytes)

    def start(self, source: object) -> bytes | Future[bytes]:
        """The file of a picture; of one that comes from a host, a future, so that this does not wait.

        source: one of `FORMS`, a path, an address, or Hugging Face's {"bytes": ..., "path": ...}.

        Raises InvalidImageError, ImageTooLargeError, ImageNotAllowedError or ImageUnreachableError.
        """
        if isinstance(source, Mapping):
            source = _of_mapping(source)
        if isinstance(source, bytes | bytearray | memoryview):
            self._check_size(len(source))
            return bytes(source)
        if isinstance(source, os.PathLike):
            return self._file(os.fsdecode(source))
        if isinstance(source, str):
            return self._named(source)
        if (image := _pillow_image(source)) is not None:
            return image_file(image)
        if hasattr(source, "__array__"):
            return array_file(source)
        raise InvalidImageError(f"a picture must be {FORMS}, not {shown(source)}")

    def _named(self, name: str) -> bytes | Future[bytes]:
        scheme, colon, rest = name[:16].partition(":")
        match scheme.lower() if colon else "":
            case "data":
                return self._data(name)
            case "http" | "https":
                return self._fetcher.start(name)
            case "file":
                return self._file(_path_of(name))
            case scheme if rest.startswith("//"):
                raise ImageNotAllowedError(f"{scheme}:// is not supported; use data:, http(s):// or a path")
            case _:
                return self._file(name)

    def _data(self, uri: str) -> bytes:
        head, comma, text = uri.partition(",")
        kind, *parameters = head[len("data:") :].lower().split(";")
        kind = kind.strip()
        why = _OTHER_MEDIA.get(kind) or _OTHER_MEDIA.get(kind.partition("/")[0])
        if why is not None:
            raise InvalidImageError(why)
        if not comma or "base64" not in parameters or not (kind.startswith("image/") or not kind):
            raise InvalidImageError(
                "the data: URI is not data:image/...;base64,... ; encode the file in base64"
            )
        self._check_size(len(text) // 4 * 3 - 2)
        try:
            found = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidImageError(f"the data: URI is not base64 ({error})") from error
        self._check_size(len(found))
        return found

    def _file(self, name: str) -> bytes:
        folder = self._folder
        if folder is None:
            raise ImageNotAllowedError(
                f"files are not read: allow a folder with allowed_local_media_path, or send {FORMS}"
            )
        try:
            place = (folder / name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            place = None
        if place is None or not place.is_relative_to(folder) or place == folder:
            # One message, so that nobody learns which files exist elsewhere.
            raise ImageNotAllowedError(f"{shown(name)} is not a file in the folder that is allowed")
        try:
            return self._content(folder, place.relative_to(folder).parts)
        except OSError as error:
            raise ImageUnreachableError(f"{shown(name)} cannot be read ({error.strerror})") from error

    def _content(self, folder: Path, parts: tuple[str, ...]) -> bytes:
        """The content of a regular file, opened folder by folder: no link that was set meanwhile is followed."""
        *folders, name = parts
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for each in folders:
                inner = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = inner
            opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
        with open(opened, "rb") as file:
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode):
                raise ImageNotAllowedError(f"{shown(name)} is not a regular file")
            self._check_size(found.st_size)
            content = file.read(self._max_bytes + 1)
        self._check_size(len(content))
        return content

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise ImageTooLargeError(
                f"the picture has {size} bytes; at most {self._max_bytes} (max_image_bytes)"
            )

    def close(self) -> None:
        """Stop fetching."""
        self._fetcher.close()


def image_file(image: Any) -> bytes:
    """A PIL image as the bytes of a PNG, upright. Raises InvalidImageError."""
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode in ("I", "F"):
            raise InvalidImageError("it has 32 bits in a pixel's only channel; convert it to 8 or 16 bits")
        file = BytesIO()
        (image if image.mode in _STORED else image.convert("RGB")).save(file, "PNG", compress_level=1)
    except InvalidImageError:
        raise
    except Exception as error:  # an image that was opened and not loaded is read now
        raise InvalidImageError(f"the PIL image cannot be read ({type(error).__name__}: {error})") from error
    return file.getvalue()


def array_file(given: Any) -> bytes:
    """An array as the bytes of a PNG. Raises InvalidImageError."""
    array = np.asarray(given)
    grey = array.ndim == 2
    if (
        array.dtype != np.uint8
        or not (grey or (array.ndim == 3 and array.shape[2] in (3, 4)))
        or not array.size
    ):
        raise InvalidImageError(
            f"the array is {array.dtype} {list(array.shape)}; give uint8 [height, width], [height, width, 3] or "
            "[height, width, 4]"
        )
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"pictures need Pillow: {install('images')}") from error
    return image_file(Image.fromarray(array))


def _of_mapping(source: Mapping[Any, Any]) -> object:
    """What a picture in a column of Hugging Face's datasets holds: its bytes, or else its path."""
    if source.keys() <= {"bytes", "path"}:
        for name in ("bytes", "path"):
            if (value := source.get(name)) is not None:
                if not isinstance(value, bytes | bytearray | memoryview if name == "bytes" else str):
                    raise InvalidImageError(f"'{name}' of a picture is {shown(value)}")
                return value
    raise InvalidImageError(f"an object that is a picture has 'bytes' or 'path', not {shown(dict(source))}")


def _pillow_image(source: object) -> Any:
    """`source` if it is a PIL image; without an import of PIL there are none."""
    module = sys.modules.get("PIL.Image")
    return source if module is not None and isinstance(source, module.Image) else None


def _path_of(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ImageNotAllowedError(f"the file: address cannot be read ({error})") from error
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ImageNotAllowedError("a file: address is file:///PATH")
    return unquote(parts.path)


def _folder(given: str | os.PathLike[str] | None) -> Path | None:
    if given is None or given == "":
        return None
    try:
        folder = Path(given).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"allowed_local_media_path {given}: {error}") from error
    if not folder.is_dir():
        raise ConfigError(f"allowed_local_media_path {given} is no folder")
    return folder
