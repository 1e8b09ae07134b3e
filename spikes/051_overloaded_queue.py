# Frozen: runs at commit 84bfb74.
"""How long does the simulator take for a million requests of an overloaded engine?

    python -m spikes.051_overloaded_queue [REQUESTS] [--profile]

Lengths like those of the public Azure conversation trace, 256 slots, arrivals at about twice what the engine keeps up
with: half of the requests are in the queue at one time. `chunks of 32` is the default, with which a prompt takes some
five steps of eight chunks; `chunks of 512` is for an accelerator.
"""

from __future__ import annotations

import cProfile
import pstats
import resource
import sys
import time

from xla_engine.scheduler import SchedulerConfig
from xla_engine.simulator.clock import Clock
from xla_engine.simulator.cost import CostModel, Machine
from xla_engine.simulator.report import Report
from xla_engine.simulator.simulate import Simulation
from xla_engine.simulator.trace import azure_like

SLOTS = 256
RATE = {512: 120.0, 32: 45.0}  # arrivals a second, about twice what these costs allow
COST = CostModel(
    call={2: 8e-4, 8: 2e-3},
    prompt_token=4e-6,
    prefill_key=3e-9,
    decode=9e-4,
    row=3e-5,
    key=2e-9,
    turn=2e-4,
    token=1e-6,
    end=2e-5,
    start_call=1e-4,
    submit=3e-5,
)


def simulate(requests: int, chunk_size: int) -> Report:
    config = SchedulerConfig(
        max_num_seqs=SLOTS,
        chunk_size=chunk_size,
        max_chunks=8,
        max_num_batched_tokens=SLOTS + 8 * chunk_size,
        preemption=True,
    )
    machine = Machine(lanes=(2, 8), key_buckets=(512, 2048, 8192), rows=SLOTS)
    return Simulation(config, machine, Clock(COST), lag=1).run(azure_like(requests, RATE[chunk_size], 0))


def main() -> None:
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    requests = numbers[0] if numbers else 1_000_000
    profile = cProfile.Profile() if "--profile" in sys.argv else None
    print("| prompts in | steps | skipped | longest queue | s | us a request | us a step | peak MiB |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for chunk_size in (512, 32):
        began = time.process_time()
        if profile is not None:
            profile.enable()
        report = simulate(requests, chunk_size)
        if profile is not None:
            profile.disable()
        took = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"| chunks of {chunk_size} | {report.steps} | {100 * report.skipped / report.steps:.0f} % | "
            f"{report.most_waiting} | {took:.1f} | {1e6 * took / requests:.0f} | "
            f"{1e6 * took / report.steps:.0f} | {peak:.0f} |",
            flush=True,
        )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
