"""The weights on the device; adapters and the model's own weights may change between two steps."""

from collections.abc import Mapping

import jax
import numpy as np

from xla_engine.graphs.inventory import Inventory
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.runner import memory
from xla_engine.runner.devices import Devices
from xla_engine.runner.weights.adapters import no_adapter, write_adapter


class HeldWeights:
    """Owns the leaves of a model on its devices. Steps in flight keep the leaves with which they were started.

    leaves: in the order of `ModelSpec.leaves`; programs take this list.
    """

    def __init__(
        self, spec: ModelSpec, devices: Devices, inventory: Inventory, leaves: list[jax.Array]
    ) -> None:
        self.leaves = leaves
        self._spec, self._devices, self._inventory = spec, devices, inventory

    @property
    def nbytes(self) -> int:
        return memory.weights_bytes(self._spec)

    def write_adapter(self, slot: int, leaves: Mapping[str, np.ndarray] | None) -> None:
        """Put an adapter into a slot, from 1, for the steps that start from now on; None clears it."""
        new = self._devices.adapter(self._spec, no_adapter(self._spec) if leaves is None else leaves)
        place = self._devices.put(np.int32(slot - 1))
        write_adapter(self._inventory, self._spec, self.leaves, place, new)

    def replace(self, weights: Mapping[str, np.ndarray]) -> None:
        """Replace leaves by those of a checkpoint, by name. Nothing may be in flight.

        Old and new ones are on the device together for a while. If one cannot be loaded, nothing changes.
        """
        fresh: dict[str, jax.Array] = {}
        for name in weights:
            fresh |= self._devices.leaf(self._spec, weights, name)
        jax.block_until_ready(fresh)
        for name, leaf in fresh.items():
            place = self._spec.leaves.names.index(name)
            self.leaves[place].delete()
            self.leaves[place] = leaf
