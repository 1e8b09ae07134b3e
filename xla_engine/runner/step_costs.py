"""Measures the cost of decode and verify steps on this machine."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from xla_engine.graphs.inventory import program_name
from xla_engine.graphs.row_state.rows import pack
from xla_engine.runner.call_sizes import decode_work
from xla_engine.runner.device_state import DeviceState
from xla_engine.runner.dispatch import Dispatch
from xla_engine.runner.inputs import no_drafts
from xla_engine.runner.programs import VERIFY, decode_name

_LENGTH = 128  # positions of a row that is timed
_RUNS = 5


class StepCosts(NamedTuple):
    """Seconds per step. decode: by rows, ascending. verify: by (lanes, width)."""

    decode: Mapping[int, float]
    verify: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, seconds: Mapping[int | tuple[int, int], float]) -> StepCosts:
        """From measured seconds by rows or (lanes, width). A verify step costs at least a decode of the same rows."""
        costs = cls({key: took for key, took in seconds.items() if isinstance(key, int)}, {})
        verify = {
            key: max(took, costs.decode_of(key[0]))
            for key, took in seconds.items()
            if not isinstance(key, int)
        }
        return costs._replace(verify=verify)

    def with_fewer_drafts(self) -> StepCosts:
        """With the widths between two that were measured for the same lanes, whose costs lie on a line.

        A verify step of a program may draft fewer tokens than it has room for.
        """
        verify = dict(self.verify)
        for lanes in {lanes for lanes, _ in self.verify}:
            known = sorted(width for rows, width in self.verify if rows == lanes)
            for low, high in itertools.pairwise(known):
                least, most = self.verify[lanes, low], self.verify[lanes, high]
                for width in range(low + 1, high):
                    verify[lanes, width] = least + (most - least) * (width - low) / (high - low)
        return self._replace(verify=verify)

    def decode_of(self, rows: int) -> float:
        """The cost of a decode step of `rows` rows, by linear interpolation."""
        known = sorted(self.decode)
        above = next((count for count in known if count >= rows), known[-1])
        below = next((count for count in reversed(known) if count <= rows), known[0])
        if above == below:
            return self.decode[above]
        share = (rows - below) / (above - below)
        return self.decode[below] + share * (self.decode[above] - self.decode[below])


def measure(
    dispatch: Dispatch,
    state: DeviceState,
    slots: int,
    few_choices: Sequence[int],
    shapes: Sequence[tuple[int, int]],
    keys: int,
    *,
    on_device: bool,
) -> StepCosts:
    """Time decode steps of all `slots` or few rows, and verify steps of `shapes`. The runner must be idle.

    keys: the key length of the programs. on_device: verify steps draft on the device, which is part of their cost;
    then steps with a single draft are timed as well, and all widths between have a cost.

    Rows and cache are arbitrary afterwards; the caller must blank them.
    """
    host: Any = jax.tree.map(np.asarray, state.make_rows())
    count, tables = len(host.token), host.block_tables
    if tables is not None:  # slots share no block, if there are at least as many blocks as slots
        own = np.arange(count, dtype=np.int32) % len(host.history)
        tables = np.repeat(own[:, None], tables.shape[1], axis=1)
    rows = replace(
        host,
        length=np.full(count, min(_LENGTH, keys // 2), np.int32),
        remaining=np.full(count, keys, np.int32),
        block_tables=tables,
    )

    def begin(run: int) -> None:
        # With drafting on the device, each run is one token further, as in real use.
        length = rows.length + (run if on_device else 0)
        state.rows = state.placed(replace(rows, length=length))

    calls: dict[int | tuple[int, int], tuple[str, Any]] = {}
    for number in sorted({min(number, slots) for number in (1, 2, 4, 8, 16, 32, 64, slots)}):
        few = next((size for size in few_choices if size >= number), None)
        work = decode_work(np.arange(number), count, few)
        calls[number] = decode_name(keys, few), dispatch.put(work)
    programs = {(lanes, 2): width for lanes, width in sorted(shapes, reverse=True) if on_device}
    programs |= dict(zip(shapes, (width for _, width in shapes), strict=True))
    for (lanes, used), width in programs.items():
        drafts: Any = no_drafts(lanes, width)
        drafts.slot[:], drafts.most[:], drafts.tokens[:] = np.arange(lanes), used - 1, 0
        drafts.start[:] = rows.length[:lanes] + 1
        if on_device:
            drafts.tokens[:], drafts.lookup[:] = -1, True
        calls[lanes, used] = (
            program_name(VERIFY, lanes=lanes, width=width, keys=keys),
            dispatch.put(pack(drafts)),
        )

    times: dict[int | tuple[int, int], list[float]] = {key: [] for key in calls}
    for run in range(_RUNS):  # interleaved, so that other load on the machine affects all alike
        for key, (name, work) in calls.items():
            begin(run)
            start = dispatch.run_verify if name.startswith(VERIFY) else dispatch.run
            began = time.perf_counter()
            jax.block_until_ready(start(name, work))
            times[key].append(time.perf_counter() - began)
    # The least of several would favour short steps, which more often run undisturbed.
    found = {key: statistics.median(each) for key, each in times.items()}
    costs = StepCosts.of(found)
    return costs.with_fewer_drafts() if on_device else costs
