"""How large an answer may become, told from its request before any of it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from xla_engine.batch.requests import LineRequest

_EXPECTED_TOKENS = 2048  # of a sequence whose request allows more


def answer_values(request: LineRequest, prompt_lengths: Sequence[int], longest: int) -> int:
    """Values that the answer has at most: its tokens, each counted once and once more for each of its `logprobs`.

    With `echo` every choice repeats its prompt. prompt_lengths: in tokens, by prompt. longest: tokens of prompt and
    answer together that the model takes.
    """
    params, total = request.params, 0
    each = 1 + (params.logprobs or 0)
    for length in prompt_lengths:
        new = max(longest - length, 0) if params.max_tokens is None else params.max_tokens
        total += params.n * each * (new + (length if request.echo else 0))
        if params.prompt_logprobs is not None and not request.echo:
            total += length * (1 + params.prompt_logprobs)
    return total


def held_values(request: LineRequest, prompt_lengths: Sequence[int]) -> int:
    """Log-probabilities that the server may have to hold until the answer is sent; prompts are held once.

    A sequence that may have very many tokens is counted with a usual number of them.
    """
    params, total = request.params, 0
    if params.prompt_logprobs is not None:
        total += sum(prompt_lengths) * (1 + params.prompt_logprobs)
    if params.logprobs is not None:
        expected = min(params.max_tokens or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
        total += len(prompt_lengths) * params.n * expected * (1 + params.logprobs)
    return total
