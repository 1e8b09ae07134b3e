"""The arrays of a model: their names in checkpoints, their order in graphs, and how each is packed and sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import Products, Role
from xla_engine.graphs.lora.form import LoraForm
from xla_engine.graphs.ops.coded import CodedForm
from xla_engine.graphs.ops.int8 import SUFFIX, groups_of, quantize_weight
from xla_engine.graphs.sharding import Cut, Sharding

Param = nnx.Param[jax.Array]
Path = tuple[str | int, ...]  # of a parameter in a `Decoder`: attribute names and layer indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The static part of one array.

    shape: in the whole model. dtype: as graphs receive it.
    form: the encoding, if the weight keeps that of its file; None: plain values.
    cut: the shard that each device holds; None: every device has all of it.
    role: "plain" leaves stay as in the checkpoint; those of others are packed by `Products.pack`, a "scale" of an int8
        weight with it; an "adapter" holds matrices of LoRA adapters.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    cut: Cut | None = None
    role: Role = "plain"
    form: CodedForm | None = None

    def on_devices(self, count: int = 1) -> jax.ShapeDtypeStruct:
        """Shape and dtype of what `count` devices together hold of it."""
        if self.form is not None:
            devices = 1 if self.cut is None else count
            return jax.ShapeDtypeStruct((devices * self.form.nbytes,), self.dtype)
        shape = self.shape if self.cut is None else self.cut.shape(self.shape, count)
        return jax.ShapeDtypeStruct(shape, self.dtype)


@dataclass(frozen=True, slots=True)
class LeafMaker:
    """Makes the parameters of modules, without values.

    dtype: of matrices; vectors are float32. plain: dtype of small matrices, which are never quantised.
    """

    sharding: Sharding
    dtype: jnp.dtype
    plain: jnp.dtype
    lora: LoraForm | None = None

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


class Leaves(Mapping[str, Leaf]):
    """The leaves of a model by name, in the order in which graphs receive them: by name, with layers by number.

    names: of all leaves. paths: of each in the `Decoder`.
    sources: the names that a checkpoint must have. adapters: the names of leaves for LoRA adapters.
    """

    def __init__(
        self, config: ModelConfig, parameters: Iterable[tuple[Any, Any]], products: Products | None
    ) -> None:
        """parameters: made by a `LeafMaker`, with their paths. products: None is XLA's."""
        found = {leaf_name(config, path): (path, each.get_metadata("leaf")) for path, each in parameters}
        self.names = tuple(sorted(found, key=_place))
        self.paths = tuple(found[name][0] for name in self.names)
        self._leaves: dict[str, Leaf] = {name: found[name][1] for name in self.names}
        self._products = products
        self.sources = self._of("plain", "linear", "head")
        self.adapters = self._of("adapter")

    def __getitem__(self, name: str) -> Leaf:
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def on_device(self) -> list[jax.ShapeDtypeStruct]:
        """The shape and dtype of each leaf on one device, as graphs receive them."""
        return [leaf.on_devices() for leaf in self._leaves.values()]

    def check_names(self, weights: Mapping[str, Any]) -> None:
        """Raise KeyError unless `weights` has exactly the names in `sources`."""
        if set(weights) != set(self.sources):
            raise KeyError(f"weights do not match the model: {sorted(set(weights) ^ set(self.sources))}")

    def stored(self, name: str, values: np.ndarray) -> dict[str, np.ndarray]:
        """Quantise and pack the leaf `name` of a checkpoint; returns the arrays that the model keeps, by name."""
        leaf = self._leaves[name]
        if leaf.dtype == jnp.int8:
            values, scale = quantize_weight(values)
            scale = self._packed(scale, "plain" if leaf.role == "plain" else "scale")
            return {name: self._packed(values, leaf.role), name + SUFFIX: scale}
        return {name: self._packed(values, leaf.role)}

    def _packed(self, values: np.ndarray, role: Role) -> np.ndarray:
        return values if self._products is None else self._products.pack(values, role)

    def _of(self, *roles: Role) -> tuple[str, ...]:
        return tuple(name for name, leaf in self._leaves.items() if leaf.role in roles)


def leaf_name(config: ModelConfig, path: Path) -> str:
    """The name of the parameter at `path` in checkpoints and stores."""
    match path:
        case "layers", int(index), "mixer", *inside:
            place = f"layers.{index}." + ("delta." if config.is_linear(index) else "")
        case "layers", int(index), "mlp", *inside:
            place = f"layers.{index}." + ("" if config.experts_of(index) is None else "experts.")
        case "layers", int(index), *inside:
            place = f"layers.{index}."
        case _:
            place, inside = "", [*path]
    return place + "_".join(str(part) for part in inside if part != "weight")


def _place(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
