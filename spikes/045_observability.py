# Frozen: runs at commit 9431e93.
"""What do histograms and phase timers cost the host?

python -m spikes.045_observability --model embedded --rows 32
python -m spikes.045_observability --model embedded --rows 256 --rounds 9
python -m spikes.045_observability steady --model embedded --rows 256 --rounds 200
python -m spikes.045_observability calls
"""

# %%
from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from spikes.support.timing import describe_machine, markdown_table
from xla_engine.bench.models import find_model
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.token_gaps import TokenGaps
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.observability.distributions import Histograms
from xla_engine.observability.histogram import POWERS_OF_TWO, SHORT_TIMES, Histogram
from xla_engine.observability.phases import PhaseTimer
from xla_engine.observability.stats import WorkCounters
from xla_engine.sampling_params import SamplingParams

PROMPT = 16
STEADY = 400  # steps in which all slots decode, of one filling of them
STEPS = 8  # of a kind in one round
MANY = 8


def make_engine(model: str, rows: int, shapes: Path) -> XlaBatchEngine:
    config = EngineConfig(max_num_seqs=rows, max_model_len=512, enable_prefix_caching=False, self_check=False)
    if model == "embedded":
        return XlaBatchEngine.from_pretrained(config=config)
    return XlaBatchEngine(load_checkpoint(find_model(model, shapes), dtype="bfloat16"), None, config)


# %%
def started_before(self: WorkCounters, plan: Any, *_: object) -> None:
    """`WorkCounters.started` as it was before there were histograms."""
    self.steps += 1
    self.prompt_tokens += sum(len(chunk.tokens) for chunk in plan.chunks)
    if rows := len(plan.decode) + len(plan.verify):
        self.decode_steps += 1
        self.slot_steps_busy += rows


def do_nothing(*_: object) -> None:
    pass


@contextlib.contextmanager
def nothing(engine: XlaBatchEngine) -> Iterator[None]:
    """No histograms: what remains of them is a call that does nothing, at each place where one would count."""
    with contextlib.ExitStack() as stack:
        for owner, names in (
            (TokenGaps, ("read", "join", "bound", "leave", "clear")),
            (Histogram, ("add",)),
            (Histograms, ("count_end",)),
        ):
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, do_nothing))
        stack.enter_context(mock.patch.object(WorkCounters, "started", started_before))
        yield


@contextlib.contextmanager
def histograms(engine: XlaBatchEngine) -> Iterator[None]:
    """As users have it."""
    yield


@contextlib.contextmanager
def timers(engine: XlaBatchEngine, count: int = 1) -> Iterator[None]:
    """With phase timers as well. count: so many, one around the other."""
    start = vars(engine.runner).pop("start", None)
    assert start is None, "nothing else times this engine"
    for _ in range(count):
        PhaseTimer().watch(engine)
    try:
        yield
    finally:
        for name in ("begin_turn", "end_turn", "_deliver"):
            delattr(engine, name)
        del engine.runner.start  # type: ignore[attr-defined]


Variant = Callable[[XlaBatchEngine], contextlib.AbstractContextManager[None]]
VARIANTS: tuple[Variant, ...] = (nothing, histograms, timers)


def run(engine: XlaBatchEngine, tokens: int) -> float:
    """Microseconds of the engine thread's CPU a step, of a job in which requests of several lengths come and go."""
    draw = np.random.default_rng(0)
    for number in range(2 * engine.max_num_seqs):
        params = SamplingParams(temperature=0.0, max_tokens=tokens // 2 + number % tokens, ignore_eos=True)
        engine.submit([int(token) for token in draw.integers(10, 400, PROMPT)], params)
    steps, began = engine.stats().steps, time.thread_time()
    engine.drain()
    return 1e6 * (time.thread_time() - began) / (engine.stats().steps - steps)


def turns(engine: XlaBatchEngine, tokens: int, rounds: int) -> list[list[str]]:
    """CPU of a turn by variant, in interleaved rounds, and how many times that of a turn without histograms: the
    median over rounds, and of the least values, which other work on the machine disturbs less."""
    spent: dict[str, list[float]] = {variant.__name__: [] for variant in VARIANTS}
    run(engine, tokens)
    for number in range(rounds):
        for at in range(len(VARIANTS)):
            variant = VARIANTS[(at + number) % len(VARIANTS)]
            with variant(engine):
                spent[variant.__name__].append(run(engine, tokens))
    base = spent[nothing.__name__]
    table = []
    for name, values in spent.items():
        ratios = [value / other for value, other in zip(values, base, strict=True)]
        table.append(
            [
                name,
                f"{statistics.median(values):.0f}",
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
                f"{min(values):.0f}",
                f"{min(values) / min(base):.3f}",
            ]
        )
    return table


# %%
def fill(engine: XlaBatchEngine) -> None:
    """Let all slots decode, for `STEADY` steps and more."""
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=engine.max_model_len - PROMPT, ignore_eos=True)
    for number in range(engine.max_num_seqs):
        engine.submit(
            [int(token) for token in draw.integers(10, 400, PROMPT)], params, request_id=f"{number}"
        )
    while engine.snapshot().waiting:
        engine.step(only_finished=True)
    for _ in range(STEPS):  # the last prompts
        engine.step(only_finished=True)


