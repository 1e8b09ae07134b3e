"""Text files in UTF-8, or in another encoding that the user names; the error for a wrong one says which byte it is."""

import codecs
import io
from typing import Any, BinaryIO, cast

from xla_engine.errors import ConfigError

MAX_LINE_BYTES = 8 * 2**20  # of an input line, by default
_CHUNK = 64 << 10
_GUESS = "cp1252"  # what Excel writes in Western Europe and America; it gives nearly every byte a meaning
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def check_encoding(name: str) -> str:
    """The usual spelling of an encoding's name. Raises ConfigError for one that Python does not have."""
    try:
        "".encode(name)  # fails for codecs that are not of text
        return codecs.lookup(name).name
    except LookupError as error:
        raise ConfigError(
            f"{name!r} is no encoding of text; examples are utf-8, cp1252, latin-1, utf-16 and shift_jis"
        ) from error


def check_is_utf8(source: BinaryIO, name: str) -> None:
    """Raise OSError if a file begins like one in UTF-16 or UTF-32, which has a null in each ASCII character."""
    peek = getattr(source, "peek", None)
    if (found := None if peek is None else _other_unicode(peek(4)[:4])) is not None:
        raise OSError(f"{name} is in {found}, not UTF-8: add --encoding {found}, or convert it")


def _other_unicode(beginning: bytes) -> str | None:
    for mark, encoding in _MARKS:
        if beginning.startswith(mark):
            return encoding
    if len(beginning) == 4 and beginning.count(0) == 2 and (beginning[0] == 0) != (beginning[1] == 0):
        return "utf-16-be" if beginning[0] == 0 else "utf-16-le"
    return None


def as_utf8(source: BinaryIO, name: str, encoding: str | None = None) -> BinaryIO:
    """The content of a text file in UTF-8, without a byte order mark.

    encoding: by default UTF-8. Reading raises OSError, with the place in the file, for bytes that are not in it.
    """
    if encoding is None:
        check_is_utf8(source, name)
    return cast("BinaryIO", io.BufferedReader(_Recoded(source, name, encoding or "utf-8"), _CHUNK))


class _Recoded(io.RawIOBase):
    """Bytes of a text in UTF-8, from a file in another encoding or in UTF-8."""

    def __init__(self, source: BinaryIO, name: str, encoding: str) -> None:
        self._source, self._name, self._encoding = source, name, encoding
        self._decoder = codecs.getincrementaldecoder("utf-8-sig" if encoding == "utf-8" else encoding)()
        self._read = 0  # bytes of the file that were read
        self._ready = b""
        self._began = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            chunk = self._source.read(_CHUNK)
            self._ready = self._decoded(chunk)
            if not chunk and not self._ready:
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decoded(self, chunk: bytes) -> bytes:
        try:
            text = self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            # the decoder puts what it had kept before the chunk
            place = self._read - (len(error.object) - len(chunk)) + error.start
            raise OSError(self._problem(place, error.object[error.start])) from error
        self._read += len(chunk)
        if text and not self._began:
            self._began, text = True, text.removeprefix("\ufeff")
        return text.encode("utf-8", "surrogatepass")

    def _problem(self, place: int, byte: int) -> str:
        name = "UTF-8" if self._encoding == "utf-8" else self._encoding
        found = f"{self._name} is not {name} at byte {place} (0x{byte:02x}"
        try:
            letter = bytes([byte]).decode(_GUESS)
        except UnicodeDecodeError:
            letter = ""
        if self._encoding == "utf-8" and letter.isprintable() and letter:
            return f"{found}, {letter!r} in {_GUESS}): add --encoding {_GUESS} if that is right, or convert it first"
        return f"{found}): name its encoding with --encoding, or convert it first"
