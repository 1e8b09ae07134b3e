"""Rebuild the tokenizer in a GGUF file's metadata as a `tokenizers` object, if it can be exact.

Five kinds are supported: byte-level BPE ("gpt2") with one of the pre-tokenizers listed here, SentencePiece BPE
("llama"), BPE over whole lines ("gemma4"), unigram ("t5"; with a normalisation table, that of XLM-RoBERTa), and
WordPiece ("bert"). Others need a tokenizer.json.
"""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.gguf.reader import GgufReader
from xla_engine.model_loader.tiktoken_model import KIMI_WORDS
from xla_engine.model_loader.tokenizer_json import check_growth

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # ggml's token types
_SPACE = "▁"

# Pre-tokenizers by `tokenizer.ggml.pre`: the regular expressions of the models' own files.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_REST_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_REST_MARKS = _REST.replace(r"\p{L}", r"\p{L}\p{M}", 1)
_LLAMA3 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_GPT4O = "|".join(
    (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?",
        rf"\p{{N}}{{1,3}}|{_REST_SLASH}",
    )
)
_QWEN2 = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}|{_REST}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_CASED = (  # DeepSeek LLM's letters with two cases
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_WORDS: dict[str, tuple[str, ...]] = {  # applied one after the other
    **dict.fromkeys(
        ("llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
        (_LLAMA3,),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    "qwen35": (rf"{_CONTRACTION}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}|{_REST_MARKS}",),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "tekken": (rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}",),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "kimi-k2": (KIMI_WORDS,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "deepseek-coder": (
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "seed-coder": (
        rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "minicpm5": (r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")),
}
_GPT2 = ("gpt-2", "phi-2", "mpt", "roberta-bpe", "modern-bert")
_DIGITS = ("smollm", "refact", "starcoder", "command-r")
_COMPOSED = ("qwen2", "deepseek-r1-qwen", "qwen35", "command-r", "modern-bert")  # text is normalised (NFC)
# a word that is in the vocabulary becomes one token, whatever the merges
_WHOLE_WORDS_FIRST = (
    *("llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "smaug-bpe", "glm4", "tekken", "minicpm5"),
    "kimi-k2",
)
# byte-level tokenizers that add a begin token although the metadata do not say so
_BEGINS = ("llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")


def tokenizer_of(file: GgufReader) -> tokenizers.Tokenizer | None:
    """The file's tokenizer; None if it has none. Raises CheckpointError if it cannot be rebuilt exactly."""
    if (whole := file.get("tokenizer.huggingface.json")) is not None:
        check_growth(whole, file.path)
        return tokenizers.Tokenizer.from_str(whole)
    kind = file.get("tokenizer.ggml.model")
    if kind in (None, "no_vocab", "none"):
        return None
    kinds = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "gemma4": _lines,
        "t5": _unigram,
        "bert": _word_piece,
    }
    build = kinds.get(str(kind))
    if build is None:
        raise _inexact(file, f"its tokenizer is of kind {kind!r}")
    vocabulary = _Vocabulary(file)
    try:
        backend = build(file, vocabulary)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise _inexact(file, f"its tokenizer contradicts itself ({error})") from error
    backend.add_tokens(vocabulary.added)
    if _encodes(file):
        _add_ends_of_pairs(file, vocabulary, backend)
    else:
        begins = kind == "llama" or file.get("tokenizer.ggml.pre") in _BEGINS
        _add_ends(file, vocabulary, backend, begins=begins)
    return backend


def _encodes(file: GgufReader) -> bool:
    """Whether the file is an encoder, which reads pairs of texts."""
    return file.get("general.architecture") in ("bert", "nomic-bert", "modern-bert")


class _Vocabulary:
    """The tokens of a GGUF file by id, with their types."""

    def __init__(self, file: GgufReader) -> None:
        self.tokens: list[str] = self._list(file, "tokens", str, None)
        if file.get("tokenizer.ggml.model") == "bert":
            self.tokens = _pieces(file, self.tokens)
        count = len(self.tokens)
        self.types: list[int] = self._list(file, "token_type", int, [_NORMAL] * count)
        self.ids = dict(zip(self.tokens, range(count), strict=True))
        if len(self.ids) != count:
            raise _inexact(file, "some of its tokens have the same text")
        others = [(self.tokens[place], kind) for place, kind in enumerate(self.types) if kind != _NORMAL]
        self.added = [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in others
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
        self.unknown = next((token for token, kind in others if kind == _UNKNOWN), None)
        self.has_bytes = _BYTE in self.types

    def token(self, number: Any, file: GgufReader) -> str:
        """The text of a token by its id."""
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            raise _inexact(file, "one of its special tokens has no text")
        return self.tokens[number]

    def scores(self, file: GgufReader) -> list[float]:
        return self._list(file, "scores", float, None)

    def _list(self, file: GgufReader, name: str, kind: type, default: list[Any] | None) -> list[Any]:
        values = file.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(values, list) or not values or set(map(type, values)) != {kind}:
            raise _inexact(file, f"its tokenizer.ggml.{name} is not a list of {kind.__name__}")
        if name != "tokens" and len(values) != len(self.tokens):
            raise _inexact(file, f"its tokenizer.ggml.{name} has another length than its tokens")
        return values


def _pieces(file: GgufReader, tokens: list[str]) -> list[str]:
    """WordPiece's tokens as in its own files. llama.cpp's converter marks the first piece of a word by a space, and
    not the others by "##"."""
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)

    def piece(token: str, kind: int) -> str:
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or (token.startswith("[") and token.endswith("]")):
            return token
        return token[1:] if token.startswith(_SPACE) and token != _SPACE else f"##{token}"

    return [piece(token, kind) for token, kind in zip(tokens, types, strict=True)]


def _word_piece(file: GgufReader, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """BERT's. Newer files say whether text becomes lower case and loses its accents; in others, a vocabulary of lower
    case tells it."""
    lower, accents = (
        file.get(f"tokenizer.ggml.normalizer.{name}") for name in ("lowercase", "strip_accents")
    )
    if lower is None and any(
        token != token.lower()
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind == _NORMAL and token[0] != "["
    ):
        raise _inexact(
            file, "its vocabulary has capital letters, and the metadata do not say whether text keeps its own"
        )
    if not {type(lower), type(accents)} <= {bool, type(None)}:
        raise _inexact(file, "how it changes the case and the accents of text is not said by true or false")
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    name = "[UNK]" if unknown is None else vocabulary.token(unknown, file)
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary.ids, unk_token=name))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower is not False, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _byte_level(file: GgufReader, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name = file.get("tokenizer.ggml.pre")
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, _pairs(file), ignore_merges=name in _WHOLE_WORDS_FIRST)
    )
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name in _GPT2 + _DIGITS)
    if name in _GPT2:
        backend.pre_tokenizer = plain
    elif name in _DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), plain]
        )
    elif name in _WORDS:
        words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _WORDS[name]]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*words, plain])
    else:
        raise _inexact(file, f"how it cuts text into words ({name!r}) is not known")
    if name in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pairs(file: GgufReader) -> list[tuple[str, str]]:
    """The merges that the file lists."""
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges") or []]
    if any(len(merge) != 2 for merge in merges):
        raise _inexact(file, "one of its merges is not a pair")
    return [(left, right) for left, right in merges]


