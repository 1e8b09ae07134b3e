"""The static part of a model: all that a start needs to know of it before a graph is traced.

flax.nnx describes the parameters, in `graphs.model.decoder` and `graphs.model.encoder`. A graph receives them as a
flat list of leaves and merges them while it is traced (`merge`), because passing a Module or State through a jit
boundary costs milliseconds per call. Importing flax takes more than half as long as importing jax, so a start that
loads its programs does without: it reads the leaves that an earlier one kept (`KEPT_LEAVES`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

import jax
import jax.numpy as jnp

from xla_engine.graphs.attention.backend import Attention as AttentionBackend
from xla_engine.graphs.attention.xla import XlaAttention
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.linear.products import LEAST, Products
from xla_engine.graphs.lora.form import LoraForm
from xla_engine.graphs.model.leaves import Leaf, Leaves, Path, leaf_name
from xla_engine.graphs.ops.coded import Order, StoredKinds
from xla_engine.graphs.recurrent.native import has_native_rule
from xla_engine.graphs.sharding import Sharding

if TYPE_CHECKING:
    from xla_engine.graphs.model.decoder import Decoder
    from xla_engine.graphs.model.encoder import Encoder

_XLA_ATTENTION = XlaAttention()


class KeptLeaves(Protocol):
    """Keeps the leaves of specs between processes, by `ModelSpec.made_of` and the code."""

    def load(self, spec: ModelSpec) -> Sequence[tuple[Path, Leaf]] | None:
        """The paths and leaves of an earlier process; None if there are none."""
        ...

    def save(self, spec: ModelSpec, found: Sequence[tuple[Path, Leaf]]) -> None: ...


# Specs take their leaves from here if it has them, and put them there if not; None: they make their modules.
KEPT_LEAVES: ContextVar[KeptLeaves | None] = ContextVar("kept_leaves", default=None)


class ModelSpec:
    """The static part of a model: its leaves, how a graph merges them, and its backends."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        attention: AttentionBackend = _XLA_ATTENTION,
        products: Products | None = None,
        *,
        quantized: bool = False,
        devices: int | None = None,
        lora: LoraForm | None = None,
        stored: StoredKinds | None = None,
        order: Order = "pairs",
    ) -> None:
        """products: None takes XLA's, in the operand order that suits each graph.
        quantized: whether matrices are int8.
        devices: the number of devices of a mesh on which the graphs run; None: one, without a mesh.
        lora: room for LoRA adapters.
        stored: how a file stores weights that keep its encoding; needs the C++ products.
        order: of their codes: products take rows in bf16 ("pairs") or in eight bits ("fours")."""
        # The arguments, from which everything else follows.
        self.made_of = (config, dtype, attention, products, quantized, devices, lora, stored, order)
        self.config = config
        task, least = (1, LEAST) if products is None else (products.task, 1)
        self.sharding = Sharding(config, devices, task, least)
        self.dtype, self.quantized = jnp.dtype(dtype), quantized
        self.attention = attention
        self.products = products
        # The instruction set of the C++ kernels, if any are used.
        self.isa = attention.isa or (None if products is None else products.isa)
        self.lora = lora
        self._stored, self._order = stored, order
        kept = KEPT_LEAVES.get()
        found = None if kept is None else kept.load(self)
        if found is None:
            found = self._modules[1]
            if kept is not None:
                kept.save(self, found)
        self.leaves = Leaves(config, found, products)

    @property
    def local(self) -> ModelConfig:
        """The configuration with the heads of one device."""
        return self.sharding.local

    @property
    def native_state(self) -> str | None:
        """The instruction set of the C++ kernels for recurrent layers; None if attention is not in C++ or the heads'
        sizes do not fit."""
        form = self.config.recurrent
        return None if form is None or not has_native_rule(form) else self.attention.isa

    def merge(self, leaves: list[jax.Array]) -> Decoder:
        """Rebuild the decoder around traced leaves; call inside a graph only."""
        from xla_engine.graphs.model.decoder import Decoder

        model = self._merged(leaves)
        assert isinstance(model, Decoder)
        return model

    def merge_encoder(self, leaves: list[jax.Array]) -> Encoder:
        """As `merge`, of a model that is an encoder."""
        from xla_engine.graphs.model.encoder import Encoder

        model = self._merged(leaves)
        assert isinstance(model, Encoder)
        return model

    def _merged(self, leaves: list[jax.Array]) -> Any:
        from flax import nnx

        state = nnx.from_flat_state(list(zip(self.leaves.paths, leaves, strict=True)))
        return nnx.merge(self._modules[0], state)

    @functools.cached_property
    def _modules(self) -> tuple[Any, tuple[tuple[Path, Leaf], ...]]:
        """The model's modules, without values, as flax's graph definition; and their leaves."""
        matrices = jnp.dtype(jnp.int8) if self.quantized else self.dtype
        stored = frozenset((self._stored or {}).items())
        # Without a mesh nothing is cut, so products and their tasks do not matter.
        sharding = Sharding(self.config) if self.sharding.devices is None else self.sharding
        return _modules_of(sharding, matrices, self.dtype, self.lora, stored, self._order)


@functools.lru_cache(4)
def _modules_of(
    sharding: Sharding,
    matrices: jnp.dtype,
    dtype: jnp.dtype,
    lora: LoraForm | None,
    stored: frozenset[tuple[str, tuple[tuple[str, int], ...]]],
    order: Order,
) -> tuple[Any, tuple[tuple[Path, Leaf], ...]]:
    """As `ModelSpec._modules`, from all that they depend on: specs that differ in their backends share them.

    matrices: the dtype of matrices; the other arguments as in `ModelSpec`, with the items of `stored`.
    """
    from flax import nnx

    from xla_engine.graphs.model.decoder import Decoder
    from xla_engine.graphs.model.encoder import Encoder
    from xla_engine.graphs.model.parameters import LeafMaker
    from xla_engine.graphs.model.sublayers import Linear, RoutedMlp

    config, kinds = sharding.config, dict(stored)
    make = LeafMaker(sharding, matrices, dtype, lora)
    model = Decoder(make, dtype) if config.encoder is None else Encoder(make)
    for path, module in nnx.iter_modules(model) if stored else ():
        rows = kinds.get(leaf_name(config, (*cast("Path", path), "weight")))
        if isinstance(module, Linear) and rows is not None:
            module.keep(make, rows, order)
        elif isinstance(module, RoutedMlp):
            gate_up, down = (
                kinds.get(leaf_name(config, (*cast("Path", path), part)), ()) for part in ("gate_up", "down")
            )
            module.keep(make, gate_up, down, order)
    graph, state = nnx.split(model)
    parameters = cast("list[tuple[Path, Any]]", nnx.to_flat_state(state))
    return graph, tuple((path, each.get_metadata("leaf")) for path, each in parameters)


@functools.lru_cache(4)
def parameter_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the leaves by name, in the order in which graphs receive them."""
    spec = ModelSpec(config, jnp.dtype(jnp.bfloat16))
    return MappingProxyType({name: leaf.shape for name, leaf in spec.leaves.items()})
