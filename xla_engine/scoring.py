"""How likely a model finds given texts: the log-likelihood of continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import content_of, prompt_list, token_ids_of
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.tokenizer import Tokenizer

TextOrIds = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The log-likelihood of one continuation after its context.

    logprob: sum of `token_logprobs`, natural logarithm.
    is_greedy: whether greedy decoding would have written it.
    token_ids: of the continuation.
    token_logprobs: one per token.
    num_cached_tokens: tokens of the context that were not computed.
    """

    logprob: float
    is_greedy: bool
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    num_cached_tokens: int


def score_requests(
    contexts: TextOrIds | Sequence[TextOrIds],
    continuations: TextOrIds | Sequence[TextOrIds],
    tokenizer: Tokenizer | None,
) -> list[tuple[list[int], SamplingParams]]:
    """`score_request` of each pair; one context may serve all. Raises InvalidRequestError naming the bad pair."""
    stems, rests = prompt_list(contexts), prompt_list(continuations)
    stems = stems * len(rests) if len(stems) == 1 else stems
    if len(stems) != len(rests):
        raise InvalidRequestError(
            f"{len(stems)} contexts for {len(rests)} continuations; give one or {len(rests)}"
        )
    pairs = []
    for index, (stem, rest) in enumerate(zip(stems, rests, strict=True)):
        try:
            pairs.append(score_request(content_of(stem), content_of(rest), tokenizer))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"pair {index}: {error}") from error
    return pairs


def score_request(
    context: TextOrIds, continuation: TextOrIds, tokenizer: Tokenizer | None
) -> tuple[list[int], SamplingParams]:
    """The prompt that scores a continuation, and its parameters.

    Of texts, the blanks at the end of the context are tokenised with the continuation, as models see them, and the
    continuation's tokens are those of the whole text behind as many as the context has; where that leaves none, each
    is tokenised by itself. Raises InvalidRequestError.
    """
    if isinstance(context, str) != isinstance(continuation, str):
        raise InvalidRequestError("context and continuation must both be text or both be token ids")
    if isinstance(context, str) and isinstance(continuation, str):
        if tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer; give token ids")
        stem = context.rstrip()
        before = tokenizer.encode(stem)
        begin, ids = len(before), tokenizer.encode(context + continuation)
        if len(ids) <= begin:
            ids = before + tokenizer.encode(context[len(stem) :] + continuation, add_special_tokens=False)
    else:
        begin = len(context)
        ids = [*token_ids_of(context), *token_ids_of(continuation)]
    if begin < 1:
        raise InvalidRequestError(
            "the context is empty; the first token has no probability. Give one token at least"
        )
    if len(ids) <= begin:
        raise InvalidRequestError("the continuation is empty; give one token at least")
    return ids, SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        prompt_logprobs=1,
        logprobs_start=begin,
    )


def score_of(output: RequestOutput, begin: int) -> Score:
    """The score of a request that `score_request` made, whose continuation begins at position `begin`."""
    ids = output.prompt_token_ids[begin:]
    found = [each for each in (output.prompt_logprobs or ())[begin:] if each is not None]
    if output.error is not None or len(found) != len(ids):
        raise InvalidRequestError(
            f"request {output.request_id} was not scored: {output.error or 'it was aborted'}"
        )
    tokens = [each[token] for each, token in zip(found, ids, strict=True)]
    return Score(
        logprob=sum(each.logprob for each in tokens),
        is_greedy=all(len(each) == 1 for each in found),  # the likeliest token is the token itself
        token_ids=tuple(ids),
        token_logprobs=tuple(each.logprob for each in tokens),
        num_cached_tokens=output.num_cached_tokens,
    )
