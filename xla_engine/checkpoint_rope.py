"""Rotary fields of config.json: base and scaling, in transformers' old and new spelling."""

from __future__ import annotations

import math
from typing import NamedTuple

from graphs.config import RopeScaling
from xla_engine.checkpoint_json import Fields

_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_ORIGINAL = "original_max_position_embeddings"
# What each type may carry beside; other fields would be silently without effect.
_KNOWN = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor", _ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL},
    "yarn": {
        *("factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate"),
        *("mscale", "mscale_all_dim"),
    },
    "longrope": {"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"},
}
_OLD_NAMES = {"su": "longrope"}
_LARGEST = 2**31 - 1


class RopeFields(NamedTuple):
    """What config.json says about rotary embedding. limit: positions that the scaling allows, None if it is silent."""

    theta: float
    scaling: RopeScaling | None
    partial_rotary_factor: float
    limit: int | None


def read_rope(fields: Fields, *, theta: float, rotary_part: bool) -> RopeFields:
    """The scaling may stand under `rope_scaling` (transformers 4) or `rope_parameters` (5), the base inside or beside.

    theta: where the file names none. rotary_part: whether the family may rotate a part of each head only.
    Raises CheckpointError naming file, field and remedy.
    """
    objects = [
        rope for key in ("rope_parameters", "rope_scaling") if (rope := fields.within(key)) is not None
    ]
    scalings = [_read_scaling(rope, fields) for rope in objects]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        fields.fail("rope_scaling", "contradicts rope_parameters. Keep the one that is right")
    scaling = scalings[0] if scalings else None
    parts = {_part(source, rotary_part) for source in (fields, *objects)} - {None}
    if len(parts) > 1:
        fields.fail("partial_rotary_factor", "given twice and differently. Keep the one that is right")
    limit = None
    if scaling is not None and scaling.rope_type in ("linear", "dynamic", "yarn"):
        limit = min(int(scaling.original_max_position_embeddings * scaling.factor), _LARGEST)
    return RopeFields(_theta([fields, *objects], theta), scaling, parts.pop() or 1.0 if parts else 1.0, limit)


def _theta(sources: list[Fields], default: float) -> float:
    found = {
        source.number("rope_theta", high=1e15)
        for source in sources
        if source.values.get("rope_theta") is not None
    }
    if len(found) > 1:
        sources[0].fail("rope_theta", f"given as {sorted(found)} in one file. Keep the one that is right")
    return found.pop() if found else default


def _part(source: Fields, allowed: bool) -> float | None:
    if source.values.get("partial_rotary_factor") is None:
        return None
    part = source.number("partial_rotary_factor", high=1.0)
    if part != 1 and not allowed:
        source.fail("partial_rotary_factor", "not supported (rotary embedding of a part of each head). Use 1")
    return part


def _read_scaling(rope: Fields, config: Fields) -> RopeScaling | None:
    """None for type "default". Numbers that a type needs are required, where transformers would guess some."""
    name = "type" if rope.values.get("rope_type") is None else "rope_type"
    kind = rope.values.get(name)
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in _KNOWN:
        rope.fail(name, f"not supported. Supported rope types: {', '.join(_KNOWN)}")
    for key, value in rope.values.items():
        if key not in _COMMON | _KNOWN[kind] and value is not None:
            rope.fail(key, f"no parameter of rope type {kind}. Remove it or correct the type")
    if kind == "default":
        return None
    original = _original(kind, rope, config)
    if kind == "longrope":
        return _longrope(rope, config, original)
    factor = rope.number("factor", high=1e6)
    if kind == "llama3":
        low = rope.number("low_freq_factor", high=1e6)
        high = rope.number("high_freq_factor", high=1e6)
        if high <= low:
            rope.fail("high_freq_factor", f"must be above low_freq_factor = {low:g}. Correct the file")
        return RopeScaling(
            rope_type=kind,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position_embeddings=original,
        )
    if kind != "yarn":
        return RopeScaling(rope_type=kind, factor=factor, original_max_position_embeddings=original)
    return RopeScaling(
        rope_type=kind,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", high=1e6, default=32.0),
        beta_slow=rope.number("beta_slow", high=1e6, default=1.0),
        truncate=rope.flag("truncate", default=True),
        attention_factor=_yarn_attention(rope, factor),
    )


def _original(kind: str, rope: Fields, config: Fields) -> int:
    """The context before scaling; for linear and dynamic scaling it is what config.json calls the context."""
    inside, beside = (source.values.get(_ORIGINAL) for source in (rope, config))
    if inside is not None and beside not in (None, inside):
        config.fail(_ORIGINAL, "contradicts the rope object. Keep the right one")
    if kind in ("linear", "dynamic") and inside is None:
        return config.integer("max_position_embeddings", high=_LARGEST, default=2048)
    if kind == "longrope" and inside is None:
        return config.integer(_ORIGINAL, high=_LARGEST)
    return rope.integer(_ORIGINAL, high=_LARGEST)


def _yarn_attention(rope: Fields, factor: float) -> float:
    """The factor that is given, or that of the paper (Peng et al. 2023, section 3.4)."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor", high=1e6)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        above, below = (rope.number(name, high=1e6) for name in ("mscale", "mscale_all_dim"))
        return temperature(above) / temperature(below)
    return temperature(1.0)


def _longrope(rope: Fields, config: Fields, original: int) -> RopeScaling:
    longest = config.integer("max_position_embeddings", high=_LARGEST, default=2048)
    factor = rope.number("factor", high=1e6, default=longest / original)
    if rope.values.get("attention_factor") is not None:
        attention = rope.number("attention_factor", high=1e6)
    else:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        short_factor=rope.numbers("short_factor", high=1e6),
        long_factor=rope.numbers("long_factor", high=1e6),
    )
