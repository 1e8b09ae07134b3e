"""The cost of a step: a linear model of the contents of its plan, fitted to a recorded run by least squares.

The device works through the steps in order. A step costs it

    sum over prefill calls (call of that many lanes + its tokens + keys its chunks read)
    + decode + rows + keys the rows read
    + KV entries that go to the host or come back

    + its share of the host's work in that time, if both run on the same cores

The host, from having read one step to having started the next, takes

    turn + tokens read + requests that ended + prefill calls started + waking up, if it had nothing to do before

and some time for each request that is submitted.

Steps of the same content differ: threads wake up late, other programs run. So each simulated step takes longer or
shorter by as much as some recorded step did, in a fixed order that looks random.

If attention has several programs, one for each key length, every lane or row reads as many keys as its program has.
"""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xla_engine.errors import RecordError
from xla_engine.observability.step_log import StepLog


class DeviceWork(NamedTuple):
    """The work of a step on the device.

    calls: lanes of each prefill call.
    prefill_keys: keys that the chunks read, see `Machine.prefill_keys`.
    rows: rows that decode.
    keys: keys that these read, see `Machine.decode_keys`.
    moved: KV entries that are parked or resumed.
    prompt_tokens: of all calls.
    checked: tokens that rows may sample beyond one each.
    """

    calls: tuple[int, ...] = ()
    prefill_keys: int = 0
    rows: int = 0
    keys: int = 0
    moved: int = 0
    prompt_tokens: int = 0
    checked: int = 0


class HostWork(NamedTuple):
    """The work of the host between reading a step and starting the next.

    tokens: read with the step. ended: requests that ended with it. calls: prefill calls it starts.
    woken: 1 if it had nothing to do before, else 0.
    """

    tokens: int = 0
    ended: int = 0
    calls: int = 0
    woken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The programs of an engine.

    lanes: of its prefill programs, ascending. key_buckets: key lengths of its attention, ascending.
    rows: of the decode program.
    """

    lanes: tuple[int, ...]
    key_buckets: tuple[int, ...]
    rows: int

    @property
    def length(self) -> int:
        """Positions that a request may have."""
        return self.key_buckets[-1]

    def calls(self, chunks: int) -> tuple[int, ...]:
        """Lanes of the calls that run this many chunks: the largest program as often as it is full, then one that
        holds the rest."""
        full, rest = divmod(chunks, self.lanes[-1])
        last = (self.lanes[bisect_left(self.lanes, rest)],) if rest else ()
        return (self.lanes[-1],) * full + last

    def prefill_keys(self, ends: Sequence[int]) -> int:
        """Keys the calls read for chunks that end at these positions, in lane order."""
        if len(self.key_buckets) == 1:
            return sum(ends)
        total, at = 0, 0
        for lanes in self.calls(len(ends)):
            total += lanes * self._bucket(max(ends[at : at + lanes]))
            at += self.lanes[-1]
        return total

    def decode_keys(self, total: int, longest: int) -> int:
        """Keys a decode step reads for rows that hold `total` of them, the longest `longest`."""
        return total if len(self.key_buckets) == 1 else self.rows * self._bucket(longest)

    def steps_alike(self, longest: int) -> int:
        """How many decode steps, the first with `longest` keys in its longest row, read evenly more keys each."""
        if len(self.key_buckets) == 1:
            return 1 << 30
        return self._bucket(longest) - longest

    def _bucket(self, longest: int) -> int:
        return self.key_buckets[min(bisect_left(self.key_buckets, longest), len(self.key_buckets) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedMachine:
    """The engine and the costs of a step log, from a file that may have been edited."""

    scheduler: Mapping[str, Any]
    engine: Mapping[str, Any]
    cost: CostModel


def read_stated(path: Path | str) -> StatedMachine:
    """Read what `simulate --json` wrote. Raises RecordError and OSError."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        cost = dict(found["cost"])
        cost["call"] = {int(lanes): float(seconds) for lanes, seconds in cost["call"].items()}
        noise = cost.get("noise") or [0.0]  # written in order of size, so shuffled here
        cost["noise"] = tuple(random.Random(0).sample(noise, len(noise)))
        machine = found["machine"]
        return StatedMachine(scheduler=machine["scheduler"], engine=machine["engine"], cost=CostModel(**cost))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(
            f"{path} is neither a step log nor a file of `simulate --json`: {type(error).__name__}: {error}"
        ) from error


