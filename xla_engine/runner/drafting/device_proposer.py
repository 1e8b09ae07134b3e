"""What a runner asks of a proposer that drafts inside its verify steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import Rows
from xla_engine.runner.memory import Beside


class DeviceProposer(Protocol):
    """Owner of weights and state that verify programs take behind their own arguments.

    beside: what it takes of the device's memory.
    reads_prompts: it has a program that sees what prefill computes, see `read`.
    taps: the model's layers before which it sees the residual stream, side by side; none: behind the last.
    takes: arguments of its programs; the last one is the state, which is donated, and `keep` gets what comes back.
    """

    beside: Beside
    reads_prompts: bool

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def takes(self) -> tuple[Any, ...]: ...

    def keep(self, state: Any) -> None: ...

    def load(self, weights: Mapping[str, jax.Array], rows: int, length: int) -> None:
        """Bring weights to the device, and make state for `rows` slots of `length` positions, whole spans.

        weights: the engine's own, by name, on the device.
        """
        ...

    def step(self, spec: ModelSpec, key_length: int, width: int, *, processed: bool) -> Callable[..., Any]:
        """The function of a verify program of the engine's model `spec`: `verify_step` with `takes` behind its
        arguments, and the state behind its results."""
        ...

    def read(self, spec: ModelSpec, key_length: int, lanes: Any, rows: Rows) -> Callable[..., Any]:
        """The function of a program `(weights, rope, seen f32 [P * T, ...], packed lanes, *takes) -> state`, to be run
        behind each prefill call. lanes: an idle call's. rows: abstract."""
        ...

    def blank(self) -> None:
        """State as at the start, whatever became of the old one."""
        ...

    def delete(self) -> None:
        """Free the memory."""
        ...
