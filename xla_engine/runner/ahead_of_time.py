"""The programs of an engine for the devices of a topology, which are compiled on any machine and run on none."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from xla_engine.config import EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs import target
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.inventory import COMPILING, Inventory, Program
from xla_engine.graphs.kv_cache.cache import tree_bytes
from xla_engine.graphs.ops.coded import StoredKinds
from xla_engine.graphs.row_state.rows import Tables
from xla_engine.graphs.steps.step import StepState
from xla_engine.runner import memory
from xla_engine.runner.chips import CHIPS, TOPOLOGIES, Chip
from xla_engine.runner.device_state import host_tables, inactive_rows, zeroed_state
from xla_engine.runner.estimates import Cost, read_costs
from xla_engine.runner.jax_settings import own_settings
from xla_engine.runner.planned import PlannedEngine, plan_engine
from xla_engine.runner.programs import make_programs
from xla_engine.runner.roofline import Work, step_work
from xla_engine.utils.startup import StartupProgress, StartupStep, silent

_NEEDS = "compiling for a TPU needs its compiler, libtpu: pip install 'xla-engine[tpu]'"
_THREADS = 2
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledAhead:
    """A program that was compiled for a topology. Sizes in bytes and times in seconds, on each device.

    error: the compiler's message, and then all else is missing.
    fits: whether arguments, scratch memory and all else that the engine holds fit into a device; None if unknown.
    estimated_seconds: one call by the compiler's estimate, if no row needs what a program can skip (sampling, more
        log-probabilities); most_seconds: if rows need all of it. None if the compiler has no estimate.
    roofline_seconds: what reading the weights and keys, or the products, take at the chip's peak rates; for steps.
    lines: the source lines with the largest share of `estimated_seconds`, and their seconds.
    """

    name: str
    error: str | None = None
    compile_seconds: float = 0.0
    argument_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    fits: bool | None = None
    estimated_seconds: float | None = None
    most_seconds: float | None = None
    roofline_seconds: float | None = None
    lines: tuple[tuple[str, float], ...] = ()

    @property
    def roofline_share(self) -> float | None:
        """How much of the estimated time a step at the chip's peak rates would take."""
        if self.roofline_seconds is None or not self.estimated_seconds:
            return None
        return self.roofline_seconds / self.estimated_seconds

    def to_json(self) -> dict[str, Any]:
        if self.error is not None:
            return {"name": self.name, "error": self.error}
        found = {name: value for name, value in asdict(self).items() if name != "error"}
        return {**found, "roofline_share": self.roofline_share}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyReport:
    """All programs of an engine for a topology.

    device: the kind of its devices. devices: how many share the model. memory_bytes: of each, as far as programs may
    use it; None if unknown. weights_bytes, cache_bytes: what each holds.
    """

    topology: str
    device: str
    devices: int
    memory_bytes: int | None
    weights_bytes: int
    cache_bytes: int
    programs: list[CompiledAhead] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(each.error is None and each.fits is not False for each in self.programs)

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "programs"}
        return {**own, "programs": [each.to_json() for each in self.programs]}


def devices_of(topology: str) -> Sequence[Any]:
    """The devices of a topology such as "v5e:2x2". Raises ConfigError."""
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "not installed" in str(error):
            raise ConfigError(_NEEDS) from error
        raise ConfigError(
            f"topology {topology!r} is not known to the compiler: use {', '.join(TOPOLOGIES)}, or one of these kinds "
            f"with more chips, such as v5e:2x4 ({str(error).partition(chr(10))[0]})"
        ) from error
    devices: Sequence[Any] = found
    return devices


def programs_ahead(planned: PlannedEngine, pooling: str | None = None) -> Iterator[Program]:
    """The programs of an engine that is planned for a topology. pooling: as in `make_programs`."""
    spec, config, devices = planned.spec, planned.config, planned.devices
    model, pool, length = planned.model, planned.pool, planned.context_length
    count = spec.sharding.devices or 1
    tables: dict[str, Any] = host_tables(spec, config, pool).take_stale()
    ropes = (model.rotary_tables, length, 2, model.widest_head // 2)
    rope: Any = jax.ShapeDtypeStruct(ropes, jnp.float32)
    rows = jax.eval_shape(lambda: inactive_rows(config, length, pool, rope_offsets=False))

    def make(leaves: list[Any], across: ModelConfig) -> list[Program]:
        cache, saved = jax.eval_shape(lambda: zeroed_state(spec, config, planned.buckets[-1], pool, across))
        state = StepState(leaves, rope, cache, rows, Tables(**tables))
        return make_programs(
            spec, config, planned.buckets, planned.few, state=state, saved=saved, pooling=pooling
        )

    local = make(spec.leaves.on_device(), spec.local)
    if not devices.is_one:
        leaves = [leaf.on_devices(count) for leaf in spec.leaves.values()]
        yield from devices.programs(local, make(leaves, spec.sharding.across))
        return
    sharding = SingleDeviceSharding(target.devices()[0])
    for program in local:
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), program.arguments
        )
        yield replace(program, arguments=arguments)