def machine_of(log: StepLog | StatedMachine) -> Machine:
    """The programs of the engine that wrote a step log."""
    return Machine(
        lanes=tuple(log.engine["prefill_lanes"]),
        key_buckets=tuple(log.engine["key_buckets"]),
        rows=int(log.scheduler["max_num_seqs"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds that each part of a step takes.

    call: a prefill call without its tokens and keys, by lanes.
    prompt_token: each token of a prefill call.
    prefill_key: each key that its chunks read.
    decode: a decode call without its rows and keys.
    row: each row that decodes.
    key: each key that these read.
    move: each KV entry that is parked or resumed.
    check: each token that a row may sample beyond one.
    turn: the host, for a turn in which nothing is read.
    token: the host, for each token read.
    end: the host, for each request that ended.
    start_call: the host, for each prefill call started.
    submit: the host, for each request submitted.
    wake: the host, for a turn before which it had nothing to do.
    overlap: added to a step on the device by each second of the host's work meanwhile.
    noise: what recorded steps took more or less than fitted, to be added to simulated steps in this order, again and
        again; the mean is zero.
    residual: root mean square error of a step's time on the device, as a share of the mean step.
    host_residual: the same of the host's turns.
    steps: how many the model was fitted to.
    """

    call: Mapping[int, float]
    prompt_token: float = 0.0
    prefill_key: float
    decode: float
    row: float
    key: float
    move: float = 0.0
    check: float = 0.0
    turn: float
    token: float
    end: float
    start_call: float
    submit: float
    wake: float = 0.0
    overlap: float = 0.0
    noise: tuple[float, ...] = (0.0,)
    residual: float = 0.0
    host_residual: float = 0.0
    steps: int = 0

    def device(self, work: DeviceWork) -> float:
        """Seconds that a step takes on the device."""
        seconds = self.prefill_key * work.prefill_keys + self.row * work.rows + self.key * work.keys
        seconds += self.move * work.moved + self.prompt_token * work.prompt_tokens
        seconds += self.check * work.checked
        if work.rows:
            seconds += self.decode
        for lanes in work.calls:
            seconds += self.call[lanes]
        return seconds

    def host(self, work: HostWork) -> float:
        """Seconds that a turn takes on the host."""
        return (
            self.turn
            + self.token * work.tokens
            + self.end * work.ended
            + self.start_call * work.calls
            + self.wake * work.woken
        )

    def lines(self) -> list[str]:
        """The model as text, in microseconds."""
        us = 1e6
        calls = ", ".join(f"{lanes} lanes {us * seconds:.0f}" for lanes, seconds in sorted(self.call.items()))
        return [
            f"device, us           prefill call of {calls}; token {us * self.prompt_token:.2f}, "
            f"key {us * self.prefill_key:.4f}",
            f"                     decode {us * self.decode:.0f}, row {us * self.row:.2f}, key {us * self.key:.4f}"
            + (f"; parked key {us * self.move:.3f}" if self.move else "")
            + (f"; and {100 * self.overlap:.0f} % of the host's time meanwhile" if self.overlap else ""),
            f"host, us             turn {us * self.turn:.0f}, token {us * self.token:.2f}, end {us * self.end:.0f}, "
            f"prefill call {us * self.start_call:.0f}, submit {us * self.submit:.0f}, wake up {us * self.wake:.0f}",
            f"fitted to            {self.steps} steps; root mean square residual {100 * self.residual:.1f} % of a "
            f"step on the device, {100 * self.host_residual:.1f} % of a turn on the host",
        ]

    def to_json(self) -> dict[str, Any]:
        found = {**asdict(self), "call": {str(lanes): seconds for lanes, seconds in self.call.items()}}
        return found | {"noise": sorted(self.noise)}


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients, none below zero, and the root mean squared error as a share of the mean value.

    A coefficient that comes out below zero is left out and the rest fitted again; one that no row needs is zero.
    """
    import numpy as np

    matrix, wanted = np.array(rows, float), np.array(values, float)
    kept = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    found = np.zeros(matrix.shape[1])
    while kept:
        scale = np.linalg.norm(matrix[:, kept], axis=0)
        solved = np.linalg.lstsq(matrix[:, kept] / scale, wanted, rcond=None)[0]
        if (solved >= 0).all():
            found[kept] = solved / scale
            break
        kept.pop(int(solved.argmin()))
    error = matrix @ found - wanted
    return found.tolist(), math.sqrt(float((error**2).mean())) / float(wanted.mean())
