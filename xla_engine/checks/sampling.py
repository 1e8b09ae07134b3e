"""Values of sampling fields, checked and brought to one form."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.row_state.limits import MAX_DRY_BREAKERS, MAX_LOGIT_BIAS
from xla_engine.utils.plain import plain
from xla_engine.utils.shown import shown

MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 1 << 14  # of all stop strings of a request together

_TOKEN_ID = re.compile(r"[0-9]{1,19}", re.ASCII)  # written as text, as JSON has to


def check_stop_strings(stop: object) -> tuple[str, ...]:
    """One string, several or none, as a tuple without repeats."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(
        isinstance(string, str) for string in strings[:MAX_STOP_STRINGS]
    ):
        raise InvalidRequestError(f"stop must be text or a list of texts, not {type(stop).__name__}")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"{len(strings)} stop strings given; at most {MAX_STOP_STRINGS}")
    if "" in strings:
        raise InvalidRequestError("a stop string is empty, which would end every request; remove it")
    if (total := sum(map(len, strings))) > MAX_STOP_CHARACTERS:
        raise InvalidRequestError(
            f"the stop strings have {total} characters together; at most {MAX_STOP_CHARACTERS}"
        )
    return tuple(dict.fromkeys(strings))


def check_token_ids(name: str, ids: object, most: int) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidRequestError(f"{name} must be a list of token ids, not {shown(ids)}")
    if len(ids) > most:
        raise InvalidRequestError(f"{len(ids)} {name} given; at most {most}")
    found = tuple(map(plain, ids))
    for token_id in found:
        check_integer(f"{name} entry", token_id, low=0)
    return found


def check_breakers(given: object) -> tuple[str | int, ...]:
    what = f"dry_sequence_breakers must be a list of at most {MAX_DRY_BREAKERS} texts and token ids"
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or len(given) > MAX_DRY_BREAKERS:
        raise InvalidRequestError(f"{what}, not {shown(given)}")
    found = tuple(map(plain, given))
    for each in found:
        if not isinstance(each, str):
            check_integer("dry_sequence_breakers entry", each, low=0)
        elif not each or len(each) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequestError(f"{what}: a breaker is a short text, not {shown(each)}")
    return found


def check_bad_words(words: object) -> tuple[str, ...]:
    if words is None:
        return ()
    if isinstance(words, (str, bytes)) or not isinstance(words, Sequence):
        raise InvalidRequestError(f"bad_words must be a list of strings, not {shown(words)}")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"{len(words)} bad_words given; at most {MAX_BAD_WORDS}")
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise InvalidRequestError(f"a bad word must be a string that is not blank, not {shown(word)}")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequestError(
                f"a bad word has {len(word)} characters; at most {MAX_BAD_WORD_CHARACTERS}"
            )
    return tuple(dict.fromkeys(words))


def check_logit_bias(bias: object) -> Mapping[int, float] | None:
    """Ids may be written as strings, as JSON has to."""
    if not bias:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, not {shown(bias)}")
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(bias)} ids; at most {MAX_LOGIT_BIAS}: allowed_token_ids has no such limit"
        )
    found: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if isinstance(key, str) and _TOKEN_ID.fullmatch(key) else plain(key)
        value = plain(value)
        check_integer("logit_bias id", token_id, low=0)
        check_finite(f"logit_bias of {token_id}", value)
        if not -100 <= value <= 100:
            raise InvalidRequestError(f"logit_bias of {token_id} must be in [-100, 100], not {value}")
        if token_id in found:
            raise InvalidRequestError(f"logit_bias names id {token_id} twice; keep one")
        found[token_id] = float(value)
    return found


def check_finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise InvalidRequestError(f"{name} must be a finite number, not {shown(value)}")


def check_integer(name: str, value: object, *, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {shown(value)}")
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {shown(value)}")
