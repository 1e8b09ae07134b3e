"""Parses the JSON of an OpenAI-compatible server into answers. Anything else raises `Malformed`."""

import json
from typing import Any

from xla_engine.same_bits.target import Choice, Token


class Malformed(Exception):
    """An answer that cannot be parsed; the message says why."""


def choices_of(answer: dict[str, Any], *, most: int | None = None) -> tuple[Choice, ...]:
    """The choices of a whole answer, by index. most: tokens that one of them may have."""
    given = answer.get("choices")
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise Malformed("an answer without choices")
    parts: dict[int, _Parts] = {}
    for place, each in enumerate(given):
        parts.setdefault(_index(each, place), _Parts()).add(each)
    return tuple(parts[index].choice(most) for index in sorted(parts))


def _index(choice: dict[str, Any], place: int) -> int:
    index = choice.get("index", place)
    if not isinstance(index, int) or not 0 <= index < 1024:
        raise Malformed("a choice with a wrong index")
    return index


class Collected:
    """The pieces of a streamed answer. most: tokens that it may have; times: when each piece came, in seconds."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._parts: dict[int, _Parts] = {}
        self._done = False
        self.times: list[float] = []

    def add(self, line: bytes, now: float) -> bool:
        """One line of server-sent events. True at the end."""
        if not line.startswith(b"data:"):
            return False
        data = line[5:].strip()
        if data == b"[DONE]":
            self._done = True
            return True
        try:
            event = json.loads(data)
            choices = event["choices"]
            for each in choices:
                self._parts.setdefault(_index(each, 0), _Parts()).add(each)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Malformed(f"a stream with the event {data[:200]!r}") from None
        if choices:
            self.times.append(now)
        if len(self.times) > 2 * self._most + 16:
            raise Malformed(
                f"a stream that goes on after {len(self.times)} pieces for max_tokens {self._most}"
            )
        return False

    def choices(self) -> tuple[Choice, ...]:
        if not self._done or not self._parts:
            raise Malformed("a stream that breaks off")
        return tuple(self._parts[index].choice(self._most) for index in sorted(self._parts))


class _Parts:
    """One choice, piece by piece."""

    def __init__(self) -> None:
        self._text = ""
        self._ids: list[Token] = []
        self._names: list[Token] = []
        self._logprobs: list[float] = []
        self._gaps: list[float] = []
        self._prompt: tuple[dict[str, float], ...] | None = None

    def add(self, choice: dict[str, Any]) -> None:
        try:
            self._text += str(choice.get("text") or "")
            self._ids += [int(each) for each in choice.get("token_ids") or ()]
            self._add_logprobs(choice.get("logprobs"))
            if choice.get("prompt_logprobs"):
                self._prompt = tuple(
                    {str(token): _number(found["logprob"]) for token, found in each.items()}
                    for each in choice["prompt_logprobs"][1:]
                )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise Malformed(f"a choice of an unknown format ({type(error).__name__})") from None

    def _add_logprobs(self, found: Any) -> None:
        if not found:
            return
        if "content" in found:  # the form of chats, which llama-server has here too
            found = {
                "tokens": [each.get("id", each["token"]) for each in found["content"]],
                "token_logprobs": [each["logprob"] for each in found["content"]],
                "top_logprobs": [
                    {str(place): top["logprob"] for place, top in enumerate(each.get("top_logprobs") or ())}
                    for each in found["content"]
                ],
            }
        self._names += [each if isinstance(each, int) else str(each) for each in found["tokens"]]
        self._logprobs += [_number(each) for each in found["token_logprobs"]]
        for tops in found.get("top_logprobs") or ():
            best = sorted((_number(each) for each in tops.values()), reverse=True)
            if len(best) > 1:
                self._gaps.append(best[0] - best[1])

    def choice(self, most: int | None) -> Choice:
        tokens = tuple(self._ids or self._names)
        if most is not None and len(tokens) > most:
            raise Malformed(f"{len(tokens)} tokens for max_tokens {most}")
        complete = bool(tokens) and len(self._logprobs) == len(tokens)
        return Choice(
            text=self._text,
            tokens=tokens,
            logprobs=tuple(self._logprobs) if complete else None,
            gaps=tuple(self._gaps) if complete and len(self._gaps) == len(tokens) else None,
            prompt_logprobs=self._prompt,
        )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Malformed("a log-probability that is not a number")
    return float(value)
