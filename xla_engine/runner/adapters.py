"""Adapters on the device: room for them, and the program that writes one between two steps."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import Program
from xla_engine.graphs.linear.products import Products
from xla_engine.graphs.lora.form import RANKS, LoraForm, part_ends, target_of
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes

WRITE_ADAPTER = "write_adapter"
_WHOLE_RANK, _WHOLE_WIDTH = 4, 16  # of the C++ operation


def lora_form(
    config: EngineConfig, model: ModelConfig, dtype: jnp.dtype, products: Products | None
) -> LoraForm | None:
    """The room for adapters that an engine asks for; None: none. Raises ConfigError where it cannot have any."""
    if not config.enable_lora:
        return None
    if not model.gated_mlp:
        raise ConfigError(
            "enable_lora is for models whose MLP has a gate. Merge the adapter into the checkpoint with PEFT's "
            "merge_and_unload()"
        )
    if model.latent is not None:
        raise ConfigError(
            "enable_lora is for models without latent attention. Merge the adapter into the checkpoint with PEFT's "
            "merge_and_unload()"
        )
    if model.recurrent is not None and config.tensor_parallel_size > 1:
        raise ConfigError(
            "enable_lora with recurrent layers is for one device. Set tensor_parallel_size to 1, or merge the adapter "
            "into the checkpoint with PEFT's merge_and_unload()"
        )
    packed = products is not None
    form = LoraForm(
        slots=config.max_loras,
        rank=-(-config.max_lora_rank // _WHOLE_RANK) * _WHOLE_RANK,
        dtype=jnp.dtype(jnp.bfloat16) if packed else dtype,
        packed=packed,
    )
    widths = [size for leaf, shape in parameter_shapes(model).items() for size in _widths(model, leaf, shape)]
    if config.tensor_parallel_size > 1:
        # A device has whole heads; its share of all else is in larger units.
        widths += [model.layer(index).head_dim for index in range(model.num_hidden_layers)]
    if packed and any(size % _WHOLE_WIDTH for size in widths):
        raise ConfigError(
            "enable_lora: widths of this model are no multiples of 16; set linear_backend 'xla'"
        )
    return form


def _widths(model: ModelConfig, leaf: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The widths of the matrices that adapters have for a leaf."""
    if (target := target_of(leaf)) is None:
        return ()
    return (shape[1], *part_ends(model.layer(int(leaf.split(".")[1])), target))


def writing(spec: ModelSpec, weights: list[Any]) -> list[Program]:
    """The program that writes one adapter, where there is room for any. Of the weights only the shapes matter."""
    if spec.lora is None:
        return []

    def write(leaves: list[jax.Array], slot: jax.Array, new: list[jax.Array]) -> tuple[list[jax.Array]]:
        return ([every.at[slot].set(one) for every, one in zip(leaves, new, strict=True)],)

    every = (weights[spec.leaves.names.index(name)] for name in spec.leaves.adapters)
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in every]
    new = [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return [Program(name=WRITE_ADAPTER, function=write, arguments=(leaves, scalar, new), donate=(0,))]


def no_adapter(spec: ModelSpec) -> dict[str, np.ndarray]:
    """What clears a slot."""
    return {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in _one(spec).items()}


def random_adapter(spec: ModelSpec) -> dict[str, np.ndarray]:
    """An adapter as large as there is room for, to see what it does to bits."""
    found = {}
    for name, leaf in _one(spec).items():
        if name.endswith(RANKS):
            assert spec.lora is not None
            found[name] = np.full(leaf.shape, spec.lora.rank, leaf.dtype)
            continue
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        values = draw.standard_normal(leaf.shape, dtype=np.float32)
        found[name] = (values * np.float32(0.05)).astype(leaf.dtype)
    return found


def _one(spec: ModelSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """What one adapter has of each leaf, for all devices together."""
    every = {name: spec.leaves[name] for name in spec.leaves.adapters}
    return {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in every.items()}
