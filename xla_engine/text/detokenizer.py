"""Detokenize incrementally, so that the pieces always join to the result of the library's `decode`.

The `tokenizers` library's DecodeStream does not guarantee this: it holds back a trailing invalid byte for ever, has
no flush, and disagrees with `decode` or raises if byte-fallback tokens form invalid UTF-8.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

from xla_engine.errors import InvalidRequestError
from xla_engine.model_loader.tokenizer_json import raising

VisibleToken = Callable[[int], str | None]  # the token that `decode` sees for an id; None if it skips the id
Decode = Callable[[list[int]], str]

_CACHED_TOKENS = 1 << 18
# The tokens that the library's ByteFallback accepts.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
# Decoder steps that handle each token by itself, with a special case for the first token.
_TOKEN_WISE = ("Replace", "Metaspace", "WordPiece")


class IncrementalDetokenizer(Protocol):
    """Incremental text of one token stream.

    Law: all pushes and the flush join to `Tokenizer.decode` of all ids. Returned text is final and has no partial
    characters: U+FFFD appears only for bytes that no later byte can complete. A push takes O(1) amortised time.
    """

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became final, which is often empty."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> Iterable[str]:
        """Take many tokens; yields the same text as a push of each."""
        return map(self.push, token_ids)

    def peek(self) -> str:
        """The text that a flush would return now, without a partial character."""
        ...

    def flush(self) -> str:
        """End the stream; return the rest of the text."""
        ...


class WholeDetokenizer(IncrementalDetokenizer):
    """Holds all text back until the flush, which is correct for any decoder."""

    def __init__(self, visible_token: VisibleToken, decode: Decode) -> None:
        self._visible_token = visible_token
        self._decode = decode
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if self._visible_token(token_id) is not None:
            self._held.append(token_id)
        return ""

    def peek(self) -> str:
        return self._decode(self._held)

    def flush(self) -> str:
        held, self._held = self._held, []
        return self._decode(held)


class TokenBytes(dict[int, bytes]):
    """The bytes of byte-level tokens by id, computed on first use."""

    def __init__(self, visible_token: VisibleToken) -> None:
        self._visible_token = visible_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._visible_token(token_id)
        found = self[token_id] = b"" if token is None else _bytes_of(token)
        return found


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """For tokens that spell bytes (GPT-2 style). Holds back at most three bytes of an incomplete character."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes[token_id])

    def push_all(self, token_ids: Sequence[int]) -> Iterable[str]:
        return (self._utf8.decode(b"".join(map(self._token_bytes.__getitem__, token_ids))),)

    def peek(self) -> str:
        return ""

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class PieceDetokenizer(IncrementalDetokenizer):
    """For tokens that are text, or single bytes of text (SentencePiece style with byte fallback).

    If a run of byte tokens is not valid UTF-8, the library turns every byte of the run into U+FFFD, so no part of a
    run is final before its end.
    """

    def __init__(self, visible_token: VisibleToken, rules: DecodingRules) -> None:
        self._visible_token = visible_token
        self._rules = rules
        self._first = True
        self._run = bytearray()  # byte tokens since the last text token
        self._strippable = rules.strip_count  # leading characters that may still be stripped

    def push(self, token_id: int) -> str:
        token = self._visible_token(token_id)
        if token is None:
            return ""
        piece = self._rules.piece(token, self._first)
        self._first = False
        if self._rules.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            self._run.append(int(byte[1], 16))
            return ""
        return self._strip(self._end_run() + piece)

    def peek(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        strippable = self._strippable
        text, self._strippable = self._strip(text), strippable
        return text

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip(self, text: str) -> str:
        while self._strippable and text:
            shorter = text.removeprefix(self._rules.strip_content)
            self._strippable = self._strippable - 1 if shorter != text else 0
            text = shorter
        return text


class DecodingRules:
    """The decoder of a tokenizer.json, as far as it works token by token.

    byte_level: tokens spell bytes in GPT-2's alphabet. Otherwise `piece` gives the text of one token; byte fallback
    and the removal of up to strip_count leading strip_content follow if the decoder has them.
    opaque: the decoder needs the whole text (CTC, BPE suffixes, replacements after fusing, ...).
    drops_first_space: a space at the beginning of the first token is not part of the text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        steps = [] if backend.decoder is None else _steps(json.loads(bytes(backend.decoder.__getstate__())))
        kinds = [step["type"] for step in steps]
        token_wise = next((n for n, kind in enumerate(kinds) if kind not in _TOKEN_WISE), len(kinds))
        rest = kinds[token_wise:]
        self.byte_level = kinds == ["ByteLevel"]
        self.byte_fallback = rest[:1] == ["ByteFallback"]
        self.strip_count, self.strip_content = 0, ""
        if rest[-2:] == ["Fuse", "Strip"] and steps[-1]["stop"] == 0:
            strip = steps.pop()
            self.strip_count, self.strip_content = strip["start"], strip["content"]
            rest.pop()
        self.opaque = not self.byte_level and rest not in (
            [],
            ["Fuse"],
            ["ByteFallback"],
            ["ByteFallback", "Fuse"],
        )
        self._mapper = None if backend.decoder is None else _decoder_of(steps[:token_wise])
        self.piece = lru_cache(maxsize=_CACHED_TOKENS)(self._piece)
        self.drops_first_space = not (self.byte_level or self.opaque) and (
            self.strip_content == " " or self.piece("▁a", True) != self.piece("▁a", False)
        )

    def bytes_of(self, token: str) -> bytes:
        """The bytes of a token inside a text; if they depend on other tokens, the bytes of its spelling."""
        return _bytes_of(token) if self.byte_level else self.uncached_bytes_of(token)

    def uncached_bytes_of(self, token: str) -> bytes:
        """`bytes_of` for a caller that goes through a whole vocabulary once."""
        if self.byte_level:
            return _bytes_of.__wrapped__(token)
        if self.opaque:
            return token.encode()
        piece = self.piece(token, False)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.encode()

    def start(
        self, token_bytes: TokenBytes, visible_token: VisibleToken, decode: Decode
    ) -> IncrementalDetokenizer:
        """A detokenizer for a new stream."""
        if self.opaque:
            return WholeDetokenizer(visible_token, decode)
        if self.byte_level:
            return ByteLevelDetokenizer(token_bytes)
        return PieceDetokenizer(visible_token, self)

    def _piece(self, token: str, first: bool) -> str:
        """The text of `token` before byte fallback. first: whether it is the stream's first token."""
        if self._mapper is None:  # without a decoder the library joins tokens with spaces
            return token if first else " " + token
        with raising(InvalidRequestError, f"token {token!r} cannot be decoded. Correct tokenizer.json"):
            if first:
                return str(self._mapper.decode([token]))
            return str(self._mapper.decode(["a", token]))[len(self._mapper.decode(["a"])) :]


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of a decoder, with nested sequences flattened."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _steps(child)]


def _decoder_of(steps: list[dict[str, Any]]) -> Any:
    decoder: Any = tokenizers.decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
    return decoder


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from characters to bytes: printable Latin-1 to itself, U+0100 and up to the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
# For `str.translate`: to the character of each byte in Latin-1; what is not in the alphabet to one that Latin-1 lacks.
_LATIN_1_OF = dict.fromkeys(range(256), 65535) | {
    ord(character): byte for character, byte in _BYTE_OF.items()
}


@lru_cache(maxsize=_CACHED_TOKENS)
def _bytes_of(token: str) -> bytes:
    """Bytes of a byte-level token; its UTF-8 if it has a character outside the alphabet."""
    try:
        return token.translate(_LATIN_1_OF).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
