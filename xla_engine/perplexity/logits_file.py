"""Saved logits in the format of llama-perplexity's `--kl-divergence-base`, so that both programs can use one file.

Little-endian: `_logits_`; i32 tokens of a window T, vocabulary V, windows C; the tokens, i32 `[C, T]`; then for each
scored position a row: f32 scale, f32 least log-probability, u16 `[V]` (padded to an even number). A log-probability is
`scale * u16 + least`; those further than 16 below the largest are cut off there.

Behind the rows, where llama-perplexity does not read, this engine writes what the 16 bits lose: `_exact__`, the f64
negative log-likelihoods `[C, S]` and the most likely tokens, i32 `[C, S]`.
"""

import os
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from xla_engine.errors import LogitsFileError
from xla_engine.utils.new_file import open_new

_MAGIC, _EXACT = b"_logits_", b"_exact__"
_HEADER = np.dtype([("magic", "S8"), ("window", "<i4"), ("vocab", "<i4"), ("windows", "<i4")])
_RANGE = np.float32(16)  # nats below the largest logit that the 16 bits cover


def scored_per_window(window: int) -> int:
    """The number of scored tokens in a window: those after its middle."""
    return window - 1 - window // 2


class BaseRow(NamedTuple):
    """The saved data of one position. log_probs: f64 `[V]`. nll: of the text's token. top: the most likely token."""

    log_probs: np.ndarray
    nll: float
    top: int


class _Layout:
    """The offsets in a file. tokens: i32 `[C, T]`."""

    def __init__(self, windows: int, window: int, vocab_size: int) -> None:
        self.scored = scored_per_window(window)
        self.row_bytes = 8 + 2 * (vocab_size + vocab_size % 2)
        self.rows_at = _HEADER.itemsize + 4 * windows * window
        self.exact_at = self.rows_at + windows * self.scored * self.row_bytes
        self.end = self.exact_at + len(_EXACT) + 12 * windows * self.scored

    def row_at(self, window: int, place: int) -> int:
        return self.rows_at + (window * self.scored + place) * self.row_bytes


class LogitsWriter:
    """Writes a file under a temporary name and renames it at the end, so that a failed run leaves none.

    Rows may come in any order. Raises OSError.
    """

    def __init__(self, path: str | Path, tokens: np.ndarray, vocab_size: int) -> None:
        """tokens: of the text, i32 `[C, T]`."""
        self._path, self._part = Path(path), Path(f"{path}.part")
        self._layout = _Layout(tokens.shape[0], tokens.shape[1], vocab_size)
        self._vocab_size = vocab_size
        header = np.array((_MAGIC, tokens.shape[1], vocab_size, tokens.shape[0]), _HEADER)
        self._file = open_new(self._part)
        self._file.write(header.tobytes() + tokens.astype("<i4").tobytes())
        self._file.flush()

    def put(self, window: int, place: int, logits: np.ndarray) -> None:
        """Save the logits f32 `[V]` at scored position `place` of a window. They must be finite."""
        largest = logits.max()
        least = np.maximum(logits.min(), largest - _RANGE)
        total = np.float32(np.log(np.exp(logits.astype(np.float64) - np.float64(largest)).sum()))
        scale = np.float32((largest - least) / np.float32(65535))
        codes = np.zeros(self._vocab_size + self._vocab_size % 2, "<u2")
        if scale > 0:
            codes[: self._vocab_size] = np.rint((np.maximum(logits, least) - least) / scale).clip(0, 65535)
        head = np.array([scale, least - largest - total], "<f4")
        os.pwrite(self._file.fileno(), head.tobytes() + codes.tobytes(), self._layout.row_at(window, place))

    def finish(self, nll: np.ndarray, top: np.ndarray) -> None:
        """End the file with the exact figures of all rows, f64 and i32 `[C, S]`, and give it its name."""
        end = _EXACT + nll.astype("<f8").tobytes() + top.astype("<i4").tobytes()
        os.pwrite(self._file.fileno(), end, self._layout.exact_at)
        self._file.close()
        self._part.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