def _lines(file: GgufReader, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """BPE of Gemma 4: text is not cut into words, spaces are letters, and bytes stand for unknown characters."""
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids, _pairs(file), unk_token=vocabulary.unknown, fuse_unk=True, byte_fallback=True
        )
    )
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = _text_decoder(prefix=False)
    return backend


def _sentencepiece(file: GgufReader, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    merges = _merges(vocabulary, vocabulary.scores(file))
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges,
            unk_token=vocabulary.unknown,
            fuse_unk=True,
            byte_fallback=vocabulary.has_bytes,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    backend.decoder = _text_decoder(prefix)
    return backend


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Merges in SentencePiece's order of preference: by the score of the resulting token."""
    ids = vocabulary.ids
    mergeable = [
        number
        for number, kind in enumerate(vocabulary.types)
        if kind in (_NORMAL, _USER_DEFINED) and len(vocabulary.tokens[number]) > 1
    ]
    merges = []
    for number in sorted(mergeable, key=lambda number: (-scores[number], number)):
        token = vocabulary.tokens[number]
        parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in parts if left in ids and right in ids]
        merges += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _unigram(file: GgufReader, vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    table = file.get("tokenizer.ggml.precompiled_charsmap")
    spaces = file.get("tokenizer.ggml.remove_extra_whitespaces")
    if (table or spaces) and not _encodes(file):
        raise _inexact(file, "its tokenizer normalises text by a table")
    count = max((at + 1 for at, kind in enumerate(vocabulary.types) if kind != _UNUSED), default=0)
    pieces = list(zip(vocabulary.tokens, vocabulary.scores(file), strict=True))[
        :count
    ]  # the rest only fills up
    unknown = None if vocabulary.unknown is None else vocabulary.ids[vocabulary.unknown]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unknown, vocabulary.has_bytes))
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    words: Any = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    if table:  # XLM-RoBERTa: words that spaces divide, however many
        backend.normalizer = normalizers.Precompiled(bytes(each & 255 for each in table))
        words = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    backend.pre_tokenizer = words
    backend.decoder = _text_decoder(prefix)
    return backend


