"""Decode tok/s against B, with the bandwidth floor. Needs the extra `plot`."""

from pathlib import Path
from typing import Any

from xla_engine.tools.bench.peers import BARE, OURS
from xla_engine.tools.drawing import drawn, label_x

Line = dict[int, list[float]]  # by B: median, least, most


def lines_of(record: dict[str, Any], figure: str) -> dict[str, Line]:
    """One figure of the uniform workload by engine and B; void rates are left out."""
    found: dict[str, Line] = {}
    for entry in record["results"]:
        if entry["workload"] == "uniform" and not entry["void"] and figure in entry["figures"]:
            found.setdefault(entry["engine"], {})[entry["batch"]] = entry["figures"][figure]
    return found


def plot(record: dict[str, Any], path: Path) -> None:
    """Draw the record of a benchmark into `path`; the file's ending chooses its form."""
    engines = lines_of(record, "decode_tok_s")
    floors = {batch: values[0] for batch, values in lines_of(record, "floor_tok_s").get(OURS, {}).items()}
    with drawn(path, figsize=(7, 5)) as (_, axes):
        for name, line in sorted(engines.items(), key=lambda item: item[0] != OURS):
            batches = sorted(line)
            middle, low, high = ([line[batch][at] for batch in batches] for at in range(3))
            (curve,) = axes.plot(batches, middle, "_:" if name == BARE else "o-", markersize=4, label=name)
            if name == OURS:
                curve.set(linewidth=2.5, color="black")
            axes.fill_between(batches, low, high, alpha=0.2, color=curve.get_color(), linewidth=0)
        batches = sorted(floors)
        axes.plot(batches, [floors[batch] for batch in batches], "_--", color="grey", label="bandwidth floor")
        axes.set(xscale="log", yscale="log", xlabel="requests decoded together (B)", ylabel="decode tok/s")
        label_x(axes, batches)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set_title(f"{record['model']}, {record['dtype']}; {record['machine']}", fontsize=9)
        axes.legend(fontsize=8)
