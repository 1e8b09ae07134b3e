"""A proposer that drafts on the device, inside verify steps: its weights, its state, and its functions of programs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.ops.rope import rope_tables
from xla_engine.runner.memory import ExtraMemory

# Loads weights, given those of the engine's model by name on the device. Returns them as the graph takes them, and
# those arrays that are not the engine's.
Place = Callable[[Mapping[str, jax.Array]], tuple[Any, list[jax.Array]]]


class DeviceProposer:
    """Owns the weights and state that verify programs take after their own arguments.

    extra: its memory on the device.
    verify: `verify_step` with the further arguments `takes`, and the state as a further result.
    read: called with the engine's `StepForm` and the lanes of a call without work; returns the function of a program
        `(weights, rope, seen f32 [P * T, ...], packed lanes, *takes) -> state` that runs after each prefill call.
        None: it does not read prefill's hidden states.
    taps: the layers of the model before which it reads the residual stream, concatenated; empty: after the last.
    """

    def __init__(
        self,
        config: ModelConfig,
        context_length: int,
        extra: ExtraMemory,
        *,
        place: Place,
        make_state: Callable[[int, int], Any],
        verify: Callable[..., Any],
        read: Callable[..., Callable[..., Any]] | None = None,
        taps: tuple[int, ...] = (),
    ) -> None:
        """config: its own, for the rotary tables. make_state: called with the arguments of `load`. verify, read: as
        the attributes."""
        self.extra, self.taps, self.verify, self.read = extra, taps, verify, read
        self._config, self._context_length = config, context_length
        self._place, self._make_state = place, make_state
        self._size = (0, 0)
        self._weights: Any = None
        self._own: list[jax.Array] = []
        self._rope: jax.Array | None = None
        self._state: Any = None

    @property
    def takes(self) -> tuple[Any, ...]:
        """Additional arguments of its programs. The last is the state, which is donated; `keep` gets the new one."""
        return self._weights, self._rope, self._state

    @property
    def reads_prompts(self) -> bool:
        return self.read is not None

    def keep(self, state: Any) -> None:
        self._state = state

    def load(self, weights: Mapping[str, jax.Array], rows: int, length: int) -> None:
        """Load weights, and make state for `rows` slots of `length` positions, a multiple of the span.

        weights: those of the engine's model, by name, on the device.
        """
        self._size = rows, length
        self._weights, self._own = self._place(weights)
        self._rope = jax.device_put(rope_tables(self._config, self._context_length))
        self._state = self._make_state(rows, length)

    def blank(self) -> None:
        """Reset the state as at start-up, even if the old one was lost."""
        for leaf in jax.tree.leaves(self._state):
            leaf.delete()
        self._state = self._make_state(*self._size)

    def delete(self) -> None:
        """Free the device memory."""
        for leaf in jax.tree.leaves((self._own, self._rope, self._state)):
            leaf.delete()
        self._own, self._weights, self._rope, self._state = [], None, None, None
