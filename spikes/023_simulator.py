# Frozen: runs at commit 84bfb74.
"""How near to the engine is its simulation, and what does the scheduler cost?

Three questions:
1. record, accuracy: workloads recorded on a real engine; one of them to fit the cost model to, all of them simulated;
2. million: a million requests through the simulator, seconds and peak memory;
3. scheduler: microseconds of `plan` and `commit` per step against the number of slots.

    python -m spikes.023_simulator record --logs DIR [--model NAME] [--only 0 3 ...]
    python -m spikes.023_simulator accuracy --logs DIR ; ... million ; ... scheduler
"""

# %%
from __future__ import annotations

import argparse
import os
import random
import resource
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from spikes.support.timing import markdown_table
from xla_engine.observability.step_log import StepLog, read_step_log
from xla_engine.scheduler import Decoded, Plan, Request, Sample, Scheduler, SchedulerConfig, StepResult
from xla_engine.simulator.clock import Clock
from xla_engine.simulator.compare import FIGURES, compare, figure
from xla_engine.simulator.cost import CostModel, Machine, machine_of
from xla_engine.simulator.fit import fit
from xla_engine.simulator.simulate import Simulation
from xla_engine.simulator.trace import heavy_tailed, of_step_log

if TYPE_CHECKING:
    from xla_engine import XlaBatchEngine


# %% 1. accuracy
@dataclass(frozen=True, slots=True)
class Load:
    """Requests of a workload: (seconds after the start, prompt tokens, new tokens)."""

    name: str
    requests: tuple[tuple[float, int, int], ...]


