"""Matplotlib, for figures that go to files."""

from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.utils.extras import install


def import_pyplot(what: str = "plots", otherwise: str = "") -> Any:
    """The module `matplotlib.pyplot`, which opens no window. Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"{what} need matplotlib: {install('plot')}{otherwise}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
