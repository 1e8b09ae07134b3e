"""The sampled tokens of a sequence, and what users read beside each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.sampling.logprobs import TopLogprobs
from xla_engine.outputs import Logprob
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import Sample
from xla_engine.text.tokenizer import Tokenizer

S = TypeVar("S")
T = TypeVar("T")
Sink = tuple[Callable[[int], None], Callable[[float], None]]  # take a token, and its time
# A token, its log-probability, and the most likely tokens at its position.
Score = tuple[int, float, TopLogprobs]


class SampledTokens:
    """Columns with one entry for each token.

    ids: the tokens. times: when each was read from the device, on the engine's clock.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._params, self._tokenizer = params, tokenizer
        self.ids: list[int] = []
        self.times: list[float] = []
        self._logprobs: list[float] = []
        self._tops: list[Score] = []
        self._read: list[dict[int, Logprob]] = []  # of the first of `_tops`, once `whole` has made them

    def copy(self, params: SamplingParams) -> SampledTokens:
        """The same tokens, to go on from with other parameters."""
        other = SampledTokens(params, self._tokenizer)
        other.ids, other.times = list(self.ids), list(self.times)
        other._logprobs, other._tops, other._read = list(self._logprobs), list(self._tops), list(self._read)
        return other

    @property
    def sink(self) -> Sink | None:
        """Takes a token and its time; None if that is not all that is kept of it."""
        return None if self._params.logprobs is not None else (self.ids.append, self.times.append)

    def append(self, sample: Sample, now: float) -> None:
        self.ids.append(sample.token_id)
        self.times.append(now)
        if self._params.logprobs is not None and sample.logprob is not None:
            self._logprobs.append(sample.logprob)
            if isinstance(sample.extra, TopLogprobs):
                self._tops.append((sample.token_id, sample.logprob, sample.extra))

    def columns(self, begin: int) -> dict[str, Any]:
        """The fields of `CompletionOutput` that have one value for each token, from token `begin` on."""
        new = slice(begin, None)
        return {
            "token_ids": tuple(self.ids[new]),
            "logprobs": None if self._params.logprobs is None else tuple(self._logprobs[new]),
            "top_logprobs": MadeWhenRead(self._tops[new], self._by_id) if self._params.logprobs else None,
        }

    def whole(self) -> dict[str, Any]:
        """`columns` of all tokens, and the fields that are computed from these."""
        columns = self.columns(0)
        if columns["logprobs"] is not None:
            columns["cumulative_logprob"] = sum(columns["logprobs"])
        if columns["top_logprobs"] is not None:
            self._read += columns["top_logprobs"][len(self._read) :]
            columns["top_logprobs"] = tuple(self._read)
        return columns

    def _by_id(self, score: Score) -> dict[int, Logprob]:
        return by_id(*score, self._tokenizer)


class MadeWhenRead(Sequence[T], Generic[S, T]):
    """A lazy sequence: applies `make` to a source each time the item is read.

    The dicts of `by_id` take three times the memory of their scores and twenty times as many objects, which slow
    garbage collection down.
    """

    def __init__(self, sources: Sequence[S], make: Callable[[S], T]) -> None:
        self._sources = sources
        self._make = make

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> MadeWhenRead[S, T]: ...
    def __getitem__(self, place: int | slice) -> T | MadeWhenRead[S, T]:
        if isinstance(place, slice):
            return MadeWhenRead(self._sources[place], self._make)
        return self._make(self._sources[place])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, self._sources)


def by_id(token_id: int, logprob: float, top: TopLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """`Logprob`s by token id: the sampled token first, then the most likely ones."""

    def decode(token_id: int) -> str | None:
        try:
            return None if tokenizer is None else tokenizer.token_string(token_id)
        except InvalidRequestError:  # the tokenizer cannot decode this token alone
            return None

    found = {token_id: Logprob(logprob, top.rank, decode(token_id))}
    for rank, (other, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1):
        found.setdefault(other, Logprob(value, rank, decode(other)))
    return found