def _text_decoder(prefix: bool) -> Any:
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _add_ends(
    file: GgufReader, vocabulary: _Vocabulary, backend: tokenizers.Tokenizer, *, begins: bool
) -> None:
    """Add the tokens that every text gets at its beginning and end."""
    asked = {
        "bos": file.get("tokenizer.ggml.add_bos_token", begins),
        "eos": file.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = {name: file.get(f"tokenizer.ggml.{name}_token_id") for name, wanted in asked.items() if wanted}
    ids = {name: number for name, number in ids.items() if number is not None}
    if not ids:
        return
    if any(number >= len(vocabulary.tokens) for number in ids.values()):
        raise _inexact(file, "one of its special tokens has no text")
    named = {name: vocabulary.tokens[number] for name, number in ids.items()}
    pieces = [named.get("bos"), "$A", named.get("eos")]
    backend.post_processor = processors.TemplateProcessing(
        [piece for piece in pieces if piece is not None],
        None,
        [(token, ids[name]) for name, token in named.items()],
    )


def _add_ends_of_pairs(file: GgufReader, vocabulary: _Vocabulary, backend: tokenizers.Tokenizer) -> None:
    """Add the tokens around a text of an encoder, and between two: as BERT does, or RoBERTa, with two between."""
    pieces = "[CLS]" in vocabulary.ids
    first = _special(file, vocabulary, ("cls", "bos"), "[CLS]" if pieces else "<s>")
    last = _special(file, vocabulary, ("seperator", "eos"), "[SEP]" if pieces else "</s>")
    second = f"$B:1 {last}:1" if pieces else f"{last} $B {last}"
    backend.post_processor = processors.TemplateProcessing(
        f"{first} $A {last}",
        f"{first} $A {last} {second}",
        [(token, vocabulary.ids[token]) for token in (first, last)],
    )


def _special(file: GgufReader, vocabulary: _Vocabulary, names: tuple[str, ...], usual: str) -> str:
    """A token by the first of its ids that the file has, or its usual text."""
    ids = (file.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    token = next((vocabulary.token(number, file) for number in ids if number is not None), usual)
    if token not in vocabulary.ids:
        raise _inexact(file, f"it has no token {token}")
    return token


def _inexact(file: GgufReader, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: {reason}, so text cannot be tokenised exactly. Put the model's tokenizer.json next to the file"
    )
