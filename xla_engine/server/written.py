"""Endpoints whose answers consist of events, such as `/v1/responses`: a chat whose text is told in another form."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Scope

from xla_engine.openai.call import HttpCall
from xla_engine.openai.results import PAUSE, AnswerWriter, Builder, output_error
from xla_engine.outputs import RequestOutput
from xla_engine.server.errors import ended
from xla_engine.server.service import Submission


class Told(Builder, Protocol):
    """A builder whose answer can be streamed."""

    @property
    def response(self) -> dict[str, Any]:
        """The answer so far."""

    def begin(self) -> Iterator[dict[str, Any]]:
        """The events before the first token."""

    def failed(self, code: str, message: str) -> dict[str, Any]:
        """The last event of an answer that fails."""


class ToldForm(Protocol):
    """A form whose answers a writer makes. end: what ends a stream."""

    end: bytes

    def parse(self, raw: bytes, scope: Scope) -> HttpCall: ...

    def size(self, raw: bytes, scope: Scope) -> int: ...

    def shorter(self, call: HttpCall, without: int) -> HttpCall | None: ...

    def writer(self, call: HttpCall, name: str, submission: Submission) -> AnswerWriter[Any]:
        """The writer of an answer, whose builder is a `Told`."""

    def ended(self, call: HttpCall, writer: AnswerWriter[Any], submission: Submission) -> None:
        """Called with each answer that has a result, before its last event is sent."""


class Written:
    """Chats with requests and answers of another form."""

    def __init__(self, form: ToldForm) -> None:
        self._form = form
        self.parse, self.size, self.shorter = form.parse, form.size, form.shorter

    def answer(
        self, call: HttpCall, outputs: Sequence[RequestOutput], name: str, submission: Submission
    ) -> Iterator[bytes]:
        """The sum of the events."""
        writer = self._form.writer(call, name, submission)
        for _ in writer.events(outputs[0], int(time.time())):
            yield PAUSE
        self._form.ended(call, writer, submission)
        yield msgspec.json.encode(writer.builder.response)

    def stream(self, call: HttpCall, name: str, submission: Submission) -> ToldStream:
        return ToldStream(self._form, call, self._form.writer(call, name, submission), submission)


class ToldStream:
    """The events of one answer, then what ends the stream."""

    def __init__(
        self, form: ToldForm, call: HttpCall, writer: AnswerWriter[Any], submission: Submission
    ) -> None:
        self._form, self._call, self._writer, self._submission = form, call, writer, submission

    def begin(self) -> Iterator[bytes]:
        return map(_event, self._writer.builder.begin())

    def events(self, news: Sequence[tuple[int, RequestOutput]], *, whole: bool) -> Iterator[bytes]:
        for _, output in news:
            if (error := output_error(self._call.request, output)) is not None:
                failure = ended(error)
                yield _event(self._writer.builder.failed(failure.code, failure.message)) + self._form.end
                return
            for event in self._writer.events(output, int(time.time())):
                yield PAUSE if event is None else _event(event)
        if self._writer.ended:
            self._form.ended(self._call, self._writer, self._submission)
        if whole:
            yield self._form.end


def _event(value: Mapping[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