class LogitsFile:
    """Saved logits, read row by row.

    tokens: of the text, i32 `[C, T]`. Raises LogitsFileError if it is not a logits file, and OSError.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file = open(path, "rb")  # noqa: SIM115
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        raw = self._file.read(_HEADER.itemsize)
        if len(raw) < _HEADER.itemsize or not raw.startswith(_MAGIC):
            raise LogitsFileError(
                f"{self._path} holds no logits; write one with `xla-engine perplexity --save-logits` or "
                "`llama-perplexity --kl-divergence-base`"
            )
        header = np.frombuffer(raw, _HEADER)[0]
        self.vocab_size, window, windows = (int(header[name]) for name in ("vocab", "window", "windows"))
        if window < 4 or self.vocab_size < 1 or windows < 1:
            raise LogitsFileError(f"{self._path}: its header is damaged; write the file again")
        self._layout = layout = _Layout(windows, window, self.vocab_size)
        self._is_exact = size == layout.end
        if size not in (layout.exact_at, layout.end):
            raise LogitsFileError(
                f"{self._path} has {size} bytes, but its header says {layout.end} (or {layout.exact_at}, if "
                "llama-perplexity wrote it): it is truncated; write it again"
            )
        self.tokens = np.frombuffer(self._file.read(4 * windows * window), "<i4").reshape(windows, window)
        if self._is_exact:
            count = windows * layout.scored
            end = os.pread(self._file.fileno(), layout.end - layout.exact_at, layout.exact_at)
            if not end.startswith(_EXACT):
                raise LogitsFileError(f"{self._path}: its end is damaged; write the file again")
            begin = len(_EXACT)
            self._nll = np.frombuffer(end, "<f8", count, begin).reshape(windows, layout.scored)
            self._top = np.frombuffer(end, "<i4", count, begin + 8 * count).reshape(windows, layout.scored)

    def check(self, tokens: np.ndarray, vocab_size: int) -> None:
        """Raise LogitsFileError unless the file was made of these tokens, i32 `[C, T]`."""
        if self.vocab_size != vocab_size:
            raise LogitsFileError(
                f"{self._path} was made with a model with a vocabulary of {self.vocab_size} tokens; this one has "
                f"{vocab_size}"
            )
        windows, window = self.tokens.shape
        if window != tokens.shape[1]:
            raise LogitsFileError(f"{self._path} has windows of {window} tokens; give --ctx-size {window}")
        if windows != len(tokens):
            raise LogitsFileError(
                f"{self._path} has {windows} windows of {window} tokens, and this text {len(tokens)}: give the same "
                "text, and the same --chunks"
            )
        if not np.array_equal(self.tokens, tokens):
            at = int(np.flatnonzero((self.tokens != tokens).reshape(-1))[0])
            raise LogitsFileError(
                f"{self._path} was made from another text, or with another tokenizer: token {at} is "
                f"{self.tokens.reshape(-1)[at]} there and {tokens.reshape(-1)[at]} here"
            )

    def row(self, window: int, place: int, token: int) -> BaseRow:
        """The saved data at scored position `place` of a window; `token` is the text's next token.

        Raises LogitsFileError if a value is not a number.
        """
        raw = os.pread(self._file.fileno(), self._layout.row_bytes, self._layout.row_at(window, place))
        scale, least = np.frombuffer(raw, "<f4", 2).astype(np.float64).tolist()
        codes = np.frombuffer(raw, "<u2", self.vocab_size, 8)
        if not (np.isfinite(scale) and np.isfinite(least)):
            raise LogitsFileError(
                f"{self._path}: window {window}, position {place} is not a number; write it again"
            )
        log_probs = scale * codes.astype(np.float64) + least
        if self._is_exact:
            return BaseRow(log_probs, float(self._nll[window, place]), int(self._top[window, place]))
        return BaseRow(log_probs, -float(log_probs[token]), int(codes.argmax()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
