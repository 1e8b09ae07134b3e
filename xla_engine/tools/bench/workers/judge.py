"""The judge of greedy streams, whichever engine computes its logits. Needs numpy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Ids = list[list[int]]
Logits = Callable[[list[int]], np.ndarray]  # of token ids: float32 [ids, V], each row after one of them


class Judge:
    """Rates greedy tokens in float32.

    about: what computes the logits. open_model: from a directory, a dtype, and whether matrices and the rows that they
    multiply are rounded to eight bits.
    """

    def __init__(self, about: str, open_model: Callable[[str, str, bool], Logits]) -> None:
        self._about = about
        self._open = open_model
        self._rounded: list[Logits] = []  # in eight bits, and in the dtype of the run

    def load(self, model: str) -> dict[str, Any]:
        self._directory = model
        self._exact = self._open(model, "float32", False)
        return {"about": self._about}

    def regrets(self, prompts: Ids, streams: Ids) -> dict[str, Any]:
        """Per token, how far its float32 logit lies below the best one, given the tokens before it.

        In standard deviations of that row of logits; 0 if float32 would have chosen the same token.
        """
        found = []
        for prompt, stream in zip(prompts, streams, strict=True):
            logits = _of_stream(self._exact, prompt, stream)
            chosen = logits[np.arange(len(stream)), stream]
            found.append(((logits.max(1) - chosen) / logits.std(1)).tolist())
        return {"regrets": found}

    def eight_bit_errors(self, prompts: Ids, streams: Ids, dtype: str = "float32") -> dict[str, Any]:
        """Per token, the error of logits in eight bits in a network of `dtype`, in deviations of float32's: errors of
        the two roundings are independent, so their squares add."""
        if not self._rounded:
            self._rounded.append(self._open(self._directory, "float32", True))
            if dtype != "float32":
                self._rounded.append(self._open(self._directory, dtype, False))
        errors: list[float] = []
        for prompt, stream in zip(prompts, streams, strict=True):
            models = (self._exact, *self._rounded)
            exact, *others = (_of_stream(each, prompt, stream) for each in models)
            squares = sum(((other - exact).std(1) / exact.std(1)) ** 2 for other in others)
            errors += np.sqrt(squares).tolist()
        return {"errors": errors, "vocabulary": exact.shape[1]}


def _of_stream(model: Logits, prompt: list[int], stream: list[int]) -> np.ndarray:
    """Logits `[tokens, V]` from which each token of a stream was chosen."""
    return model([*prompt, *stream])[len(prompt) - 1 : -1]
