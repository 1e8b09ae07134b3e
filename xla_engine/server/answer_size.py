"""Upper bounds on the size of an answer, computed from its request before anything runs."""

from collections.abc import Sequence

from xla_engine.batch.requests import LineRequest

_EXPECTED_TOKENS = 2048  # assumed for a sequence that may have more


def answer_values(request: LineRequest, prompt_lengths: Sequence[int], longest: int) -> int:
    """The most values that the answer can have: each token counts one, plus one for each of its `logprobs`.

    With `echo` every choice repeats its prompt. prompt_lengths: tokens of each prompt. longest: the model's limit
    on prompt plus answer, in tokens.
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
    """The number of log-probabilities that the server may hold until the answer is sent; each prompt counts once.

    A sequence counts as at most `_EXPECTED_TOKENS` tokens.
    """
    params, total = request.params, 0
    if params.prompt_logprobs is not None:
        total += sum(prompt_lengths) * (1 + params.prompt_logprobs)
    if params.logprobs is not None:
        expected = min(params.max_tokens or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
        total += len(prompt_lengths) * params.n * expected * (1 + params.logprobs)
    return total
