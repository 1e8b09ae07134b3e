"""Token ids back to text, one at a time, so that the pieces always add up to the library's own `decode`.

The `tokenizers` library's DecodeStream does not: it holds a trailing invalid byte for ever, has no flush, and
where byte-fallback tokens form invalid UTF-8 it disagrees with `decode` or raises.
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

VisibleToken = Callable[[int], str | None]  # the token `decode` sees for an id; None if it skips the id
Decode = Callable[[list[int]], str]

_CACHED_TOKENS = 1 << 18
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # what the library's ByteFallback accepts
# decoder steps that see each token alone, the first apart
_TOKEN_WISE = ("Replace", "Metaspace", "WordPiece")


class IncrementalDetokenizer(Protocol):
    """Text of one token stream as it becomes final.

    Law: all pushes and the flush, joined, are `Tokenizer.decode` of all ids. Pushed text is never taken back
    and has no half characters: U+FFFD appears only for bytes that are invalid for good. A push costs O(1)
    amortised.
    """

    def push(self, token_id: int) -> str:
        """Take one token; return the text that became final, often empty."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> Iterable[str]:
        """Take many tokens; the same text as of so many pushes, in pieces."""
        return map(self.push, token_ids)

    def peek(self) -> str:
        """What a flush would return now, as far as it is no half character."""
        ...

    def flush(self) -> str:
        """End the stream; return the rest of the text."""
        ...


class WholeDetokenizer(IncrementalDetokenizer):
    """Holds everything back until the flush, which is right for any decoder."""

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
    """What byte-level tokens add to a text, by id; each is made when it is first asked for."""

    def __init__(self, visible_token: VisibleToken) -> None:
        self._visible_token = visible_token

    def __missing__(self, token_id: int) -> bytes:
        token = self._visible_token(token_id)
        found = self[token_id] = b"" if token is None else _bytes_of(token)
        return found


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """Text of tokens that spell bytes (GPT-2 style). At most three bytes of an unfinished character are held back."""

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
    """Text of tokens that are text themselves, or single bytes that are text together (SentencePiece style).

    The library turns a run of byte tokens with one bad byte into U+FFFD from its beginning, so nothing of a
    run is final before its end.
    """

    def __init__(self, visible_token: VisibleToken, rules: DecodingRules) -> None:
        self._visible_token = visible_token
        self._rules = rules
        self._first = True
        self._run = bytearray()  # byte tokens since the last text token
        self._strippable = rules.strip_count  # leading characters that may still be dropped

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
    """How a tokenizer.json's decoder makes text of tokens, as far as it does so token by token.

    byte_level: tokens spell bytes in GPT-2's alphabet. Otherwise `piece` is the text of one token; then come
    byte_fallback and the removal of up to strip_count leading strip_content, where the decoder has them.
    opaque: the decoder needs the whole text (CTC, BPE suffixes, replacements after fusing, ...).
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

    def bytes_of(self, token: str) -> bytes:
        """The bytes of a token inside a text; of one whose text depends on others, its spelling's."""
        if self.byte_level:
            return _bytes_of(token)
        if self.opaque:
            return token.encode()
        piece = self.piece(token, False)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return piece.encode()

    def start(
        self, token_bytes: TokenBytes, visible_token: VisibleToken, decode: Decode
    ) -> IncrementalDetokenizer:
        """A detokenizer at the beginning of a stream."""
        if self.opaque:
            return WholeDetokenizer(visible_token, decode)
        if self.byte_level:
            return ByteLevelDetokenizer(token_bytes)
        return PieceDetokenizer(visible_token, self)

    def _piece(self, token: str, first: bool) -> str:
        """What `token` adds to the text before byte fallback, as the stream's first token or a later one."""
        if self._mapper is None:  # without a decoder the library joins tokens by blanks
            return token if first else " " + token
        with raising(InvalidRequestError, f"token {token!r} cannot be decoded. Correct tokenizer.json"):
            if first:
                return str(self._mapper.decode([token]))
            return str(self._mapper.decode(["a", token]))[len(self._mapper.decode(["a"])) :]


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """The decoder's steps with nested sequences flattened."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _steps(child)]


def _decoder_of(steps: list[dict[str, Any]]) -> Any:
    decoder: Any = tokenizers.decoders.Sequence([])
    decoder.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
    return decoder


def _byte_alphabet() -> dict[str, int]:
    """Character to byte as in GPT-2: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@lru_cache(maxsize=_CACHED_TOKENS)
def _bytes_of(token: str) -> bytes:
    """Bytes of a byte-level token; one with a character outside the alphabet stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
