"""Compares a request's result with the result alone: the same bits, or their beginning if it was ended early."""

from collections.abc import Iterable

import numpy as np

from xla_engine.outputs import CompletionOutput, Logprob, RequestOutput
from xla_engine.tools.soak.faults import PLANTED

OWN_ENDS = ("stop", "length", "error")


def difference(alone: RequestOutput, found: RequestOutput) -> str | None:
    """The difference in words; None if there is none."""
    for expected, got in zip(alone.outputs, found.outputs, strict=True):
        whole = got.finish_reason in OWN_ENDS and PLANTED not in str(found.error)
        if (what := _differs(expected, got, whole=whole)) is not None:
            return f"{what} of sequence {got.index}"
        if whole and _bits_of(alone.prompt_logprobs) != _bits_of(found.prompt_logprobs):
            return "log-probabilities of the prompt"
    return None


def _differs(alone: CompletionOutput, found: CompletionOutput, *, whole: bool) -> str | None:
    count = len(found.token_ids)
    if alone.token_ids[:count] != found.token_ids:
        return "tokens"
    if _bits((alone.logprobs or ())[:count]) != _bits(found.logprobs or ()):
        return "log-probabilities"
    if _bits_of((alone.top_logprobs or ())[:count]) != _bits_of(found.top_logprobs or ()):
        return "most likely tokens"
    if not whole:
        return None
    if len(alone.token_ids) != count:
        return "number of tokens"
    if (alone.finish_reason, alone.stop_reason) != (found.finish_reason, found.stop_reason):
        return f"end ({alone.finish_reason}, not {found.finish_reason})"
    return None if alone.text == found.text else "text"


def _bits_of(places: Iterable[dict[int, Logprob] | None] | None) -> list[object]:
    return [
        None if place is None else (*place, *_bits([each.logprob for each in place.values()]))
        for place in places or ()
    ]


def _bits(logprobs: Iterable[float]) -> list[int]:
    bits: list[int] = np.asarray(list(logprobs), np.float32).view(np.int32).tolist()
    return bits
