"""The interface of a proposer that drafts on the device, inside verify steps."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import Rows
from xla_engine.runner.memory import Beside


class DeviceProposer(Protocol):
    """Owns the weights and state that verify programs take after their own arguments.

    beside: its memory on the device.
    reads_prompts: whether it has a program that reads prefill's hidden states, see `read`.
    taps: the layers of the model before which it reads the residual stream, concatenated; empty: after the last.
    takes: additional arguments of its programs. The last is the state, which is donated; `keep` gets the new one.
    """

    beside: Beside
    reads_prompts: bool

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def takes(self) -> tuple[Any, ...]: ...

    def keep(self, state: Any) -> None: ...

    def load(self, weights: Mapping[str, jax.Array], rows: int, length: int) -> None:
        """Load weights, and make state for `rows` slots of `length` positions, a multiple of the span.

        weights: those of the engine's model, by name, on the device.
        """
        ...

    def step(self, spec: ModelSpec, key_length: int, width: int, *, processed: bool) -> Callable[..., Any]:
        """The function of a verify program for the engine's model `spec`: `verify_step` with the further arguments
        `takes`, and the state as a further result."""
        ...

    def read(self, spec: ModelSpec, key_length: int, lanes: Any, rows: Rows) -> Callable[..., Any]:
        """The function of a program `(weights, rope, seen f32 [P * T, ...], packed lanes, *takes) -> state` that runs
        after each prefill call. lanes: those of a call without work. rows: abstract."""
        ...

    def blank(self) -> None:
        """Reset the state as at start-up, even if the old one was lost."""
        ...

    def delete(self) -> None:
        """Free the device memory."""
        ...
