"""`xla-engine graphs --topology`: what an engine's programs cost on chips that are not here."""

from collections.abc import Iterator
from pathlib import Path

from xla_engine.config import EngineConfig
from xla_engine.graphs.ops.coded import StoredKinds
from xla_engine.model_loader.checkpoint import load_weights
from xla_engine.model_loader.config_only import ConfigOnly, open_shapes
from xla_engine.model_loader.describe import describe
from xla_engine.model_loader.weights import stored_kinds
from xla_engine.runner.ahead_of_time import CompiledAhead, TopologyReport, compile_ahead
from xla_engine.utils.sizes import size
from xla_engine.utils.startup import StartupProgress, silent
from xla_engine.utils.tables import aligned


def compile_for(
    topology: str,
    model: Path | str,
    config: EngineConfig,
    progress: StartupProgress = silent,
    *,
    kinds: tuple[str, ...] = (),
) -> TopologyReport:
    """Compile the programs of an engine for a model, of which only config.json need be there.

    kinds: as in `compile_ahead`.

    Raises CheckpointError, and ConfigError.
    """
    files = open_shapes(model)
    described = describe(files, config)
    stored: StoredKinds = {}
    if isinstance(files, ConfigOnly):
        dtype = config.dtype if config.dtype != "auto" else files.dtype
    else:
        checkpoint = load_weights(described)
        dtype, stored = checkpoint.dtype, stored_kinds(checkpoint.weights)
    pooling = None if described.pooling is None else described.pooling.pooling_type
    return compile_ahead(
        topology,
        described.options,
        described.config,
        dtype,
        stored,
        pooling=pooling,
        kinds=kinds,
        progress=progress,
    )


def report_lines(report: TopologyReport) -> Iterator[str]:
    """The report as text."""
    memory = "unknown memory" if report.memory_bytes is None else size(report.memory_bytes)
    yield (
        f"{report.topology}: {report.devices} x {report.device}, {memory} each; weights {size(report.weights_bytes)}, "
        f"KV cache {size(report.cache_bytes)} on each"
    )
    head = ("program", "compile s", "arguments", "temp", "alias", "fits", "time", "at most", "roofline")
    rows = [head, *(_row(each) for each in report.programs if each.error is None)]
    yield from ("", *aligned(rows, right=range(1, len(head))))
    for each in report.programs:
        if each.error is not None:
            yield from ("", f"{each.name} does not compile: {each.error}")
    for each in report.programs:
        if each.lines:
            yield from ("", f"{each.name}: the most expensive lines")
            yield from (f"  {_time(seconds):>9}  {line}" for line, seconds in each.lines)
    yield ""
    yield "Times are the compiler's estimates, for comparing programs; only a device shows real ones."


def _row(each: CompiledAhead) -> tuple[str, ...]:
    sizes = (each.argument_bytes, each.temp_bytes, each.alias_bytes)
    share = "" if each.roofline_share is None else f"{each.roofline_share:.0%}"
    return (
        each.name,
        f"{each.compile_seconds:.1f}",
        *map(size, sizes),
        {None: "?", True: "yes", False: "no"}[each.fits],
        _time(each.estimated_seconds),
        _time(each.most_seconds),
        share,
    )


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
