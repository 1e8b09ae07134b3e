"""Opens an engine from a model's name and options: one in this process, or several in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError
from xla_engine.model_loader.model_files import ModelFiles
from xla_engine.runner.runner import Runner
from xla_engine.utils.startup import StartupProgress, StartupStep, silent
from xla_engine.vllm_options import VLLM_OPTIONS

if TYPE_CHECKING:
    from xla_engine.data_parallel.engine import DataParallelEngine

# An engine as `LLM`, `AsyncLLM` and servers use it; `XlaBatchEngine` documents the methods.
EngineClient: TypeAlias = "XlaBatchEngine | DataParallelEngine"


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """The configuration from options by name, including vLLM's names. Raises ConfigError."""
    return EngineConfig.of(options, VLLM_OPTIONS)


def open_engine(
    model: str | Path | ModelFiles | None,
    config: EngineConfig,
    *,
    engines: int = 1,
    num_hosts: int = 1,
    coordinator: str | None = None,
    progress: StartupProgress = silent,
) -> EngineClient:
    """Load a model and compile. model, config, progress: as in `XlaBatchEngine.from_pretrained`.

    engines: if more than one, each runs in a process of its own, which opens the model by its name.

    num_hosts: if more than one, the model is shared with processes of other hosts (`xla-engine join`), which find this
        one at `coordinator`, an address HOST:PORT of this host.

    Raises CheckpointError and ConfigError.
    """
    if num_hosts > 1:
        if engines > 1:
            raise ConfigError("data_parallel_size is for one host: leave it out, or leave num_hosts out")
        return _over_hosts(model, config, num_hosts, coordinator, progress)
    if coordinator is not None:
        raise ConfigError("coordinator needs num_hosts above 1: give both, or leave coordinator out")
    if engines == 1:
        return XlaBatchEngine.from_pretrained(model, config, progress=progress)
    from xla_engine.data_parallel.engine import DataParallelEngine

    assert model is None or isinstance(model, str | Path)
    return DataParallelEngine(model, config, engines=engines, progress=progress)


def _over_hosts(
    model: str | Path | ModelFiles | None,
    config: EngineConfig,
    num_hosts: int,
    coordinator: str | None,
    progress: StartupProgress,
) -> XlaBatchEngine:
    """An engine whose model other hosts share."""
    if coordinator is None:
        raise ConfigError(
            "num_hosts needs coordinator, an address HOST:PORT of this host that the others can reach"
        )
    from xla_engine.runner.hosts import Hosts

    name = model if model is None or isinstance(model, str | Path) else model.path
    progress(StartupStep(f"waiting for hosts at {coordinator}"))
    hosts = Hosts.lead(
        coordinator, num_hosts, config, None if name in (None, embedded_model_directory()) else str(name)
    )
    try:
        return XlaBatchEngine.from_pretrained(model, config, hosts=hosts, progress=progress)
    except BaseException as error:
        if isinstance(error, Exception) and (why := hosts.why_lost()) is not None:
            raise ConfigError(why) from error
        raise


def join_hosts(coordinator: str, rank: int, model: str | None, ready: Callable[[int], None]) -> None:
    """Share the model of an engine on another host, as host `rank`, until the engine closes.

    model: its name on this host; None takes the engine's own. ready: called with the number of hosts once this one has
    compiled. Ends this process if the engine's has ended. Raises CheckpointError and ConfigError.
    """
    from xla_engine.runner.follower import follow
    from xla_engine.runner.hosts import Hosts, config_of, leave

    hosts, told = Hosts.join(coordinator, rank)
    hosts.on_lost = lambda: leave(str(hosts.lost))
    try:
        name = told["model"] if model is None else model
        engine = XlaBatchEngine.from_pretrained(name, config_of(told["config"]), hosts=hosts)
        assert isinstance(engine.runner, Runner)
        ready(hosts.count)
        follow(engine.runner, hosts)
        engine.close()
    except Exception as error:
        if (why := hosts.why_lost()) is not None:  # a failed collective is no news then
            leave(why)
        hosts.fail(f"{type(error).__name__}: {error}")
        raise
