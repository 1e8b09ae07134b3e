"""Decode tok/s against B, with the bandwidth floor: `python -m xla_engine.tools.bench.plot RESULT.json`.

Needs the extra `plot`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xla_engine.errors import ConfigError
from xla_engine.tools.bench.peers import BARE, OURS
from xla_engine.tools.drawing import import_pyplot

Line = dict[int, list[float]]  # by B: median, least, most


def lines_of(records: Sequence[dict[str, Any]], figure: str) -> dict[str, Line]:
    """One figure of the uniform workload by engine and B; void rates are left out. Later records win."""
    found: dict[str, Line] = {}
    for record in records:
        for entry in record["results"]:
            if entry["workload"] == "uniform" and not entry["void"] and figure in entry["figures"]:
                found.setdefault(entry["engine"], {})[entry["batch"]] = entry["figures"][figure]
    return found


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw records of one model and dtype into `path`; the file's ending chooses its form."""
    titles = {f"{record['model']}, {record['dtype']}" for record in records}
    if len(titles) != 1:
        raise ConfigError(f"one plot shows one model and dtype, not {', '.join(sorted(titles))}")
    pyplot = import_pyplot()
    from matplotlib import ticker

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    engines = lines_of(records, "decode_tok_s")
    for name, line in sorted(engines.items(), key=lambda item: item[0] != OURS):
        batches = sorted(line)
        middle, low, high = ([line[batch][at] for batch in batches] for at in range(3))
        (drawn,) = axes.plot(batches, middle, "_:" if name == BARE else "o-", markersize=4, label=name)
        if name == OURS:
            drawn.set(linewidth=2.5, color="black")
        axes.fill_between(batches, low, high, alpha=0.2, color=drawn.get_color(), linewidth=0)
    floors = {batch: values[0] for batch, values in lines_of(records, "floor_tok_s").get(OURS, {}).items()}
    batches = sorted(floors)
    axes.plot(batches, [floors[batch] for batch in batches], "_--", color="grey", label="bandwidth floor")
    axes.set(xscale="log", yscale="log", xlabel="requests decoded together (B)", ylabel="decode tok/s")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_title(f"{titles.pop()}; {records[-1]['machine']}", fontsize=9)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Plot the JSON lines of one or more runs."""
    parser = argparse.ArgumentParser(prog="python -m xla_engine.tools.bench.plot", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench.png"), metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        plot([json.loads(path.read_text()) for path in options.results], options.output)
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
