"""The devices of an engine, and how its arrays are sharded over them.

On several devices, programs run under `jax.shard_map` on a mesh with one axis. A sharded array is split along the one
axis whose size differs between the whole and a device; all other arrays are replicated. On one device this module
only moves arrays there.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xla_engine.errors import ConfigError
from xla_engine.graphs import target
from xla_engine.graphs.inventory import Inventory, Program
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.sharding import AXIS
from xla_engine.model_loader.weights import StoredWeights, read_rows
from xla_engine.runner.adapters import WRITE_ADAPTER, no_adapter
from xla_engine.runner.jax_settings import with_own_settings
from xla_engine.runner.memory import weights_bytes
from xla_engine.runner.native_library.build import packer
from xla_engine.runner.programs import READ, READ_BLOCKS, READ_STATE
from xla_engine.utils.resident import HugePages
from xla_engine.utils.startup import StartupProgress, StartupStep

# Programs that return the content of slots or blocks: keys and values, and recurrent states.
READS_KEYS, READS_STATES = (READ, READ_BLOCKS), (READ_STATE,)
_ANYWHERE = PartitionSpec()
_LOADERS = 2  # threads; more would read faster, and hold more of the weights twice


@dataclass(frozen=True, slots=True)
class HostShards:
    """A copy of what this host's devices have of an array that is sharded over several hosts.

    shape: of the whole array. shards: in the order of this host's devices.
    """

    shape: tuple[int, ...]
    shards: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.shards)


def to_host(array: Any) -> np.ndarray | HostShards:
    """Copy an array to the host, or this host's part of it. `Devices.pieces` copies it back."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return HostShards(array.shape, tuple(np.asarray(each.data) for each in array.addressable_shards))


