"""The logits of prompt positions: for tools, not for requests."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xla_engine.graphs.inventory import Inventory
from xla_engine.runner.in_flight import InFlight
from xla_engine.runner.prefill_inputs import prompt_targets
from xla_engine.runner.programs import logits_name

TakeLogits = Callable[[str, int, np.ndarray], None]
"""Called with a request's id, a position of its prompt, and the logits f32 `[n, V]` from this position on.

After a preemption, positions may come again, with the same logits. The engine treats an exception as a device fault.
"""


class PromptLogits:
    """Runs the programs of `logits_programs` on the hidden states of prefill calls."""

    def __init__(self, inventory: Inventory, put: Callable[..., Any], chunk_size: int) -> None:
        self._inventory, self._put, self._chunk_size = inventory, put, chunk_size

    def give(self, step: InFlight, weights: list[jax.Array], take: TakeLogits) -> None:
        """Call `take` with the logits at all prompt positions of a step for which log-probabilities were requested."""
        for call in step.first:
            if call.prompt is None:
                continue
            lanes = call.hidden.shape[0] // self._chunk_size
            asked = [
                (lane, chunk, prompt_targets(chunk, settings)) for lane, chunk, settings in call.prompt[1]
            ]
            target = np.full((lanes, self._chunk_size), -1, np.int32)
            for lane, _, tokens in asked:
                target[lane, : len(tokens)] = tokens
            packed = self._inventory(logits_name(lanes), weights, call.hidden, self._put(target.reshape(-1)))
            logits = np.asarray(packed).reshape(lanes, self._chunk_size, -1)
            for lane, chunk, tokens in asked:
                take(chunk.request_id, chunk.start, logits[lane, : len(tokens)])
