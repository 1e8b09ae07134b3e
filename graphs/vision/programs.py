"""All programs and leaves of a tower, of either kind."""

import jax.numpy as jnp

from xla_engine.graphs.inventory import Program
from xla_engine.graphs.vision import patches, tower
from xla_engine.graphs.vision.config import PatchConfig
from xla_engine.graphs.vision.layers import Config, Shapes, layer_programs


def leaf_shapes(c: Config) -> Shapes:
    """The shapes of a tower's leaves by name."""
    return patches.patch_shapes(c) if isinstance(c, PatchConfig) else tower.vision_shapes(c)


def tower_programs(c: Config, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs for pictures of at most `rows` patches, of which layers take `part` a call."""
    if isinstance(c, PatchConfig):
        first, *rest = patches.patch_end_programs(c, dtype, rows, part)
    else:
        first, *rest = tower.end_programs(c, dtype)
    return [first, *layer_programs(c, dtype, rows, part), *rest]
