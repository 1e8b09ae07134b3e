"""Tokenize and detokenize with the `tokenizers` library, from a tokenizer.json or a GGUF file's metadata."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import tokenizers

from xla_engine.errors import CheckpointError, InvalidRequestError
from xla_engine.model_loader.model_files import ModelFiles, open_model
from xla_engine.model_loader.tokenizer_json import check_growth, raising, without_prefix
from xla_engine.text.detokenizer import DecodingRules, IncrementalDetokenizer, TokenBytes
from xla_engine.text.trials import why_not_load

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

# characters; longer text goes through the batch API, since only that releases the interpreter lock
_LONG_TEXT = 8192


class Tokenizer:
    """One model's tokenizer, with truncation and padding switched off.

    vocab_size: one more than the highest token id; the model's own vocabulary may be padded beyond it.
    longest_token: characters of the longest token in the vocabulary.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        special = {
            number: token for number, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._special_ids = frozenset(special)
        self._special = {token.content for token in special.values()}
        self._rules = DecodingRules(backend)
        # keyed by whether special tokens are skipped
        self._token_bytes = {skip: TokenBytes(partial(self._visible_token, skip)) for skip in (False, True)}
        self._strings: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """A copy of the vocabulary takes longer than all else here, so it is made when somebody asks."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=-1) + 1, max(map(len, vocabulary), default=1)

    @property
    def vocab_size(self) -> int:
        return self._sizes[0]

    @property
    def longest_token(self) -> int:
        return self._sizes[1]

    @cached_property
    def sha256(self) -> str:
        """Hex digits, of the tokenizer as `tokenizers` writes it."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    @classmethod
    def of_model(cls, files: ModelFiles) -> Self | None:
        """The tokenizer of a model; None if it has none.

        Raises CheckpointError for a broken one, and for GGUF metadata that do not define an exact tokenizer.
        """
        _try(files)
        backend = files.tokenizer()
        with raising(CheckpointError, f"{files.path}: not a usable tokenizer. Download its files again"):
            return None if backend is None else cls(backend)

    def has_tokens_of(self, other: Tokenizer) -> bool:
        """Whether both have the same vocabulary."""
        return self._backend.get_vocab(True) == other._backend.get_vocab(True)

    @classmethod
    def from_pretrained(cls, model: Path | str) -> Self:
        """The tokenizer of the model that `model` names (see `open_model`). Raises CheckpointError if it has none."""
        files = open_model(model)
        found = cls.of_model(files)
        if found is None:
            raise CheckpointError(
                f"{files.path / 'tokenizer.json'}: no such file, so text cannot be tokenised. Pass token ids, or "
                f"create the file once where transformers is installed: "
                f"AutoTokenizer.from_pretrained({str(files.path)!r}).save_pretrained(NEW_PATH)"
            )
        return found

    def encode(self, text: str, pair: str | None = None, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, or of `text` and `pair` joined as tokenizer.json says.

        add_special_tokens: add the begin and end tokens that tokenizer.json defines. Raises InvalidRequestError for
        invalid Unicode and for any failure of the tokenizer.
        """
        with raising(InvalidRequestError, "the text cannot be tokenised. Change it or pass token ids"):
            if isinstance(text, str):
                text.encode()  # reports a lone surrogate with its position
            if len(text) > _LONG_TEXT:  # lets other threads run
                given = text if pair is None else (text, pair)
                return self._backend.encode_batch_fast([given], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, pair, add_special_tokens=add_special_tokens).ids

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, and for each token where it begins and ends in the text (characters)."""
        with raising(InvalidRequestError, "the text cannot be tokenised. Change it or pass token ids"):
            text.encode()  # reports a lone surrogate with its position
            found = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
            return found.ids, found.offsets

    def second_start(self, text: str, pair: str) -> int:
        """Where the tokens of type 1 begin in `encode(text, pair)`; 0 if there are none."""
        types = self._backend.encode(text, pair).type_ids
        return types.index(1) if 1 in types else 0

    def plain_ids(self, text: str) -> list[int]:
        """`encode` without special tokens."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; unknown ids give no text. Raises InvalidRequestError for invalid ids."""
        with raising(
            InvalidRequestError, "the ids cannot be decoded. Pass token ids, integers of at least 0"
        ):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """`decode` of one id, including special tokens."""
        text = self._strings.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            if token_id < self.vocab_size:
                self._strings[token_id] = text
        return text

    def incremental(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A detokenizer for one stream of tokens; its pieces join to `decode`."""
        return self._rules.start(
            self._token_bytes[skip_special_tokens],
            partial(self._visible_token, skip_special_tokens),
            partial(self.decode, skip_special_tokens=skip_special_tokens),
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token inside a text, possibly part of a character; for a special token, its name."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._visible_token(False, token_id)
            if token is None:
                return b""
            found = token.encode() if token in self._special else self._rules.bytes_of(token)
            self._bytes[token_id] = found
        return found

    def bytes_of_all(self, count: int) -> list[bytes]:
        """`token_bytes` of all ids below `count`, which keeps none of them: faster than one by one."""
        special, bytes_of = self._special, self._rules.uncached_bytes_of
        return [
            b"" if token is None else token.encode() if token in special else bytes_of(token)
            for token in map(self._backend.id_to_token, range(count))
        ]

    @property
    def special_token_ids(self) -> frozenset[int]:
        """The ids of special tokens; added tokens that are text are not among them."""
        return self._special_ids

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in tokenizer.json."""
        return self._backend.token_to_id(token)

    @property
    def drops_first_space(self) -> bool:
        """Whether a space that a text's tokens begin with is not part of the text, as in Llama 2."""
        return self._rules.drops_first_space

    def inner_ids(self, text: str) -> list[int]:
        """Ids of a text inside a longer one: without special tokens, and without a space before it."""
        return self._inner.encode(text, add_special_tokens=False).ids

    @cached_property
    def _inner(self) -> tokenizers.Tokenizer:
        if not self.drops_first_space:
            return self._backend
        return tokenizers.Tokenizer.from_str(json.dumps(without_prefix(json.loads(self._backend.to_str()))))

    def _visible_token(self, skip_special_tokens: bool, token_id: int) -> str | None:
        try:
            token = self._backend.id_to_token(token_id)
        except (TypeError, OverflowError) as error:
            raise InvalidRequestError(
                f"{token_id!r} is not a token id. Pass integers of at least 0"
            ) from error
        return None if skip_special_tokens and token in self._special else token


def _try(files: ModelFiles) -> None:
    """Raise CheckpointError for a tokenizer.json that is too large, or whose trial in a worker process fails."""
    file = (files.path if files.path.is_dir() else files.path.parent) / "tokenizer.json"
    if not file.exists():
        return
    with raising(CheckpointError, f"{file}: not a usable tokenizer. Download the file again"):
        unusual = check_growth(file.read_bytes(), file)
    if unusual and (why := why_not_load(file)) is not None:
        raise CheckpointError(f"{file}: not a usable tokenizer. Use the file of the model's authors ({why})")