def steady(engine: XlaBatchEngine, rounds: int) -> list[list[str]]:
    """Turns with all slots live: with no timer, one, `MANY` and none again, `STEPS` of each in a round.

    Microseconds of a turn, by the clock and of the engine's thread: the median and the lower quartile of all turns. By
    round, times that of the first kind in the same round, which is the median of its turns: the median and the
    quartiles over rounds. The last kind says how far equal ones are apart, and that of many timers what one costs
    where turns scatter by more than that.
    """
    kinds: tuple[tuple[str, Variant], ...] = (
        ("off", histograms),
        ("on", timers),
        (f"{MANY} timers", partial(timers, count=MANY)),
        ("off again", histograms),
    )
    spent: dict[str, list[list[tuple[float, float]]]] = {name: [] for name, _ in kinds}
    for number in range(rounds):
        if number % (STEADY // (STEPS * len(kinds))) == 0:
            for name in [view.request.request_id for view in engine.snapshot().slots if view.request]:
                engine.abort(name)
            engine.drain()
            fill(engine)
        for at in range(len(kinds)):
            name, variant = kinds[(at + number) % len(kinds)]
            with variant(engine):
                spent[name].append([a_turn(engine) for _ in range(STEPS)])
        live = sum(view.request is not None for view in engine.snapshot().slots)
        assert live == engine.max_num_seqs, f"only {live} rows"
    table = []
    for name in spent:
        row = [name]
        for which in (0, 1):
            mine, base = ([[turn[which] for turn in each] for each in spent[of]] for of in (name, "off"))
            ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(mine, base, strict=True)]
            low, middle, high = statistics.quantiles(ratios)
            quarter, half, _ = statistics.quantiles(turn for each in mine for turn in each)
            of_off = statistics.quantiles(turn for each in base for turn in each)[0]
            row += [
                f"{half:.0f}",
                f"{middle:.4f} ({low:.4f}-{high:.4f})",
                f"{quarter:.0f}",
                f"{quarter / of_off:.4f}",
            ]
        table.append(row)
    return table


def a_turn(engine: XlaBatchEngine) -> tuple[float, float]:
    """One turn, in microseconds by the clock and of this thread."""
    began, cpu = time.perf_counter(), time.thread_time()
    engine.step(only_finished=True)
    return 1e6 * (time.perf_counter() - began), 1e6 * (time.thread_time() - cpu)


# %%
class Row:
    last_token_time = 1.0


class Turns:
    """A loop that does nothing, at a lag of one."""

    has_work = True

    def __init__(self) -> None:
        self.runner = self
        self.step = 0

    def begin_turn(self) -> Turns:
        self.step += 1
        self.start(self)
        return self

    def start(self, plan: Turns) -> None:
        pass

    def end_turn(self, step: Turns) -> None:
        self._deliver(step)

    def _deliver(self, plan: Turns) -> None:
        pass


def calls(times: int = 20_000) -> list[list[str]]:
    """Microseconds of what is called in each step, alone and with warm caches."""
    gaps: TokenGaps[Row] = TokenGaps(Histogram(SHORT_TIMES))
    for _ in range(32):
        gaps.join(Row(), 0, None)
    sizes, bare, timed = Histogram(POWERS_OF_TWO), Turns(), Turns()
    PhaseTimer().watch(timed)
    gaps.read(0, 0.0)

    def step(number: int) -> None:
        gaps.read(number + 1, number * 0.01)
        sizes.add(32)

    def joins_and_leaves(number: int) -> None:
        row = Row()
        gaps.join(row, 1 << 40, None)
        gaps.leave(row, 1 << 40, None, 1)

    def turn(loop: Turns) -> None:
        loop.end_turn(loop.begin_turn())

    found = []
    for what, call in (
        ("a step: gaps of all rows, and the number of rows", step),
        ("a sequence: joins and leaves", joins_and_leaves),
        ("an empty turn", lambda _: turn(bare)),
        ("an empty turn with timers", lambda _: turn(timed)),
    ):
        rounds = []
        for _ in range(7):
            began = time.thread_time()
            for number in range(times):
                call(number)
            rounds.append(1e6 * (time.thread_time() - began) / times)
        found.append([what, f"{statistics.median(rounds):.2f}"])
    return found


# %%
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question", choices=["turns", "steady", "calls"], nargs="?", default="turns")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shapes", type=Path, default=Path(tempfile.gettempdir(), "xla-engine-shapes"))
    options = parser.parse_args()
    print(describe_machine())
    if options.question == "calls":
        print(markdown_table(("called in", "us"), calls()))
        return
    with make_engine(options.model, options.rows, options.shapes) as engine:
        if options.question == "steady":
            times = ("us a turn", "of off, by round", "lower quartile", "of off")
            head = (f"{options.model}, {options.rows} rows", *times, *(f"CPU: {what}" for what in times))
            print(markdown_table(head, steady(engine, options.rounds)))
            return
        table = turns(engine, options.tokens, options.rounds)
        head = (
            f"{options.model}, {options.rows} rows",
            "CPU, us a step",
            "times that of nothing",
            "least",
            "of it",
        )
        print(markdown_table(head, table))


if __name__ == "__main__":
    main()
