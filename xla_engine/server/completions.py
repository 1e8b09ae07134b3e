"""`/v1/completions`, `/v1/chat/completions` and the pooling endpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from starlette.types import Scope

from xla_engine.openai.answers import answer_pieces
from xla_engine.openai.call import HttpCall
from xla_engine.openai.chunks import DONE, ChunkWriter, event
from xla_engine.openai.results import output_error, result_body
from xla_engine.outputs import RequestOutput
from xla_engine.server.bodies import parse_call, read_json
from xla_engine.server.errors import ended
from xla_engine.server.generation import Generation
from xla_engine.server.service import Service, Submission


def completions(service: Service, url: str) -> Generation:
    """The endpoint of one path of `xla_engine.openai.fields.URLS`."""
    return Generation(service, Completions(service, url))


class Completions:
    """OpenAI's form of completions, chats and pooled prompts."""

    def __init__(self, service: Service, url: str) -> None:
        self._service, self._url = service, url

    def parse(self, raw: bytes, scope: Scope) -> HttpCall:
        """The call of a body. Raises ApiError."""
        service = self._service
        return parse_call(read_json(raw), self._url, service.defaults(), service.model_names)

    def size(self, raw: bytes, scope: Scope) -> int:
        return len(raw)

    def shorter(self, call: HttpCall, without: int) -> HttpCall | None:
        return None

    def answer(
        self, call: HttpCall, outputs: Sequence[RequestOutput], name: str, submission: Submission
    ) -> Iterator[bytes]:
        header = self._service.header()
        if call.request.pooling is not None:
            return iter((msgspec.json.encode(result_body(call.request, outputs, name, header)),))
        return answer_pieces(call, outputs, name, header)

    def stream(self, call: HttpCall, name: str, submission: Submission) -> ChunkStream:
        header = self._service.header()
        return ChunkStream(call, ChunkWriter(call, name, header, thinking=submission.thinking))


class ChunkStream:
    """Chunks of all choices, then the usage if requested, and the end marker."""

    def __init__(self, call: HttpCall, writer: ChunkWriter) -> None:
        self._call, self._writer = call, writer

    def begin(self) -> Iterator[bytes]:
        return iter(())

    def events(self, news: Sequence[tuple[int, RequestOutput]], *, whole: bool) -> Iterator[bytes]:
        for index, output in news:
            yield from self._writer.events(index, output)
            if (error := output_error(self._call.request, output)) is not None:
                yield event(ended(error).body()) + DONE
                return
        if whole:
            yield from self._writer.last_events()
