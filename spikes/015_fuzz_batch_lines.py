# Frozen: runs at commit d2ffad6.
"""Does any line of a batch file crash, hang or lose anything?

Hostile lines (wrong types, huge and tiny values, broken JSON, cut and doubled bytes, fan-out bombs) go through the
real engine. Among them the same good request comes again and again and must get the same bits each time.

    python -m spikes.015_fuzz_batch_lines
"""

# %%
from __future__ import annotations

import argparse
import faulthandler
import resource
import time

from tests.support.fuzz_lines import FuzzReport, fuzz
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine

HANG_SECONDS = 300  # without a finished step the process ends with its stack on standard error


# %%
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    last = 0

    def beat(done: int) -> None:
        nonlocal last
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        if done - last >= 10_000:
            last = done
            print(f"{done} lines, {time.monotonic() - began:.0f} s", flush=True)

    with XlaBatchEngine.from_pretrained(None, EngineConfig(max_num_seqs=32, max_model_len=128)) as engine:
        began = time.monotonic()
        report = fuzz(engine, arguments.cases, seed=arguments.seed, beat=beat)
        seconds = time.monotonic() - began
        compiles = engine.stats().compiles_after_warmup
    faulthandler.cancel_dump_traceback_later()
    show(report, arguments.cases, seconds, compiles)


# %%
def show(report: FuzzReport, count: int, seconds: float, compiles: int) -> None:
    print(f"cases                {count}, {seconds:.0f} s")
    print(f"lines with output    {report.lines} (the others are blank)")
    print(f"results              {report.results}")
    for code, times in report.codes.most_common():
        print(f"  {code:<24} {times}")
    print(f"good request again   {report.sentinels} times, the same bits unless listed below")
    print(f"longest turn         {report.longest_turn:.2f} s of processor time")
    print(f"compiles             {compiles} after warm-up")
    print(f"peak memory          {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")
    print(f"problems             {len(report.problems)}")
    for problem in report.problems[:20]:
        print(f"  {problem[:300]}")


if __name__ == "__main__":
    main()
