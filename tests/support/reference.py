"""Greedy answers of the forward pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xla_engine.equivalence.forward_pass import ForwardPass


def greedy_tokens(reference: ForwardPass, prompt: Sequence[int], count: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(int(np.argmax(reference.logits(token_ids)[-1])))
    return token_ids[len(prompt) :]
