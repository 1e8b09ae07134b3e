# Measured at commit e6952c79; runs at HEAD.
"""Decode tokens per second of one process and one request, and what each of its threads does in a step.

    python -m spikes.106_one_request FILE.gguf {bf16,gguf,gguf-int8} [NEW] [TURNS] [BATCH]

For each thread: milliseconds on a core, milliseconds ready without one, and voluntary and other switches, a step.
`perf record -F 2500 -e cpu-clock -p PID` beside it gives the functions.
"""

import argparse
import importlib
import os
import time

import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine

turn = importlib.import_module("spikes.095_rates_of_files").turn


def threads():
    found = {}
    for name in os.listdir("/proc/self/task"):
        place = f"/proc/self/task/{name}"
        on_core, ready = open(f"{place}/schedstat").read().split()[:2]
        switches = [int(line.split()[1]) for line in open(f"{place}/status") if "ctxt" in line]
        found[name] = open(f"{place}/comm").read().strip(), int(on_core) / 1e6, int(ready) / 1e6, *switches
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("form", choices=("bf16", "gguf", "gguf-int8"))
    for name, default in (("new", 150), ("turns", 3), ("batch", 1)):
        parser.add_argument(name, type=int, nargs="?", default=default)
    given = parser.parse_args()
    path, form, new, turns, batch = given.path, given.form, given.new, given.turns, given.batch
    config = EngineConfig(
        max_num_seqs=batch,
        max_model_len=512,
        quantization=None if form == "bf16" else form,
        enable_prefix_caching=False,
        self_check=False,
    )
    engine = XlaBatchEngine.from_pretrained(path, config)
    prompts = np.random.default_rng(0).integers(5, 40000, (batch, 32)).tolist()
    turn(engine, prompts, 4)
    for _ in range(turns):
        before, began, own = threads(), time.perf_counter(), time.process_time()
        rate, _ = turn(engine, prompts, new)
        own, took = time.process_time() - own, time.perf_counter() - began
        print(f"{rate:.1f} tok/s, {1e3 * batch / rate:.2f} ms a step, {own / took:.2f} cores", flush=True)
        for name, (comm, *values) in threads().items():
            gone = np.subtract(values, before.get(name, (comm, 0, 0, 0, 0))[1:]) / new
            if gone[0] > 0.03:
                print("   ", comm, name, *np.round(gone, 3), flush=True)
    engine.close()


if __name__ == "__main__":
    main()