class Devices:
    """A mesh of `count` devices; None: a single device without a mesh. Raises ConfigError if there are fewer.

    If `jax.distributed` has joined several hosts, each of them has as many of the devices.
    """

    def __init__(self, count: int | None) -> None:
        self._mesh = None if count is None else Mesh(np.array(_first(count)), (AXIS,))
        self._everywhere = None if self._mesh is None else NamedSharding(self._mesh, _ANYWHERE)
        self._pages = HugePages() if target.platform() == "cpu" else None

    @property
    def is_one(self) -> bool:
        """Whether there is no mesh."""
        return self._mesh is None

    @property
    def read_host_memory(self) -> bool:
        """Whether the host's memory is the device's: a program takes host arrays as they are."""
        return self.is_one and target.platform() == "cpu"

    def put(self, tree: Any) -> Any:
        """Copy host arrays to every device."""
        if self._everywhere is None:
            return jax.device_put(tree)
        if jax.process_count() == 1:
            return jax.device_put(tree, self._everywhere)
        return jax.tree.map(self._replicated, tree)

    def _replicated(self, array: Any) -> jax.Array:
        """A host array on every device of all hosts, which all have the same; jax itself would compare them."""
        assert self._mesh is not None and self._everywhere is not None
        if isinstance(array, jax.Array) and not array.is_fully_addressable:  # it is there
            return array
        parts = [jax.device_put(array, device) for device in self._mesh.local_devices]
        return jax.make_array_from_single_device_arrays(np.shape(array), self._everywhere, parts)

    def zeros(self, local: Any, whole: Any) -> Any:
        """Arrays of zeros. local, whole: the abstract arrays on one device, and on all together."""
        return jax.tree.map(
            lambda leaf, sharding: jnp.zeros(leaf.shape, leaf.dtype, device=sharding),
            whole,
            self._shardings(local, whole),
        )

    def load(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray], progress: StartupProgress
    ) -> list[jax.Array]:
        """Load the leaves to the devices, one in each of a few threads, so that the host holds only so many leaves,
        or shards, at a time."""
        placed: dict[str, jax.Array] = {}
        spec.leaves.check_names(weights)
        total, done = weights_bytes(spec), 0

        @with_own_settings  # of its thread
        def ready(name: str) -> dict[str, jax.Array]:
            loaded: dict[str, jax.Array] = jax.block_until_ready(self.leaf(spec, weights, name))
            return loaded

        with ThreadPoolExecutor(_LOADERS, thread_name_prefix="load") as pool:
            for leaf in pool.map(ready, spec.leaves.sources):
                placed |= leaf
                done += sum(array.addressable_shards[0].data.nbytes for array in leaf.values())
                progress(StartupStep("loading weights", done, total))
        if self._pages is not None:
            self._pages.give_back()
        placed |= self._room_for_adapters(spec)
        return [placed[name] for name in spec.leaves]

    def leaf(self, spec: ModelSpec, weights: Mapping[str, np.ndarray], name: str) -> dict[str, jax.Array]:
        """Load the leaf `name` of a checkpoint; returns the model's arrays by name. Shards are read separately."""
        if self._mesh is None or spec.leaves[name].cut is None:
            whole = self._stored(spec, weights, name)
            return {part: self.put(array) for part, array in whole.items()}
        parts: dict[str, list[jax.Array]] = {}
        for place, device in enumerate(self._mesh.devices.flat):
            if device.process_index != jax.process_index():
                continue
            for part, array in self._stored(spec, weights, name, place).items():
                parts.setdefault(part, []).append(jax.block_until_ready(jax.device_put(array, device)))
        return {part: self._joined(spec, part, arrays) for part, arrays in parts.items()}

    def _stored(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray], name: str, place: int | None = None
    ) -> dict[str, np.ndarray]:
        """Read a leaf of a checkpoint, or the shard of the device at `place`: the model's arrays by name, in huge
        pages on a CPU."""
        leaf, cut = spec.leaves[name], None if place is None else spec.leaves[name].cut
        if leaf.form is not None:
            assert isinstance(weights, StoredWeights)
            assert spec.isa is not None and self._pages is not None  # coded weights are for the C++ products
            rows, room = None if cut is None else cut.rows[place], self._pages.room(leaf.form.nbytes)
            weights.coded(name, leaf.form, packer(spec.isa, leaf.form.order), room, rows)
            return {name: room}
        if cut is None or place is None:
            arrays = spec.leaves.stored(name, weights[name])
        else:
            taken = read_rows(weights, name, cut.flat_rows(place, leaf.shape))
            arrays = spec.leaves.stored(name, taken.reshape(leaf.on_devices().shape))
        if self._pages is None:
            return arrays
        return {part: self._pages.hold(array) for part, array in arrays.items()}

    def adapter(self, spec: ModelSpec, leaves: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """Load one adapter's part of each of `spec.leaves.adapters`, sharded. leaves: unsharded, by name."""
        if self._mesh is None:
            whole: list[jax.Array] = self.put([leaves[name] for name in spec.leaves.adapters])
            return whole
        found = []
        for name in spec.leaves.adapters:
            if (cut := spec.leaves[name].cut) is None:
                found.append(self.put(leaves[name]))
                continue
            assert spec.lora is not None
            sharding = NamedSharding(self._mesh, PartitionSpec(None, AXIS))
            found.append(jax.device_put(spec.lora.stored_rows(leaves[name], cut.rows), sharding))
        return found

    def _room_for_adapters(self, spec: ModelSpec) -> dict[str, jax.Array]:
        """Zeros for the leaves of adapters."""
        mine, every = (
            {name: spec.leaves[name].on_devices(devices) for name in spec.leaves.adapters}
            for devices in (1, 1 if self._mesh is None else self._mesh.size)
        )
        found: dict[str, jax.Array] = self.zeros(mine, every)
        return found

    def programs(self, local: Sequence[Program], whole: Sequence[Program]) -> Iterator[Program]:
        """Turn programs on one device's arrays into programs on sharded arrays.

        local, whole: the same programs with the abstract arrays of one device, and of all together.
        """
        for mine, every in zip(local, whole, strict=True):
            given = self._shardings(mine.arguments, every.arguments)
            arguments = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                every.arguments,
                given,
            )
            # The first result of a program is its donated argument, with the same sharding. For programs that read, it
            # is sharded like the cache.
            first = given[mine.donate[0]] if mine.donate else None
            if mine.name in (*READS_KEYS, *READS_STATES):
                first = self._read(mine, every)
            function = self._on_mesh(mine.function, _specs(given), None if first is None else _specs(first))
            yield replace(every, function=function, arguments=arguments, isa=None)

    def pieces(
        self, local: Sequence[Program], whole: Sequence[Program], reads: Sequence[str]
    ) -> Callable[..., Any]:
        """The function that copies the content of slots or blocks, as those of these programs with a name in `reads`
        read it, back to the devices."""
        for mine, every in zip(local, whole, strict=True):
            if mine.name in reads:
                return functools.partial(_put_pieces, shardings=self._read(mine, every))
        return self.put

    def _read(self, local: Program, whole: Program) -> Any:
        """The shardings of the first result of a program that reads slots or blocks."""
        mine, every = (jax.eval_shape(each.function, *each.arguments)[0] for each in (local, whole))
        return self._shardings(mine, every)

    def _on_mesh(self, function: Callable[..., Any], given: Any, first: Any) -> Callable[..., Any]:
        """Run a function on the mesh.

        given: the specs of its arguments. first: the specs of its first result; the others are replicated. None: it
        has only one result, which is replicated.
        """
        assert self._mesh is not None
        if first is None:
            return jax.shard_map(
                function, mesh=self._mesh, in_specs=given, out_specs=_ANYWHERE, check_vma=False
            )

        def run(*arguments: Any) -> tuple[Any, tuple[Any, ...]]:
            first, *others = function(*arguments)
            return first, tuple(others)

        on_mesh = jax.shard_map(
            run, mesh=self._mesh, in_specs=given, out_specs=(first, _ANYWHERE), check_vma=False
        )

        def flat(*arguments: Any) -> tuple[Any, ...]:
            first, others = on_mesh(*arguments)
            return first, *others

        return flat

    def _shardings(self, local: Any, whole: Any) -> Any:
        """The sharding of each array; None on one device."""

        def sharding(mine: Any, every: Any) -> NamedSharding | None:
            if self._mesh is None:
                return None
            cut = [AXIS if a != b else None for a, b in zip(mine.shape, every.shape, strict=True)]
            return NamedSharding(self._mesh, PartitionSpec(*cut) if any(cut) else _ANYWHERE)

        return jax.tree.map(sharding, local, whole)

    def _joined(self, spec: ModelSpec, name: str, parts: list[jax.Array]) -> jax.Array:
        leaf = spec.leaves[name]
        assert leaf.cut is not None and self._mesh is not None
        sharding = NamedSharding(self._mesh, PartitionSpec(*[None] * leaf.cut.axis, AXIS))
        return jax.make_array_from_single_device_arrays(
            leaf.on_devices(self._mesh.size).shape, sharding, parts
        )