def loads(positions: int, rate: float, scale: float, seed: int) -> list[Load]:
    """What is recorded: the first one is fitted to."""
    draw = random.Random(seed)

    def tail(count: int, rate: float | None) -> tuple[tuple[float, int, int], ...]:
        count = max(8, round(scale * count))
        made = islice(heavy_tailed(count, rate or 1.0, draw.randrange(1 << 30)), count)
        half = positions // 2
        return tuple(
            (each.time if rate else 0.0, min(each.prompt_tokens, half), min(each.new_tokens, half))
            for each in made
        )

    def shifted(
        requests: tuple[tuple[float, int, int], ...], by: float
    ) -> tuple[tuple[float, int, int], ...]:
        return tuple((time + by, prompt, new) for time, prompt, new in requests)

    return [
        Load(
            f"a burst, then {rate:g} a second", tail(160, None) + shifted(tail(100, rate), 160 * scale / rate)
        ),
        Load("a burst", tail(200, None)),
        Load(f"{rate / 2:g} a second", tail(60, rate / 2)),
        Load(f"{2 * rate:g} a second", tail(200, 2 * rate)),
        Load(
            "short prompts, long answers", tuple((0.0, 8, positions // 3) for _ in range(round(64 * scale)))
        ),
        Load(
            "long prompts, short answers", tuple((0.0, positions // 2, 16) for _ in range(round(192 * scale)))
        ),
    ]


BUSY = 0.03  # a recording is made again if other processes took more of the cores than this


def record(
    model: str, slots: int, rate: float, scale: float, seed: int, logs: Path, only: list[int], tries: int
) -> None:
    """Run the workloads on a real engine, each into a log of its own."""
    from xla_engine import EngineConfig, XlaBatchEngine
    from xla_engine.bench.models import find_model
    from xla_engine.environment import cache_directory

    config = EngineConfig(max_num_seqs=slots, max_model_len=512)
    logs.mkdir(parents=True, exist_ok=True)
    with XlaBatchEngine.from_pretrained(find_model(model, cache_directory() / "bench"), config) as engine:
        found = loads(engine.max_model_len, rate, scale, seed)
        run(engine, Load("warm up", ((0.0, 60, 8),) * slots), logs / "warm_up.jsonl")
        for number in only or range(len(found)):
            for attempt in range(tries):
                share = run(engine, found[number], path := logs / f"{number}.new")
                print(f"{found[number].name}: others took {100 * share:.1f} % of the cores", flush=True)
                if share <= BUSY or attempt == tries - 1:
                    path.replace(logs / f"{number}.jsonl")
                    break


def run(engine: XlaBatchEngine, load: Load, path: Path) -> float:
    """Record one workload; returns the share of the machine's cores that other processes took."""
    from xla_engine import SamplingParams
    from xla_engine.observability.step_log_writer import logging_steps

    draw = random.Random(0)
    busy = cpu_seconds()
    with logging_steps(engine, path):
        coming = deque(load.requests)
        began = time.monotonic()
        while coming or engine.has_unfinished:
            now = time.monotonic() - began
            while coming and coming[0][0] <= now:
                _, prompt, new = coming.popleft()
                params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
                vocabulary = engine.checkpoint.config.vocab_size
                engine.submit([draw.randrange(vocabulary) for _ in range(prompt)], params)
            if engine.has_unfinished:
                engine.step(only_finished=True)
            else:
                time.sleep(max(coming[0][0] - now, 0.0))
    return (cpu_seconds() - busy) / (time.monotonic() - began) / (os.cpu_count() or 1)


def cpu_seconds() -> float:
    """Processor time that all other processes had since the machine started."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    everybody = sum(ticks[:3] + ticks[5:8]) / os.sysconf("SC_CLK_TCK")
    mine = os.times()
    return everybody - mine.user - mine.system


def accuracy(logs: Path, rate: float) -> None:
    names = {f"{number}.jsonl": load.name for number, load in enumerate(loads(512, rate, 1.0, 0))}
    found = {name: read_step_log(logs / file) for file, name in names.items() if (logs / file).exists()}
    cost = fit(next(iter(found.values())))
    print(*cost.lines(), sep="\n")
    rows = []
    for name, log in found.items():
        result = compare(log, cost)
        same = "same" if result.first_difference is None else f"differs at {result.first_difference}"
        cells = []
        for figure_name, scale, _ in FIGURES:
            was, said = figure(result.measured, figure_name), figure(result.predicted, figure_name)
            cells.append(f"{scale * was:.4g} / {scale * said:.4g} ({100 * (said / was - 1):+.0f} %)")
        rows.append((name, f"{result.steps}, {same}", *cells))
    heads = tuple(f"{name}, {unit}" for name, _, unit in FIGURES)
    print(markdown_table(("workload, measured / predicted", "steps", *heads), rows))
    timed(found[names["3.jsonl"]], cost)


def timed(log: StepLog, cost: CostModel) -> None:
    """The workload with arrivals in time, when the simulator is told only the times."""
    from xla_engine.simulator.compare import RecordedClock

    config, machine, lag = SchedulerConfig(**log.scheduler), machine_of(log), int(log.engine["lag"])
    was = Simulation(config, machine, RecordedClock(cost, log), lag=lag).run(of_step_log(log, by_time=False))
    said = Simulation(config, machine, Clock(cost), lag=lag).run(of_step_log(log, by_time=True))
    print("\narrivals by their times alone:")
    for name, scale, unit in FIGURES:
        a, b = figure(was, name), figure(said, name)
        print(f"  {name}: {scale * a:.4g} / {scale * b:.4g} {unit} ({100 * (b / a - 1):+.1f} %)")


# %% 2. a million requests
COST = CostModel(
    call={2: 1.5e-3, 8: 3.7e-3},
    prefill_key=8e-7,
    decode=1.1e-3,
    row=3.2e-5,
    key=3e-7,
    turn=3e-4,
    token=1.7e-5,
    end=2e-4,
    start_call=1.7e-3,
    submit=1.3e-4,
    overlap=0.8,
)


def million(requests: int) -> None:
    """Processor time, which other processes change little."""
    rows = []
    for policy, slots, rate, share in (
        ("fcfs", 64, 70.0, 10),
        ("shortest_prompt", 64, 70.0, 10),
        ("round_robin", 64, 70.0, 10),
        ("fcfs", 256, 110.0, 10),
        ("fcfs", 64, 70.0, 1),
    ):
        config = SchedulerConfig(
            max_num_seqs=slots, chunk_size=32, max_num_batched_tokens=slots + 256, scheduling_policy=policy
        )
        machine = Machine(lanes=(2, 8), key_buckets=(1024,), rows=slots)
        began = time.process_time()
        report = Simulation(config, machine, Clock(COST)).run(heavy_tailed(requests // share, rate, 0))
        took = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        rows.append(
            (
                f"{policy}, {slots} slots, {rate:g} a second",
                report.requests,
                report.steps,
                f"{100 * report.skipped / report.steps:.0f}",
                f"{100 * report.occupancy:.0f}",
                report.most_waiting,
                f"{took:.0f}",
                f"{1e6 * took / report.requests:.0f}",
                f"{peak:.0f}",
            )
        )
        print(rows[-1], flush=True)
    heads = (
        "",
        "requests",
        "steps",
        "skipped, %",
        "slots busy, %",
        "longest queue",
        "processor, s",
        "us/request",
        "peak MiB",
    )
    print(markdown_table(heads, rows))


# %% 3. the scheduler's share
def scheduler_cost(steps: int) -> None:
    rows = []
    for slots in (8, 32, 64, 128, 256, 512):
        for what, new in (("nobody comes or goes", 1 << 30), ("each request 128 tokens", 128)):
            planning, committing = measure(slots, new, steps)
            total = planning + committing
            rows.append(
                (
                    slots,
                    what,
                    f"{planning:.1f}",
                    f"{committing:.1f}",
                    f"{total:.1f}",
                    f"{1e3 * total / slots:.0f}",
                )
            )
    print(markdown_table(("slots", "", "plan, us", "commit, us", "both, us", "ns a row"), rows))


def measure(slots: int, new: int, steps: int) -> tuple[float, float]:
    """Microseconds of processor time of `plan` and `commit` in a mean step, with a queue that is never empty."""
    config = SchedulerConfig(max_num_seqs=slots, chunk_size=32, max_num_batched_tokens=slots + 256)
    scheduler, token, decoded = Scheduler(config), Sample(0), Decoded(tokens=[0] * slots)
    names = iter(map(str, range(1 << 40)))
    in_flight: deque[Plan] = deque()

    def submit(count: int, lengths: Iterator[int]) -> None:
        for _ in range(count):
            scheduler.submit(
                Request(request_id=next(names), prompt_token_ids=range(40), max_tokens=next(lengths))
            )

    draw = random.Random(0)
    lengths = iter(lambda: new if new > 1000 else draw.randint(1, 2 * new), 0)
    submit(2 * slots, lengths)
    times: list[tuple[float, float]] = []
    for _ in range(steps + slots):
        began = time.thread_time()
        plan = scheduler.plan()
        planned = time.thread_time()
        in_flight.append(plan)
        result = None
        if len(in_flight) > 1:
            old = in_flight.popleft()
            result = StepResult(first=[token] * len(old.first_rows), decode=decoded)
            before = time.thread_time()
            scheduler.commit(old, result)
            times.append((planned - began, time.thread_time() - before))
        submit(max(0, 2 * slots - scheduler.num_waiting - slots), lengths)
    kept = times[slots:]
    return tuple(1e6 * sum(part) / len(kept) for part in zip(*kept, strict=True))  # type: ignore[return-value]


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["record", "accuracy", "million", "scheduler"])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rate", type=float, default=60.0, help="arrivals per second of the timed workload")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    parser.add_argument("--logs", type=Path, default=Path("023_logs"), help="directory of the recorded runs")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of the workloads to record")
    parser.add_argument(
        "--tries", type=int, default=3, help="recordings made where others keep the cores busy"
    )
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.question == "record":
        record(
            options.model,
            options.slots,
            options.rate,
            options.scale,
            options.seed,
            options.logs,
            options.only,
            options.tries,
        )
    elif options.question == "accuracy":
        accuracy(options.logs, options.rate)
    elif options.question == "million":
        million(options.requests)
    else:
        scheduler_cost(options.steps)
