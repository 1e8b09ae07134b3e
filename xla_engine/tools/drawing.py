"""Figures in files, by matplotlib."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.utils.extras import install


@contextmanager
def drawn(
    path: Path | str, *panels: int, dpi: int = 150, otherwise: str = "", **options: Any
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, which are written to `path` in the end; the file's ending chooses the form.

    panels, options: of `pyplot.subplots`. Raises ConfigError, which ends with `otherwise`, without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {install('plot')}{otherwise}") from error
    matplotlib.use("Agg")  # opens no window
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(*panels, layout="constrained", **options)
    try:
        yield figure, axes
        figure.savefig(path, dpi=dpi)
    finally:
        pyplot.close(figure)


def label_x(axes: Any, places: Sequence[float], form: str = "{}") -> None:
    """Label these places of the horizontal axis, and no others, and draw a grid."""
    axes.set_xticks(places, [form.format(place) for place in places])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, alpha=0.3)
