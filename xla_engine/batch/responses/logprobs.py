"""Log-probabilities of a response: each token's stand in the message that has its text."""

from collections.abc import Iterable, Sequence
from typing import Any

from xla_engine.batch.requests import LineRequest
from xla_engine.batch.token_text import TokenText
from xla_engine.text.parsers.formats import Plain
from xla_engine.text.parsers.scan import Content, Event


class MessageLogprobs:
    """Finds the message of each token by reading the text a second time, token by token.

    Tokens of reasoning, calls and tags are in no message. A token without text belongs to what follows it, and at the
    end of the text to what is before it.
    """

    def __init__(self, request: LineRequest, tokenizer: TokenText, *, thinking: bool) -> None:
        """thinking: the prompt ended in the opening tag of the reasoning."""
        parser = None if request.reading is None else request.reading.parser(thinking=thinking)
        self._parser = parser or Plain()
        self._text = tokenizer.incremental(request.params.skip_special_tokens)
        self._untold: list[tuple[str, Any]] = []  # text and entry of tokens since the last event
        self._messages: list[list[Any]] = []
        self._in_message = False

    def add(self, token_ids: Sequence[int], entries: Iterable[Any]) -> None:
        """Read more tokens. entries: the log-probabilities of each."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            text = self._text.push(token_id)
            self._untold.append((text, entry))
            self._read(self._parser.feed(text))

    def finish(self) -> None:
        """The text has ended."""
        self._read(self._parser.finish())
        if self._in_message:
            self._messages[-1] += [entry for text, entry in self._untold if not text]
        self._untold = []

    def take(self, message: int) -> list[Any]:
        """The entries of the message of this number that were not taken before."""
        if message >= len(self._messages):
            return []
        found, self._messages[message] = self._messages[message], []
        return found

    def _read(self, events: Iterable[Event]) -> None:
        told, tokens = False, self._untold
        for event in events:
            told, begins = True, not self._in_message
            self._in_message = isinstance(event, Content)
            if isinstance(event, Content):
                if begins:
                    self._messages.append([])
                self._messages[-1] += _last(tokens, len(event.text))
                tokens = []
        if told:
            self._untold = []


def _last(tokens: Sequence[tuple[str, Any]], characters: int) -> list[Any]:
    """The entries of the last tokens whose texts have this many characters, and of those without text before them."""
    begin = len(tokens)
    while begin and (characters > 0 or not tokens[begin - 1][0]):
        begin -= 1
        characters -= len(tokens[begin][0])
    return [entry for _, entry in tokens[begin:]]
