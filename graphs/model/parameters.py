"""The parameters of modules, each with its leaf."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from xla_engine.graphs.linear.products import Role
from xla_engine.graphs.lora.form import LoraForm
from xla_engine.graphs.model.leaves import Leaf
from xla_engine.graphs.ops.int8 import groups_of
from xla_engine.graphs.sharding import Cut, Sharding

Param = nnx.Param[jax.Array]


@dataclass(frozen=True, slots=True)
class LeafMaker:
    """Makes the parameters of modules, without values.

    dtype: of matrices; vectors are float32. plain: dtype of small matrices, which are never quantised.
    """

    sharding: Sharding
    dtype: jnp.dtype
    plain: jnp.dtype
    lora: LoraForm | None = None

    def of_layer(self, index: int) -> LeafMaker:
        """For a layer, whose sizes are then those of the sharding's configuration."""
        return replace(self, sharding=replace(self.sharding, config=self.sharding.config.layer(index)))

    @property
    def unquantized(self) -> LeafMaker:
        return replace(self, dtype=self.plain)

    def vector(self, size: int, cut: Cut | None = None) -> Param:
        return self.parameter(Leaf(shape=(size,), dtype=jnp.dtype(jnp.float32), cut=cut))

    def vectors(self, shape: tuple[int, int], cut: Cut | None) -> Param:
        """Several vectors, flattened into one. cut: the shard of each, along axis 1."""
        return self.vector(prod(shape), None if cut is None else cut.flat(*shape))

    def matrix(self, shape: tuple[int, ...], cut: Cut | None = None, role: Role = "plain") -> Param:
        return self.parameter(Leaf(shape=shape, dtype=self.dtype, cut=cut, role=role))

    def scales(self, shape: tuple[int, ...], cut: Cut | None) -> Param | None:
        """The scales of a matrix of this shape; None unless it is int8. cut: the matrix's."""
        if self.dtype != jnp.int8:
            return None
        *outer, width = shape
        held = (*outer, groups_of(width))
        return self.parameter(Leaf(shape=held, dtype=jnp.dtype(jnp.bfloat16), cut=cut, role="scale"))

    def parameter(self, leaf: Leaf) -> Param:
        value: Any = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return nnx.Param(value, leaf=leaf)
