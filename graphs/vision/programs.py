"""All programs and leaves of a tower, of any kind."""

from types import ModuleType

import jax.numpy as jnp

from xla_engine.graphs.inventory import Program
from xla_engine.graphs.vision import deep_encoder, gemma4, glm_ocr, qwen_vl, siglip
from xla_engine.graphs.vision.config import DeepEncoderConfig, PatchConfig, TowerConfig
from xla_engine.graphs.vision.layers import Shapes, layer_programs


def leaf_shapes(c: TowerConfig) -> Shapes:
    """The shapes of a tower's leaves by name."""
    if isinstance(c, DeepEncoderConfig):
        return deep_encoder.leaf_shapes(c)
    if isinstance(c, PatchConfig):
        return _ends(c).leaf_shapes(c)
    return siglip.leaf_shapes(c)


def tower_programs(c: TowerConfig, dtype: jnp.dtype, rows: int, part: int) -> list[Program]:
    """The programs for pictures of at most `rows` patches, of which layers take `part` a call."""
    if isinstance(c, DeepEncoderConfig):
        return deep_encoder.tower_programs(c, dtype, rows, part)
    if isinstance(c, PatchConfig):
        first, *rest = _ends(c).end_programs(c, dtype, rows, part)
    else:
        first, *rest = siglip.end_programs(c, dtype)
    return [first, *layer_programs(c, dtype, rows, part), *rest]


def _ends(c: PatchConfig) -> ModuleType:
    """The module of the programs before and behind the layers."""
    if c.pooled is not None:
        return gemma4
    return glm_ocr if c.gated else qwen_vl
