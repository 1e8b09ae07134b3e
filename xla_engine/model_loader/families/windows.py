"""Which layers slide: what several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xla_engine.graphs.config import FULL, SLIDING
from xla_engine.model_loader.json_fields import Fields

_LARGEST = 2**31 - 1


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", high=2**12)


def every(_: int) -> bool:
    return True


def all_but_each(pattern: int) -> Callable[[int], bool]:
    """The last of every `pattern` layers is full, the others slide."""
    return lambda index: (index + 1) % pattern != 0


def sliding(fields: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """The flags of `sliding_window` and `layer_types`, where the file does not name the types those of `slides`.

    Without a window every layer is full.
    """
    count = layer_count(fields)
    types = fields.values.get("layer_types")
    windowed = fields.given("sliding_window")
    if types is None:
        types = [SLIDING if windowed and slides(index) else FULL for index in range(count)]
    if (
        not isinstance(types, list)
        or len(types) != count
        or any(each not in (FULL, SLIDING) for each in types)
    ):
        fields.fail("layer_types", f'must be {count} times "{FULL}" or "{SLIDING}". Correct the file')
    if SLIDING not in types:
        return {}
    if not windowed:
        fields.fail("sliding_window", "must be given: layer_types names sliding layers. Correct the file")
    return {"layer_types": tuple(types), "sliding_window": fields.integer("sliding_window", high=_LARGEST)}
