"""All programs and leaves of a tower, of any kind."""

import jax.numpy as jnp

from xla_engine.graphs.inventory import Program
from xla_engine.graphs.vision import glm_ocr, qwen_vl, siglip
from xla_engine.graphs.vision.config import PatchConfig
from xla_engine.graphs.vision.layers import Config, Shapes, layer_programs


def leaf_shapes(c: Config) -> Shapes:
    """The shapes of a tower's leaves by name."""
    if isinstance(c, PatchConfig):
        return glm_ocr.leaf_shapes(c) if c.gated else qwen_vl.leaf_shapes(c)
    return siglip.leaf_shapes(c)


def tower_programs(c: Config, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs for pictures of at most `rows` patches, of which layers take `part` a call."""
    if isinstance(c, PatchConfig) and c.gated:
        first, *rest = glm_ocr.end_programs(c, dtype, rows, part)
    elif isinstance(c, PatchConfig):
        first, *rest = qwen_vl.end_programs(c, dtype, rows, part)
    else:
        first, *rest = siglip.end_programs(c, dtype)
    return [first, *layer_programs(c, dtype, rows, part), *rest]
