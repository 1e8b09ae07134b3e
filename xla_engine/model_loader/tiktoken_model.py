"""Read the tokenizer of Kimi models, whose file `tiktoken.model` lists the tokens in the order of their merges.

How text is cut into words stands in the model's own code (`TikTokenTokenizer`), which is never run, so only that class
is supported.
"""

import base64
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from xla_engine.errors import CheckpointError
from xla_engine.model_loader.json_fields import read_json
from xla_engine.model_loader.stand_ins import stand_in

NAME = "tiktoken.model"
_RESERVED = 256  # ids of special tokens behind the others
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# The words of Kimi K2, Kimi Linear and Moonlight: `pat_str` of their `tokenization_kimi.py`.
KIMI_WORDS = "|".join(
    (
        r"\p{Han}+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


def read_tiktoken(directory: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of `directory`; None if it has none of this kind. Raises CheckpointError for a broken one."""
    file, settings = directory / NAME, directory / "tokenizer_config.json"
    if not file.exists() or not settings.exists():
        return None
    config = read_json(settings)
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        return None
    if (problem := stand_in(file)) is not None:
        raise CheckpointError(f"{file}: {problem}")
    ranks = _ranks(file)
    letters = _letters()
    spelled = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(spelled, _merges(spelled), ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(KIMI_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_special(config.get("added_tokens_decoder"), len(ranks), settings))
    return backend


def _ranks(file: Path) -> dict[bytes, int]:
    """The rank of each token, which is its id: a line for each, base64 and the rank."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a list of tokens ({error}). Download the file again") from error
    whole = len(ranks) == len(lines) and sorted(ranks.values()) == list(range(len(ranks)))
    if not whole or any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointError(f"{file}: tokens are missing or stand there twice. Download the file again")
    return ranks


def _letters() -> list[str]:
    """The letter of each byte in byte-level BPE: printable ones stand for themselves, others follow from U+0100."""
    letters, others = [], 0
    for byte in range(256):
        printable = 33 <= byte < 127 or 161 <= byte < 173 or byte >= 174
        letters.append(chr(byte if printable else 256 + others))
        others += not printable
    return letters


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that make another, by the rank of the result: tiktoken merges any two tokens whose
    concatenation is one."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [(left, right) for left, right in parts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _special(given: Any, first: int, file: Path) -> list[AddedToken]:
    """The tokens behind the first `first`, with the names that tokenizer_config.json has for them."""
    given = given if isinstance(given, dict) else {}
    found = []
    for number in range(first, first + _RESERVED):
        entry = given.get(str(number), {"content": f"<|reserved_token_{number}|>"})
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise CheckpointError(f"{file}: token {number} has no text. Download the file again")
        found.append(AddedToken(entry["content"], special=entry.get("special", True), normalized=False))
    if len({token.content for token in found}) != len(found):
        raise CheckpointError(f"{file}: two special tokens have the same text. Download the file again")
    return found
