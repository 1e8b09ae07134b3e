"""Model families as data: one `Family` per architecture, found by the name that config.json gives."""

from __future__ import annotations

from xla_engine.families.family import Family, Source, tensor_sources
from xla_engine.families.llama import LLAMA

__all__ = ["FAMILIES", "LLAMA", "Family", "Source", "tensor_sources"]

FAMILIES = {family.architecture: family for family in (LLAMA,)}
