"""Requests, answers, and the targets that answer."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol, runtime_checkable

# Prompts are pieces of this text.
TEXT = files("xla_engine").joinpath("equivalence/prompts.txt").read_text(encoding="utf-8")

Prompt = str | tuple[int, ...]  # text, or token ids
Token = int | str  # an id, or the text of a token where the target does not give ids


class TargetError(ValueError):
    """The target cannot be asked, or not any more; the message says why and what to do."""


class LimitReached(TargetError):
    """A limit on requests, tokens or seconds keeps the next request from being sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    score: return the log-probabilities of the prompt. delay_s: seconds to wait before
    it is sent, counted from the call of `run`.
    """

    prompt: Prompt
    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    n: int = 1
    stream: bool = False
    score: bool = False
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a request.

    tokens: empty if only text is visible. logprobs: of the tokens. gaps: between the two largest log-probabilities at
    each token. prompt_logprobs: at each token of the prompt but the first, by token id.
    """

    text: str = ""
    tokens: tuple[Token, ...] = ()
    logprobs: tuple[float, ...] | None = None
    gaps: tuple[float, ...] | None = None
    prompt_logprobs: tuple[dict[str, float], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back.

    peers: other requests that were proven to be generating at the same time; None if that is not visible.
    cached_tokens: of the prompt, found in a prefix cache; None if that is not visible.
    seconds: from sending to the end. error: why there are no choices.
    """

    choices: tuple[Choice, ...] = ()
    peers: int | None = None
    cached_tokens: int | None = None
    seconds: float = 0.0
    error: str | None = None


@runtime_checkable
class Target(Protocol):
    """Something that answers.

    features: of "ids" (prompts may be token ids), "stream", "score", "cut" (follows `max_tokens`), "seed", "n".
    corpus: token ids to make prompts of, if it has "ids".
    """

    @property
    def features(self) -> frozenset[str]: ...

    @property
    def corpus(self) -> tuple[int, ...]: ...

    def run(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        """Answers in the order of the requests, which all run at the same time; one request runs alone."""

    def describe(self) -> dict[str, Any]:
        """What a report says of it."""

    def reproduce(self, ask: Ask) -> str | None:
        """A command that sends this request."""


class CallableTarget:
    """A Python function as a target.

    function: takes a list of prompts and returns an answer for each: a text, a sequence of token ids, or a pair of
        token ids and their log-probabilities. Of the keyword arguments `max_tokens`, `temperature` and `seed` it
        receives those that its signature has, each a list with one value for each prompt; without `temperature` it is
        expected to be greedy.
    """

    corpus: tuple[int, ...] = ()

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        self._function = function
        names = inspect.signature(function).parameters
        self._takes = [name for name in ("max_tokens", "temperature", "seed") if name in names]
        features = {"cut"} if "max_tokens" in self._takes else set()
        self.features = frozenset(
            features | ({"seed"} if {"temperature", "seed"} <= set(self._takes) else set())
        )

    def run(self, asks: Sequence[Ask]) -> Sequence[Answer]:
        options = {name: [getattr(ask, name) for ask in asks] for name in self._takes}
        given = list(self._function([ask.prompt for ask in asks], **options))
        if len(given) != len(asks):
            raise TargetError(
                f"the function returned {len(given)} answers to {len(asks)} prompts; return one for each"
            )
        return [Answer(choices=(_choice(each),), peers=len(asks) - 1) for each in given]

    def describe(self) -> dict[str, Any]:
        return {"target": getattr(self._function, "__qualname__", repr(self._function))}

    def reproduce(self, ask: Ask) -> str | None:
        return None


def _choice(given: Any) -> Choice:
    if isinstance(given, Choice):
        return given
    if isinstance(given, str):
        return Choice(text=given)
    try:
        if isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], int):
            return Choice(tokens=tuple(given[0]), logprobs=tuple(float(each) for each in given[1]))
        return Choice(tokens=tuple(given))
    except (TypeError, ValueError):
        raise TargetError(
            f"the function returned {type(given).__name__} for a prompt; return a text, token ids, or a pair of token "
            "ids and log-probabilities"
        ) from None
