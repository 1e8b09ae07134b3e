"""The arrays of a model: their names in checkpoints, their order in graphs, and how each is packed and sharded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.config import CONV, LINEAR, MAMBA, ModelConfig
from xla_engine.graphs.linear.products import Products, Role
from xla_engine.graphs.ops.coded import CodedForm
from xla_engine.graphs.ops.int8 import SUFFIX, quantize_weight
from xla_engine.graphs.sharding import Cut

_MIXERS = {
    LINEAR: "delta.",
    CONV: "conv.",
    MAMBA: "mamba.",
}  # what their names begin with
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


class Leaves(Mapping[str, Leaf]):
    """The leaves of a model by name, in the order in which graphs receive them: by name, with layers by number.

    names: of all leaves. paths: of each in the `Decoder`.
    sources: the names that a checkpoint must have. adapters: the names of leaves for LoRA adapters.
    """

    def __init__(
        self, config: ModelConfig, parameters: Sequence[tuple[Path, Leaf]], products: Products | None
    ) -> None:
        """parameters: their paths and leaves. products: None is XLA's."""
        found = {leaf_name(config, path): (path, leaf) for path, leaf in parameters}
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
            place = f"layers.{index}." + _MIXERS.get(config.layer_type(index), "")
        case "layers", int(index), "beside", *inside:
            place = f"layers.{index}.mamba."
        case "layers", int(index), "mlp", *inside:
            place = f"layers.{index}." + ("" if config.experts_of(index) is None else "experts.")
        case "layers", int(index), *inside:
            place = f"layers.{index}."
        case _:
            place, inside = "", [*path]
    return place + "_".join(str(part) for part in inside if part != "weight")


def _place(name: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
