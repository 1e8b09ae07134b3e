# Frozen: runs at commit 7a41328.
"""What would a decode step cost as a step of lanes, as verify steps and those of few rows are?

    python -m spikes.062_one_step_function --model embedded --slots 1 8 32
    python -m spikes.062_one_step_function --model smollm2-135m --slots 8 32 --rounds 60

All slots are live. The decode program (`all`) and the program of few rows with as many lanes as there are slots
(`lanes`) take turns, on rows of 160 keys.
"""

# %%
from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path
from unittest import mock

from spikes.support.timing import describe_machine, interleave, markdown_table
from xla_engine.runner.programs import decode_name

few_rows = importlib.import_module("spikes.041_few_rows")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cold", action="store_true", help="compile everything, and say what that took")
    options = parser.parse_args()
    print(describe_machine(), "\n")
    table = []
    with tempfile.TemporaryDirectory() as shapes:
        for slots in options.slots:
            with mock.patch("xla_engine.runner.runner.few_rows", return_value=(slots,)):
                engine = few_rows.make_engine(options.model, slots, Path(shapes), cold=options.cold)
            names = {
                "all": decode_name(engine.runner.buckets[0]),
                "lanes": decode_name(engine.runner.buckets[0], slots),
            }
            reports = {report.name: report for report in engine.inventory_report()}
            forms = {
                form: few_rows.step(engine, slots, few, options.temperature)
                for form, few in (("all", None), ("lanes", slots))
            }
            times = interleave(forms, options.rounds, warm_up=5)
            for form, name in names.items():
                lines = engine.runner._inventory.text(name).count("\n")
                seconds, compiling = times[form], reports[name].compile_seconds
                share = (
                    f"{seconds.median / times['all'].median:.3f}",
                    f"{seconds.least / times['all'].least:.3f}",
                )
                table.append(
                    [str(slots), form, seconds.milliseconds(), *share, str(lines), f"{compiling:.2f}"]
                )
            engine.close()
    head = ["slots", "form", "ms", "median, of all", "least, of all", "lines of HLO", "s to compile"]
    print(markdown_table(head, table))


if __name__ == "__main__":
    main()