def compile_ahead(
    topology: str,
    config: EngineConfig,
    model: ModelConfig,
    dtype: str,
    stored: StoredKinds,
    *,
    pooling: str | None = None,
    kinds: tuple[str, ...] = (),
    progress: StartupProgress = silent,
) -> TopologyReport:
    """Compile every program that an engine on the devices of a topology would have. Raises ConfigError.

    dtype, stored: as in `plan_engine`. kinds: how names of the wanted programs begin; none: all are wanted. A program
    that does not compile has its `error`.
    """
    if model.encodes:
        raise ConfigError(
            "--topology is for models with a decoder, and this one is an encoder; leave --topology out"
        )
    devices = devices_of(topology)
    with target.made_for(devices), own_settings():
        planned = plan_engine(config, model, dtype, stored, devices[0])
        programs = [each for each in programs_ahead(planned, pooling) if each.name.startswith(kinds or ("",))]
        work = step_work(planned.spec, planned.config, planned.buckets[-1])
        weights, cache = memory.weights_bytes(planned.spec), _cache_bytes(planned)
    chip = CHIPS.get(devices[0].device_kind)
    one = functools.partial(_compiled, devices, chip, weights + cache, planned.spec.quantized)
    found: dict[str, CompiledAhead] = {}
    progress(StartupStep(COMPILING, 0, len(programs)))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="compile") as pool:
        jobs = [pool.submit(one, program, work.get(program.name)) for program in programs]
        for job in as_completed(jobs):
            found[job.result().name] = job.result()
            progress(StartupStep(COMPILING, len(found), len(programs)))
    return TopologyReport(
        topology=topology,
        device=devices[0].device_kind,
        devices=planned.spec.sharding.devices or 1,
        memory_bytes=None if chip is None else chip.memory,
        weights_bytes=weights,
        cache_bytes=cache,
        programs=[found[program.name] for program in programs],
    )


def _cache_bytes(planned: PlannedEngine) -> int:
    """Bytes of the cache on each device."""
    spec, pool, length = planned.spec, planned.pool, planned.buckets[-1]
    return tree_bytes(jax.eval_shape(lambda: zeroed_state(spec, planned.config, length, pool, spec.local)[0]))


def _compiled(
    devices: Sequence[Any], chip: Chip | None, resident: int, int8: bool, program: Program, work: Work | None
) -> CompiledAhead:
    """Compile one program. resident: what the engine has on a device. work: of a step."""
    inventory = Inventory()
    try:
        with target.made_for(devices), own_settings():
            inventory.compile([program])
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return CompiledAhead(name=program.name, error=_message(error))
    (report,) = inventory
    needed = max(resident, report.argument_bytes) + report.temp_bytes
    costs = None if chip is None else read_costs(inventory.text(program.name), chip.clock / chip.bandwidth)
    made = CompiledAhead(
        name=program.name,
        compile_seconds=report.lower_seconds + report.compile_seconds,
        argument_bytes=report.argument_bytes,
        temp_bytes=report.temp_bytes,
        alias_bytes=report.alias_bytes,
        fits=None if chip is None else needed <= chip.memory,
    )
    if chip is None or costs is None:
        return made
    least = 0.0 if work is None else work.seconds(chip, int8=int8)

    def seconds(cost: Cost) -> float:
        # Copies beside the operations have no cycles, but no step is faster than its bytes.
        return max(cost.cycles / chip.clock, least)

    return replace(
        made,
        estimated_seconds=seconds(costs.least),
        most_seconds=seconds(costs.most),
        roofline_seconds=least or None,
        lines=tuple(
            (line, cycles / chip.clock) for line, cycles in costs.least.lines.most_common(_SHOWN_LINES)
        ),
    )


def _message(error: Exception) -> str:
    """The first lines of a compiler's message, which may go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__
