"""What tests see and change of a runner's device state, and no caller of an engine may."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.support.host_layers import from_host, to_host
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.runner.runner import Runner


def program_text(runner: Runner, name: str) -> str:
    """Optimised HLO of a program."""
    return runner.inventory.text(name)


def program_code(runner: Runner, name: str) -> str:
    """Optimised HLO of a program without the places in the source that each instruction stems from.

    Of functions that several programs share, jax keeps the places of the first one traced.
    """
    parts = program_text(runner, name).split("\n\n")
    tables = ("FileNames\n", "FunctionNames\n", "FileLocations\n", "StackFrames\n")
    code = "\n\n".join(part for part in parts if not part.startswith(tables))
    return re.sub(r', metadata=\{(?:[^{}"]|"[^"]*")*\}', "", code)


def num_parked(runner: Runner) -> int:
    """Requests whose state is on the host."""
    return len(runner._parked)


def read_cache(runner: Runner) -> list[tuple[np.ndarray, np.ndarray]]:
    """Copy the cache to the host, per layer K and V `[B, KV, S, Dh]`, or the state of a linear layer."""
    return to_host(runner.spec, runner.state.cache)


def edit_cache(runner: Runner, edit: Callable[[int, str, np.ndarray], np.ndarray]) -> None:
    """Replace keys and values by `edit(layer index, "keys" | "values", array [B, KV, S, Dh])`, and the "inputs" and
    "memory" of linear layers likewise."""
    edited = []
    for index, (first, second) in enumerate(read_cache(runner)):
        names = ("inputs", "memory") if runner.spec.config.is_recurrent(index) else ("keys", "values")
        edited.append((edit(index, names[0], first), edit(index, names[1], second)))
    runner.state.cache = from_host(runner.spec, edited)


def poison_free_slots(engine: XlaBatchEngine) -> None:
    """Fill every free slot with NaN, and forget its cached prefix."""
    busy = [view.slot.index for view in engine.snapshot().slots if view.request is not None]
    free = [index for index in range(engine.config.device_rows) if index not in busy]

    def edit(_: int, __: str, buffer: np.ndarray) -> np.ndarray:
        # scales of keys and values in eight bits are NaN if all of their bits are ones
        buffer[free] = -1 if buffer.dtype == np.int8 else np.nan
        return buffer

    edit_cache(engine.runner, edit)
    engine.reset_prefix_cache()  # what free slots held is gone
