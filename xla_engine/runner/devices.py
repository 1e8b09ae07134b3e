"""The devices that an engine runs on, and how its arrays lie on them.

On one device nothing here does anything. On several, programs run under `jax.shard_map` on a mesh of one axis. An
array of which each device holds a part is cut along the one axis that is longer in the whole than on a device; all
others are on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xla_engine.errors import ConfigError
from xla_engine.graphs.inventory import Program
from xla_engine.graphs.linear.coded import CodedForm
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.sharding import AXIS
from xla_engine.model_loader.weights import StoredWeights, read_rows
from xla_engine.runner.memory import weights_bytes
from xla_engine.runner.programs import READ, READ_BLOCKS
from xla_engine.utils.startup import StartupProgress, StartupStep

READS = (READ, READ_BLOCKS)  # programs that return what slots hold
_ANYWHERE = PartitionSpec()


class Devices:
    """`count` devices as one; None: a single one, without a mesh. Raises ConfigError where there are fewer."""

    def __init__(self, count: int | None) -> None:
        self._mesh = None if count is None else Mesh(np.array(_first(count)), (AXIS,))
        self._everywhere = None if self._mesh is None else NamedSharding(self._mesh, _ANYWHERE)

    @property
    def is_one(self) -> bool:
        """Whether programs know no mesh."""
        return self._mesh is None

    def put(self, tree: Any) -> Any:
        """Host arrays as programs want them, on every device."""
        return jax.device_put(tree) if self._everywhere is None else jax.device_put(tree, self._everywhere)

    def zeros(self, local: Any, whole: Any) -> Any:
        """Arrays of zeros. local, whole: their abstract values on a device and altogether."""
        return jax.tree.map(
            lambda leaf, sharding: jnp.zeros(leaf.shape, leaf.dtype, device=sharding),
            whole,
            self._shardings(local, whole),
        )

    def load(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray], progress: StartupProgress
    ) -> list[jax.Array]:
        """Bring the leaves to the devices one by one, so that the host holds one at a time, or a device's part."""
        placed: dict[str, jax.Array] = {}
        spec.leaves.check_names(weights)
        total, done = weights_bytes(spec), 0
        for name in spec.leaves.sources:
            for part, array in self.leaf(spec, weights, name).items():
                placed[part] = jax.block_until_ready(array)
                done += array.addressable_shards[0].data.nbytes
            progress(StartupStep("loading weights", done, total))
        placed |= self._room_for_adapters(spec)
        return [placed[name] for name in spec.leaves]

    def leaf(self, spec: ModelSpec, weights: Mapping[str, np.ndarray], name: str) -> dict[str, jax.Array]:
        """What the model keeps of the leaf `name` of a checkpoint, by name. A device's part is read by itself."""
        leaf = spec.leaves[name]
        if leaf.form is not None:
            return {name: self._coded(spec, weights, name, leaf.form)}
        if self._mesh is None or leaf.cut is None:
            return {part: self.put(array) for part, array in spec.leaves.stored(name, weights[name]).items()}
        shape, parts = leaf.on_devices().shape, dict[str, list[jax.Array]]()
        for place, device in enumerate(self._mesh.devices.flat):
            rows = read_rows(weights, name, leaf.cut.flat_rows(place, leaf.shape))
            stored = spec.leaves.stored(name, rows.reshape(shape))
            for part, array in stored.items():
                parts.setdefault(part, []).append(jax.block_until_ready(jax.device_put(array, device)))
        return {part: self._joined(spec, part, arrays) for part, arrays in parts.items()}

    def _coded(
        self, spec: ModelSpec, weights: Mapping[str, np.ndarray], name: str, form: CodedForm
    ) -> jax.Array:
        """The leaf as its file has it. A device's part is read by itself."""
        assert isinstance(weights, StoredWeights)
        leaf = spec.leaves[name]
        if self._mesh is None or leaf.cut is None:
            whole: jax.Array = self.put(weights.coded(name, form))
            return whole
        arrays = [
            jax.block_until_ready(jax.device_put(weights.coded(name, form, rows), device))
            for rows, device in zip(leaf.cut.rows, self._mesh.devices.flat, strict=True)
        ]
        return self._joined(spec, name, arrays)

    def adapter(self, spec: ModelSpec, leaves: Mapping[str, np.ndarray]) -> list[jax.Array]:
        """What one adapter has of each of `spec.leaves.adapters`, each device its part. leaves: of all together."""
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
        """The leaves of adapters before one is loaded."""
        mine, every = (
            {name: spec.leaves[name].on_devices(devices) for name in spec.leaves.adapters}
            for devices in (1, 1 if self._mesh is None else self._mesh.size)
        )
        found: dict[str, jax.Array] = self.zeros(mine, every)
        return found

    def programs(self, local: Sequence[Program], whole: Sequence[Program]) -> Iterator[Program]:
        """Programs on a device's arrays as programs on the whole arrays, whose abstract values `whole` has."""
        for mine, every in zip(local, whole, strict=True):
            given = self._shardings(mine.arguments, every.arguments)
            arguments = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                every.arguments,
                given,
            )
            # What is given for good comes back first, and lies as it did. What is read has the form of what is held.
            first = given[mine.donate[0]] if mine.donate else None
            if mine.name in READS:
                first = self._read(mine, every)
            function = self._on_mesh(mine.function, _specs(given), None if first is None else _specs(first))
            yield replace(every, function=function, arguments=arguments)

    def pieces(self, local: Sequence[Program], whole: Sequence[Program]) -> Callable[..., Any]:
        """Brings what was read out of slots or blocks back to the devices; for these programs."""
        for mine, every in zip(local, whole, strict=True):
            if mine.name in READS:
                return functools.partial(jax.device_put, device=self._read(mine, every))
        return self.put

    def _read(self, local: Program, whole: Program) -> Any:
        """How the first result of a program lies that reads out of slots or blocks."""
        (mine, _), (every, _) = (jax.eval_shape(each.function, *each.arguments) for each in (local, whole))
        return self._shardings(mine, every)

    def _on_mesh(self, function: Callable[..., Any], given: Any, first: Any) -> Callable[..., Any]:
        """first: of its first result; None: it has one result, on every device."""
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
        """A sharding for each array; None on one device."""

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
        return jax.make_array_from_single_device_arrays(leaf.on_devices(len(parts)).shape, sharding, parts)


def _specs(shardings: Any) -> Any:
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def _first(count: int) -> Sequence[Any]:
    there = jax.devices()
    if len(there) >= count:
        return there[:count]
    remedy = f"use at most {len(there)}"
    if there[0].platform == "cpu":
        remedy = (
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={count}, or call jax.config.update("
            f"'jax_num_cpu_devices', {count}), before jax is used"
        )
    raise ConfigError(
        f"tensor_parallel_size {count} needs as many devices, and jax has {len(there)}: {remedy}"
    )


def start_profile(directory: str | Path) -> None:
    """Begin to write down what devices and host do. Raises ConfigError where that was begun before."""
    try:
        jax.profiler.start_trace(str(directory))
    except RuntimeError as error:
        raise ConfigError(f"{error} Stop the profile that runs first") from error


def stop_profile() -> None:
    """Write the profile. Raises ConfigError where none was begun."""
    try:
        jax.profiler.stop_trace()
    except RuntimeError as error:
        raise ConfigError(f"{error} Start a profile first") from error