class HeldWeights:
    """Owns the leaves of a model on its devices. Adapters and the model's own weights may change between two steps;
    steps in flight keep the leaves with which they were started.

    leaves: in the order of `ModelSpec.leaves`; programs take this list.
    """

    def __init__(
        self, spec: ModelSpec, devices: Devices, inventory: Inventory, leaves: list[jax.Array]
    ) -> None:
        self.leaves = leaves
        self._spec, self._devices, self._inventory = spec, devices, inventory

    @property
    def nbytes(self) -> int:
        return weights_bytes(self._spec)

    @with_own_settings
    def write_adapter(self, slot: int, leaves: Mapping[str, np.ndarray] | None) -> None:
        """Put an adapter into a slot, from 1, for the steps that start from now on; None clears it."""
        new = self._devices.adapter(self._spec, no_adapter(self._spec) if leaves is None else leaves)
        places = [self._spec.leaves.names.index(name) for name in self._spec.leaves.adapters]
        own, place = [self.leaves[at] for at in places], self._devices.put(np.int32(slot - 1))
        (written,) = self._inventory(WRITE_ADAPTER, own, place, new)
        for at, leaf in zip(places, written, strict=True):
            self.leaves[at] = leaf

    @with_own_settings
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


def _put_pieces(pieces: Any, shardings: Any) -> Any:
    """Copy arrays, or what `to_host` made of them, to where shardings say."""

    def put(piece: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(piece, jax.Array) and not piece.is_fully_addressable:  # it is there
            return piece
        if not isinstance(piece, HostShards):
            return jax.device_put(piece, sharding)
        devices = sharding.mesh.local_devices
        parts = [jax.device_put(part, device) for part, device in zip(piece.shards, devices, strict=True)]
        return jax.make_array_from_single_device_arrays(piece.shape, sharding, parts)

    return jax.tree.map(put, pieces, shardings)


def _specs(shardings: Any) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def _first(count: int) -> Sequence[Any]:
    there, hosts = target.devices(), 1 if target.is_ahead() else jax.process_count()
    by_host = [[each for each in there if hosts == 1 or each.process_index == host] for host in range(hosts)]
    if all(len(each) * hosts >= count for each in by_host):
        return [device for each in by_host for device in each[: count // hosts]]
    if hosts > 1:
        fewest = min(range(hosts), key=lambda host: len(by_host[host]))
        raise ConfigError(
            f"tensor_parallel_size {count} over {hosts} hosts needs {count // hosts} devices of each, and host "
            f"{fewest} has {len(by_host[fewest])}: give at most {hosts * len(by_host[fewest])}"
        )
    who, remedy = "the topology" if target.is_ahead() else "jax", f"use at most {len(there)}"
    if there[0].platform == "cpu":
        remedy = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count}, or call jax.config.update("
            f"'jax_num_cpu_devices', {count}), before jax is used"
        )
    raise ConfigError(
        f"tensor_parallel_size {count} needs as many devices, and {who} has {len(there)}: {remedy}"
    )


def start_profile(directory: str | Path) -> None:
    """Start a profile of devices and host. Raises ConfigError if one is running."""
    try:
        jax.profiler.start_trace(str(directory))
    except RuntimeError as error:
        raise ConfigError(f"{error} Stop the profile that runs first") from error


def stop_profile() -> None:
    """End the profile and write it. Raises ConfigError if none is running."""
    try:
        jax.profiler.stop_trace()
    except RuntimeError as error:
        raise ConfigError(f"{error} Start a profile first") from error
