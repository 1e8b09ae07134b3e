"""`run --stream`: reads JSON lines, writes the events of many requests as they happen, each with its request's id.

Input, one object a line: a request as in a batch file (optionally with `"op": "submit"`), or

    {"op": "cancel", "id": "a"}
    {"op": "extend", "id": "a", "max_tokens": 16}    more tokens for a request that has ended
    {"op": "list"}
    {"op": "stats"}
    {"op": "step", "turns": 3}                       read the next line after this many turns of the engine
    {"op": "drain"}                                  read the next line when all requests have ended

Output, one object a line, numbered, and in strict order for each id:

    {"event": "delta", "id": "a", "index": 0, "token_ids": [17], "text": "de", "seq": 0}
    {"event": "finish", "id": "a", "finish_reasons": ["length"], "usage": {...}, "seq": 1}

Every request ends with exactly one `finish`, or with one `error` if it could not start. The text deltas of a choice
add up to its text; a character that spans tokens comes with the last of them. A control line is answered by an event
of its name. After `extend` there is one more `finish`. If the earlier end cut the text inside a character or a stop
string, a delta with `text_from` replaces the text sent from that position on.

When the input ends, live requests finish, and `{"event": "end"}` follows.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from xla_engine.batch.encodings import MAX_LINE_BYTES
from xla_engine.batch.lines import Line, read_lines
from xla_engine.batch.stream_controls import Controls, Names, SentRequest
from xla_engine.batch.submit import submit_prompt, whole_request
from xla_engine.batch.totals import RunTotals
from xla_engine.errors import EngineClosedError, InvalidRequestError, XlaEngineError
from xla_engine.openai.requests import LineError, LineRequest, explain, line_error, parse_object, parse_record
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.scheduler import QueueFullError
from xla_engine.utils.json_line import dump_line

if TYPE_CHECKING:
    from xla_engine.open_engine import EngineClient

MAX_UNFINISHED = 10_000  # live requests; further lines stay in the pipe
MAX_UNSENT = 16 * 2**20  # bytes of unread events at which no further request is started
_IDLE_SECONDS = 0.2  # time between checks for signals while no request is live


class EventStream:
    """Reads requests from one input and writes their events to one output, until the input ends.

    source, sink: binary files, open for reading and writing.
    defaults: sampling fields for requests that do not set them.
    on_turn: called after every engine step.
    keep_finished: number of finished requests to remember, so that they can be extended.
    max_unfinished, max_unsent: live requests, and bytes of unread events, at which no further request is started.
    """

    def __init__(
        self,
        engine: EngineClient,
        source: BinaryIO,
        sink: BinaryIO,
        *,
        defaults: Mapping[str, Any] | None = None,
        max_line_bytes: int = MAX_LINE_BYTES,
        keep_finished: int = 0,
        on_turn: Callable[[], None] | None = None,
        max_unfinished: int = MAX_UNFINISHED,
        max_unsent: int = MAX_UNSENT,
    ) -> None:
        self.totals = RunTotals()
        self._engine = engine
        self._source = source
        self._events = EventWriter(sink)
        self._defaults = dict(defaults or {})
        self._max_line_bytes = max_line_bytes
        self._on_turn = on_turn
        self._max_unfinished, self._max_unsent = max_unfinished, max_unsent
        self._arrived: queue.Queue[Line | OSError | None] = queue.Queue(maxsize=64)
        self._names = Names(keep_finished)
        self._live = self._names.live
        self._controls = Controls(engine, self._names, self._put)
        self._seq = 0
        self._ended = self._draining = False

    def run(self) -> RunTotals:
        """Run until the input and all requests have ended, the reader is gone, or the engine fails."""
        threading.Thread(target=self._read, name="xla-engine-stream-in", daemon=True).start()
        try:
            while self._events.failure is None:
                self._take_lines()
                if self._live:
                    self._turn()
                elif self._ended:
                    break
        except KeyboardInterrupt:
            self.totals.interrupted = True
        finally:
            self.totals.unwritten = len(self._live)
            for request_id in list(self._live):
                self._engine.abort(request_id)
        for live in self._live.values():  # after a second interrupt, or if the reader is gone
            self._finish_without_result(live, "abort")
        self._put({"event": "end", "requests": self.totals.done, "interrupted": self.totals.interrupted})
        self._events.close()
        self.totals.failure = self.totals.failure or self._events.failure
        return self.totals

    def interrupt(self) -> None:
        """For a signal handler: stop reading and finish live requests; the second call stops at once."""
        if self._draining:
            raise KeyboardInterrupt
        self.totals.interrupted = not self._ended
        self._draining = self._ended = True

    def custom_id(self, request_id: str) -> str | None:
        """The caller's id of an engine request of this stream."""
        live = self._live.get(whole_request(request_id))
        return None if live is None else live.name

    def _read(self) -> None:
        """The reader thread: puts lines until the input ends, then None or the error that ended it."""
        try:
            for line in read_lines(self._source, self._max_line_bytes):
                self._arrived.put(line)
            self._arrived.put(None)
        except (OSError, ValueError) as error:
            self._arrived.put(error if isinstance(error, OSError) else OSError(str(error)))

    def _take_lines(self) -> None:
        """Handle the lines that have arrived; wait for one if no request is live."""
        self._controls.settle()
        while not (self._ended or self._controls.holds) and len(self._live) < self._max_unfinished:
            if self._events.unsent >= self._max_unsent:
                if self._live:
                    return
                self._events.wait_until_below(self._max_unsent)
            line = self._next_line()
            if isinstance(line, queue.Empty):
                return
            if isinstance(line, Line):
                self._accept(line)
                self._controls.settle()
            else:
                self._ended, self.totals.failure = True, line

    def _next_line(self) -> Line | OSError | queue.Empty | None:
        try:
            return self._arrived.get_nowait() if self._live else self._arrived.get(timeout=_IDLE_SECONDS)
        except queue.Empty as empty:
            return empty

    def _accept(self, line: Line) -> None:
        number = line.number
        try:
            if line.raw is None:
                message = f"the line has {line.size} bytes; raise --max-line-bytes"
                self._error(line_error(number, "line_too_long", message))
                return
            record = parse_object(line.raw, number)
            if isinstance(record, LineError):
                self._error(record)
            elif (op := record.pop("op", "submit")) == "submit":
                self._submit(parse_record(record, number, self._defaults))
            else:
                self._controls.obey(op, record)
        except (InvalidRequestError, QueueFullError) as error:
            self._error(line_error(number, *explain(error)))
        except EngineClosedError as error:
            self._engine_died(error)

    def _submit(self, request: LineRequest | LineError) -> None:
        if request.custom_id in self._names.named:
            message = f"id {request.custom_id!r} is used by a running request; cancel it or choose another id"
            self._error(line_error(request.line, "duplicate_custom_id", message))
            return
        if isinstance(request, LineError):
            self._error(request)
            return
        if request.echo:
            raise InvalidRequestError("echo is not supported with --stream, which returns new tokens only")
        if len(request.prompts) > 1:
            raise InvalidRequestError("--stream accepts one prompt per line; give each prompt its own line")
        request_id = f"batch-{request.line}"  # as in a batch file, so that a line gets the same noise
        self._names.begin(SentRequest(request.custom_id, request_id))
        (prompt,) = request.prompts
        try:
            submit_prompt(
                self._engine, request, prompt, request_id, partial(self._not_taken, request, request_id)
            )
        except Exception as error:  # a bad request fails alone
            self._not_taken(request, request_id, error)
            if isinstance(error, EngineClosedError):
                self._engine_died(error)

    def _not_taken(self, request: LineRequest, request_id: str, error: Exception) -> None:
        self._names.drop(request_id)
        code, message = explain(error)
        self._error(line_error(request.line, code, message, request.custom_id))

    def _turn(self) -> None:
        try:
            outputs = self._engine.step()
            if not outputs and not self._engine.has_unfinished:
                raise XlaEngineError("the engine ended without a result for every request")
        except Exception as error:
            self._engine_died(error)
            return
        self._controls.turn()
        for output in outputs:
            if (live := self._live.get(output.request_id)) is not None:
                self._send(live, output)
        if self._on_turn is not None:
            self._on_turn()

    def _send(self, live: SentRequest, output: RequestOutput) -> None:
        for completion in output.outputs:
            self._send_delta(live, completion)
        if not output.finished:
            return
        live.texts = {completion.index: completion.text for completion in output.outputs}
        self._names.end(output.request_id)
        tokens = sum(len(completion.token_ids) for completion in output.outputs)
        usage = {"prompt_tokens": len(output.prompt_token_ids), "completion_tokens": tokens}
        reasons = [completion.finish_reason for completion in output.outputs]
        event = {"event": "finish", "id": live.name, "finish_reasons": reasons, "usage": usage}
        if output.error is not None:
            event["error"] = output.error
        self._put(event)
        before, live.counted = live.counted, tokens
        if before is not None:  # it was extended after its end
            self.totals.generated_tokens += tokens - before
        elif "error" in reasons:
            self.totals.failed["engine_error"] += 1
        else:
            self.totals.ok += 1
            self.totals.count(output)

    def _send_delta(self, live: SentRequest, completion: CompletionOutput) -> None:
        index = completion.index
        tokens, characters = live.tokens.get(index, 0), live.characters.get(index, 0)
        sent = live.texts.pop(index, None)
        if sent is not None:  # it was extended: some of the text sent at its end may have to be replaced
            characters = len(os.path.commonprefix([sent, completion.text]))  # noqa: RUF071, they are no paths
        new, text = completion.part(slice(tokens, None)), completion.text[characters:]
        is_behind = sent is not None and characters < len(sent)
        if not new.token_ids and not text and not is_behind:
            return
        live.tokens[index], live.characters[index] = len(completion.token_ids), len(completion.text)
        event = {
            "event": "delta",
            "id": live.name,
            "index": index,
            "token_ids": list(new.token_ids),
            "text": text,
        }
        if is_behind:
            event["text_from"] = characters
        event |= {name: list(map(_plain, values)) for name, values in new.columns().items()}
        self._put(event)

    def _engine_died(self, error: Exception) -> None:
        """End all live requests."""
        self.totals.failure, self._ended = error, True
        _, message = explain(error)
        for live in self._live.values():
            self._finish_without_result(live, "error", message)
        self._names.clear()

    def _finish_without_result(self, live: SentRequest, reason: str, message: str | None = None) -> None:
        event = {"event": "finish", "id": live.name, "finish_reasons": [reason], "usage": None}
        self._put(event if message is None else {**event, "error": message})
        self.totals.failed["aborted" if reason == "abort" else "engine_error"] += 1

    def _error(self, error: LineError) -> None:
        self._put(
            {
                "event": "error",
                "id": error.custom_id,
                "line": error.line,
                "code": error.code,
                "message": error.message,
            }
        )
        self.totals.failed[error.code] += 1

    def _put(self, event: Mapping[str, Any]) -> None:
        self._events.put(dump_line({**event, "seq": self._seq}))
        self._seq += 1


