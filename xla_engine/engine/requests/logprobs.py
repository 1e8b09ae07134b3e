"""Log-probabilities of tokens by token id, built from the device's output when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar, overload

from xla_engine.errors import InvalidRequestError
from xla_engine.graphs.sampling.logprobs import TopLogprobs
from xla_engine.outputs import Logprob
from xla_engine.text.tokenizer import Tokenizer

S = TypeVar("S")
T = TypeVar("T")
# A token, its log-probability, and the most likely tokens at its position.
Score = tuple[int, float, TopLogprobs]


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
