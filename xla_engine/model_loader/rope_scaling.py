"""Read the rotary fields of config.json: base and scaling, in transformers' old and new format."""

import math
from typing import Any, NamedTuple

from xla_engine.graphs.config import FULL, SLIDING, RopeScaling
from xla_engine.graphs.ops.rope import natural_log
from xla_engine.model_loader.families import Family
from xla_engine.model_loader.json_fields import Fields

# The sections of multimodal positions all have the same position in text.
_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
_ORIGINAL = "original_max_position_embeddings"
# Fields allowed for each type; others would have no effect and are rejected.
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
    """The rotary fields of config.json.

    local_theta: base of sliding-window layers if they have their own. limit: positions that the scaling allows;
    None if it does not say.
    """

    theta: float
    local_theta: float | None
    scaling: RopeScaling | None
    partial_rotary_factor: float
    limit: int | None


def read_rope(fields: Fields, family: Family) -> RopeFields:
    """Read scaling from `rope_scaling` (transformers 4) or `rope_parameters` (5), and the base inside or outside.

    A family whose sliding-window layers have their own base may have one object for each type of layer.
    Raises CheckpointError naming file, field and remedy.
    """
    objects = [
        rope for key in ("rope_parameters", "rope_scaling") if (rope := fields.within(key)) is not None
    ]
    local = _of_layers(objects, SLIDING) if family.rope_local else []
    objects = _of_layers(objects, FULL) if family.rope_local else objects
    scalings = [_read_scaling(rope, fields) for rope in objects]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        fields.fail("rope_scaling", "contradicts rope_parameters. Keep the one that is right")
    scaling = scalings[0] if scalings else None
    allowed = "partial_rotary_factor" in family.reads
    parts = {_part(source, allowed) for source in (fields, *objects, *local)} - {None}
    if len(parts) > 1:
        fields.fail("partial_rotary_factor", "given twice and differently. Keep the one that is right")
    limit = None
    # Gemma 3's max_position_embeddings is the scaled one already.
    stretched = ("dynamic", "yarn") if family.rope_local else ("linear", "dynamic", "yarn")
    if scaling is not None and scaling.rope_type in stretched:
        limit = min(int(scaling.original_max_position_embeddings * scaling.factor), _LARGEST)
    theta = _theta([fields, *objects], family.rope_theta)
    return RopeFields(
        theta=theta,
        local_theta=_local_theta(fields, local, theta) if family.rope_local else None,
        scaling=scaling,
        partial_rotary_factor=parts.pop() or 1.0 if parts else 1.0,
        limit=limit,
    )


def _of_layers(objects: list[Fields], kind: str) -> list[Fields]:
    """The rope objects of one type of layer; an object without types belongs to full-attention layers."""
    found = []
    for rope in objects:
        if FULL in rope.values or SLIDING in rope.values:
            found += [own] if (own := rope.within(kind)) is not None else []
        elif kind == FULL:
            found.append(rope)
    return found


def _local_theta(fields: Fields, objects: list[Fields], theta: float) -> float:
    """The base of sliding-window layers: from their own object, `rope_local_base_freq`, or the base of the others."""
    for rope in objects:
        if _read_scaling(rope, fields) is not None:
            rope.fail("rope_type", 'not supported for sliding layers. Use "default"')
        if rope.given("rope_theta"):
            return rope.number("rope_theta", high=1e15)
    return fields.number("rope_local_base_freq", high=1e15, default=theta)


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
    """The scaling; None for type "default". All parameters of a type are required, although transformers guesses
    some."""
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
    found: dict[str, Any] = {"rope_type": kind, "original_max_position_embeddings": original}
    if kind == "longrope":
        return RopeScaling(**found, **_longrope(rope, config, original))
    found["factor"] = rope.number("factor", high=1e6)
    if kind == "llama3":
        low = rope.number("low_freq_factor", high=1e6)
        high = rope.number("high_freq_factor", high=1e6)
        if high <= low:
            rope.fail("high_freq_factor", f"must be above low_freq_factor = {low:g}. Correct the file")
        found |= {"low_freq_factor": low, "high_freq_factor": high}
    elif kind == "yarn":
        found |= {
            "beta_fast": rope.number("beta_fast", high=1e6, default=32.0),
            "beta_slow": rope.number("beta_slow", high=1e6, default=1.0),
            "truncate": rope.flag("truncate", default=True),
            "attention_factor": _yarn_attention(rope, found["factor"]),
        }
    return RopeScaling(**found)


def _original(kind: str, rope: Fields, config: Fields) -> int:
    """The context length before scaling; for linear and dynamic scaling, the one in config.json."""
    inside, beside = (source.values.get(_ORIGINAL) for source in (rope, config))
    if inside is not None and beside not in (None, inside):
        config.fail(_ORIGINAL, "contradicts the rope object. Keep the right one")
    if kind in ("linear", "dynamic") and inside is None:
        return config.integer("max_position_embeddings", high=_LARGEST, default=2048)
    if kind == "longrope" and inside is None:
        return config.integer(_ORIGINAL, low=2, high=_LARGEST)
    # at least 2, because longrope divides by its logarithm
    return rope.integer(_ORIGINAL, low=2 if kind == "longrope" else 1, high=_LARGEST)


def _yarn_attention(rope: Fields, factor: float) -> float:
    """The given attention factor, or the paper's (Peng et al. 2023, section 3.4)."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * natural_log(factor) + 1.0 if factor > 1 else 1.0

    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor", high=1e6)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        above, below = (rope.number(name, high=1e6) for name in ("mscale", "mscale_all_dim"))
        return temperature(above) / temperature(below)
    return temperature(1.0)


def _longrope(rope: Fields, config: Fields, original: int) -> dict[str, Any]:
    longest = config.integer("max_position_embeddings", high=_LARGEST, default=2048)
    factor = rope.number("factor", high=1e6, default=longest / original)
    if rope.values.get("attention_factor") is not None:
        attention = rope.number("attention_factor", high=1e6)
    else:
        attention = math.sqrt(1 + natural_log(factor) / natural_log(original)) if factor > 1 else 1.0
    lists = {name: rope.numbers(name, high=1e6) for name in ("short_factor", "long_factor")}
    return {"factor": factor, "attention_factor": attention, **lists}
