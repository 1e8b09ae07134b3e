"""Options of models that pool, and fields that options put in place of config.json's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from xla_engine.errors import ConfigError
from xla_engine.graphs.steps.pooling import POOLING_TYPES
from xla_engine.utils.shown import shown

_MOST = 1 << 24  # dimensions of a vector, or positions


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _size(value: object) -> bool:
    return type(value) is int and 0 < value < _MOST


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(map(_size, value))


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _object(value: object) -> bool:
    return isinstance(value, Mapping)


_FIELDS: Mapping[str, Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "pooler_config": {
        "pooling_type": (lambda value: value in POOLING_TYPES, " or ".join(POOLING_TYPES)),
        "use_activation": (_flag, "true or false"),
    },
    "hf_overrides": {
        "architectures": (_words, "a list of names"),
        "problem_type": (lambda value: isinstance(value, str), "text"),
        "classifier_from_token": (_words, "a list of tokens"),
        "is_original_qwen3_reranker": (_flag, "true or false"),
        "is_matryoshka": (_flag, "true or false"),
        "matryoshka_dimensions": (_sizes, "a list of sizes"),
        "rope_parameters": (_object, "an object"),
        "rope_scaling": (_object, "an object"),
        "rope_theta": (_number, "a number"),
        "max_position_embeddings": (_size, "a number of tokens"),
        "max_model_len": (_size, "a number of tokens"),
    },
}


OF_EVERY_MODEL = frozenset(
    ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "max_model_len")
)


def check_pooling(name: str, given: object) -> None:
    """Raise ConfigError unless `given` is None or an object of fields that the option `name` has."""
    known = _FIELDS[name]
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be an object of names and values, not {shown(given)}")
    for field, value in given.items():
        if field not in known:
            remedy = ": edit the checkpoint's config.json" if name == "hf_overrides" else ""
            raise ConfigError(f"{name} may hold {', '.join(known)}, not {shown(field)}{remedy}")
        fits, words = known[field]
        if not fits(value):
            raise ConfigError(f"{field} of {name} must be {words}, not {shown(value)}")
