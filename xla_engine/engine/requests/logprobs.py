"""Log-probabilities of tokens by their ids."""

from __future__ import annotations

from xla_engine.graphs.sampling.logprobs import TopLogprobs
from xla_engine.outputs import Logprob
from xla_engine.text.tokenizer import Tokenizer


def by_id(token_id: int, logprob: float, top: TopLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The chosen token first, then the most likely ones."""

    def decode(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    found = {token_id: Logprob(logprob, top.rank, decode(token_id))}
    for rank, (other, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1):
        found.setdefault(other, Logprob(value, rank, decode(other)))
    return found