def _plain(value: Any) -> Any:
    """A token's value in an event. Of a token and its likeliest rivals, the log-probabilities that are finite."""
    if isinstance(value, Mapping):
        return {token_id: each.logprob for token_id, each in value.items() if each.logprob > -math.inf}
    return value


class EventWriter:
    """Writes lines in its own thread, so that a slow reader does not delay the engine. Loses no line.

    failure: the error that closed the pipe; None while it is open. unsent: bytes that the pipe has not yet taken.
    """

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink
        self._lines: deque[bytes] = deque()
        self.unsent = 0
        self._open = True
        self._changed = threading.Condition()
        self.failure: OSError | None = None
        self._thread = threading.Thread(target=self._write_all, name="xla-engine-stream-out", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Queue a line, and return at once."""
        with self._changed:
            self._lines.append(line)
            self.unsent += len(line)
            self._changed.notify_all()

    def wait_until_below(self, size: int) -> None:
        """Wait until fewer than `size` bytes are unsent or the pipe is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.unsent < size or self.failure is not None)

    def close(self) -> None:
        """Wait until all lines are written or the pipe is closed."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines or not self._open)
                if not self._lines:
                    return
                lines, self._lines = self._lines, deque()
            data = b"".join(lines)
            try:
                self._sink.write(data)
                self._sink.flush()
            except (OSError, ValueError) as error:  # ValueError: someone else closed the file
                with self._changed:
                    self.failure = error if isinstance(error, OSError) else OSError(str(error))
                    self._changed.notify_all()
                return
            with self._changed:
                self.unsent -= len(data)
                self._changed.notify_all()
