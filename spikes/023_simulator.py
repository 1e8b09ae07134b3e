"""How near to the engine is its simulation, and what does the scheduler cost?

Three questions:
1. accuracy: workloads recorded on a real engine, one of them to fit the cost model to, all of them simulated;
2. million: a million requests through the simulator, seconds and peak memory;
3. scheduler: microseconds of `plan` and `commit` per step against the number of slots.

    python -m spikes.023_simulator accuracy [--model NAME] ; ... million ; ... scheduler
"""

# %%
from __future__ import annotations

import argparse
import random
import resource
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from scheduler import Plan, Request, Sample, Scheduler, SchedulerConfig, StepResult
from spikes.timing import markdown_table
from xla_engine.simulator.compare import FIGURES, compare, figure
from xla_engine.simulator.cost import CostModel, Machine, machine_of
from xla_engine.simulator.fit import fit
from xla_engine.simulator.simulate import Clock, Simulation
from xla_engine.simulator.trace import heavy_tailed, of_step_log
from xla_engine.step_log import StepLog, read_step_log


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


def record(model: str, slots: int, rate: float, scale: float, seed: int) -> tuple[list[Load], list[StepLog]]:
    """Run the workloads on a real engine."""
    from xla_engine import EngineConfig, SamplingParams, XlaBatchEngine
    from xla_engine.bench.models import find_model
    from xla_engine.config import cache_directory
    from xla_engine.step_log import logging_steps

    config = EngineConfig(max_num_seqs=slots, max_model_len=512)
    logs = []
    with (
        tempfile.TemporaryDirectory() as directory,
        XlaBatchEngine.from_pretrained(find_model(model, cache_directory() / "bench"), config) as engine,
    ):
        found = loads(engine.max_model_len, rate, scale, seed)
        draw = random.Random(seed)
        for load in (found[-1], *found):  # the last one twice: it warms up
            path = Path(directory) / "steps.jsonl"
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
            logs.append(read_step_log(path))
    return found, logs[1:]


def accuracy(model: str, slots: int, rate: float, scale: float, seed: int) -> None:
    found, logs = record(model, slots, rate, scale, seed)
    cost = fit(logs[0])
    print(*cost.lines(), sep="\n")
    rows = []
    for load, log in zip(found, logs, strict=True):
        result = compare(log, cost)
        same = "same" if result.first_difference is None else f"differs at {result.first_difference}"
        cells = []
        for name, scale, _ in FIGURES:
            was, said = figure(result.measured, name), figure(result.predicted, name)
            cells.append(f"{scale * was:.4g} / {scale * said:.4g} ({100 * (said / was - 1):+.0f} %)")
        rows.append((load.name, f"{result.steps}, {same}", *cells))
    units = {"s": "s", "ms": "ms"}
    heads = tuple(f"{name}, {units[unit]}" for name, _, unit in FIGURES)
    print(markdown_table(("workload, measured / predicted", "steps", *heads), rows))
    timed(logs[3], cost)


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
    chunk=1.5e-4,
    submit=1.9e-4,
)


def million(requests: int) -> None:
    rows = []
    for policy, slots, rate in (
        ("fcfs", 64, 70.0),
        ("shortest_prompt", 64, 70.0),
        ("round_robin", 64, 70.0),
        ("fcfs", 256, 110.0),
    ):
        config = SchedulerConfig(
            max_num_seqs=slots, chunk_size=32, max_num_batched_tokens=slots + 256, scheduling_policy=policy
        )
        machine = Machine(lanes=(2, 8), key_buckets=(1024,), rows=slots)
        began = time.perf_counter()
        report = Simulation(config, machine, Clock(COST)).run(heavy_tailed(requests, rate, 0))
        took = time.perf_counter() - began
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
        "s",
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
    """Median microseconds of `plan` and `commit`, with a queue that is never empty."""
    config = SchedulerConfig(max_num_seqs=slots, chunk_size=32, max_num_batched_tokens=slots + 256)
    scheduler, token = Scheduler(config), Sample(0)
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
        began = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        in_flight.append(plan)
        result = None
        if len(in_flight) > 1:
            old = in_flight.popleft()
            result = StepResult(first=[token] * len(old.first_rows), decode=[(token,)] * len(old.decode))
            before = time.perf_counter()
            scheduler.commit(old, result)
            times.append((planned - began, time.perf_counter() - before))
        submit(max(0, 2 * slots - scheduler.num_waiting - slots), lengths)
    kept = times[slots:]
    return tuple(1e6 * sum(part) / len(kept) for part in zip(*kept, strict=True))  # type: ignore[return-value]


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["accuracy", "million", "scheduler"])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rate", type=float, default=60.0, help="arrivals per second of the timed workload")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.question == "accuracy":
        accuracy(options.model, options.slots, options.rate, options.scale, options.seed)
    elif options.question == "million":
        million(options.requests)
    else:
        scheduler_cost(options.steps)
