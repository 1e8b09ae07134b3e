"""What of an adapter each of several devices holds: all of A, and of B the features that it has of the weight itself.

So a device takes A x as one device alone does, and B's sums run over the whole rank there: no bit depends on how many
devices there are, where none of the weight's own does.
"""

from __future__ import annotations

from xla_engine.graphs.lora.form import UP, part_ends
from xla_engine.graphs.sharding import Cut, Sharding

_FEATURES = 2  # the axis of B [slots, rank, features]


def cut_of(sharding: Sharding, leaf: str) -> Cut | None:
    """How a leaf of a model with adapters is cut, theirs among them; None: every device has all of it."""
    found = sharding.cut(leaf.removesuffix(UP))
    return found if found is None or not leaf.endswith(UP) else Cut(_FEATURES, found.rows)


def local_ends(sharding: Sharding, target: str) -> tuple[int, ...]:
    """Where the parts of a weight end in what one device holds of it: `part_ends` of its own features."""
    cut = sharding.cut(target)
    if cut is None:
        return part_ends(sharding.config, target)
    if target == "qkv":
        return part_ends(sharding.local, target)
    width = cut.rows.shape[1]
    return (width // 2, width) if target == "gate_up" else (width,)
