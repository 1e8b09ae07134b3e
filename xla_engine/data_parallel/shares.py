"""Divide the machine's cores, devices and memory among engines."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from xla_engine.config import EngineConfig
from xla_engine.environment import visible_gpus
from xla_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's share. cores: CPU cores; empty for all. gpu: comma-separated NVIDIA devices; None without any."""

    cores: tuple[int, ...] = ()
    gpu: str | None = None


def shares(
    engines: int,
    cores: Sequence[int] | None = None,
    gpus: Sequence[str] | None = None,
    *,
    devices_each: int = 1,
) -> list[Share]:
    """Divide the machine: one GPU each, shared round-robin if there are too few; without GPUs, the cores evenly.

    devices_each: GPUs of one engine, with tensor parallelism. Raises ConfigError if there are too few GPUs.

    >>> [share.cores for share in shares(2, cores=[0, 1, 2, 3, 4], gpus=[])]
    [(0, 1), (2, 3, 4)]
    >>> [share.gpu for share in shares(3, cores=[0], gpus=["0", "1"])]
    ['0', '1', '0']
    >>> [share.gpu for share in shares(2, cores=[0], gpus=["0", "1", "2", "3"], devices_each=2)]
    ['0,1', '2,3']
    """
    if cores is None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
    if gpus is None:
        gpus = visible_gpus()
    if gpus:
        starts = range(0, len(gpus) - devices_each + 1, devices_each)
        gpus = [",".join(gpus[start : start + devices_each]) for start in starts]
        if not gpus:
            raise ConfigError(f"tensor_parallel_size {devices_each} needs as many GPUs, but there are fewer")
        return [Share(gpu=gpus[index % len(gpus)]) for index in range(engines)]
    if len(cores) < engines:
        return [Share()] * engines
    cuts = [index * len(cores) // engines for index in range(engines + 1)]
    return [Share(cores=tuple(cores[cuts[index] : cuts[index + 1]])) for index in range(engines)]


def config_of_engine(
    config: EngineConfig, all_shares: Sequence[Share], index: int, running: int
) -> EngineConfig:
    """The options of engine `index` if `running` other engines on its device have already allocated their memory.

    Engines size themselves by the memory that is available when they start. If n engines on a device may use a
    fraction u of it, the first takes u/n. One that starts after k others finds 1 - k*u/n of the memory available,
    and takes u/(n - k*u) of that.
    """
    mine = all_shares[index].gpu
    together = sum(share.gpu == mine for share in all_shares)
    utilization = config.memory_utilization
    return replace(
        config,
        memory_utilization=min(utilization / (together - running * utilization), 1.0),
        swap_space=config.swap_space / len(all_shares),
        max_waiting=None,  # requests wait in the parent
    )
