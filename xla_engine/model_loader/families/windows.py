"""Which layers have sliding windows; shared by several families."""

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
    """The last of every `pattern` layers has full attention, the others sliding windows."""
    return lambda index: (index + 1) % pattern != 0


def sliding(fields: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """The flags for `sliding_window` and `layer_types`; `slides` gives the types if the file does not.

    Without a window every layer has full attention.
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
