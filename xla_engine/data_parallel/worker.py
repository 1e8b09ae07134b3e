"""The main program of an engine's process: reads commands from standard input, writes messages to a pipe."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

from xla_engine.data_parallel.wire import Message, SentOutput, config_of, decode, encode, news_of
from xla_engine.engine.protocol import SHADOW_S
from xla_engine.errors import InvalidRequestError, XlaEngineError

if TYPE_CHECKING:
    from xla_engine.engine.batch_engine import XlaBatchEngine
    from xla_engine.model_loader.peft.request import LoRARequest

STATS_EVERY_S = 0.25


def main(results: int) -> None:
    """Run until the parent says so or is gone. results: the file descriptor to write to."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles both, and lets requests finish
        signal.signal(number, signal.SIG_IGN)
    out = os.fdopen(results, "wb", buffering=0)
    hello = decode(sys.stdin.buffer.readline() or b'{"gone": true}')
    if "gone" in hello:
        return
    if hello["cores"]:
        os.sched_setaffinity(0, hello["cores"])  # before any library counts the cores
    from xla_engine.engine.batch_engine import XlaBatchEngine

    try:
        engine = XlaBatchEngine.from_pretrained(hello["model"], config_of(hello["config"]))
    except Exception as error:
        code = error.code if isinstance(error, XlaEngineError) else None
        out.write(encode({"op": "failed", "code": code, "message": f"{type(error).__name__}: {error}"}))
        return
    _Server(engine, out).run()
    os._exit(0)  # do not wait for the device's threads


class _Entry:
    """A live request: its run number, how much of it was sent, and what adds it to `news` with new output."""

    def __init__(self, number: int, name: str, news: list[_Entry], *, every_token: bool) -> None:
        from xla_engine.engine.requests.output_collector import OutputCollector

        self.number, self.name = number, name
        self.sent = SentOutput()
        self.collector = OutputCollector(lambda: news.append(self), every_token=every_token)


class _Server:
    """One engine and its requests, by the parent's run number."""

    def __init__(self, engine: XlaBatchEngine, out: BinaryIO) -> None:
        self._engine, self._out = engine, out
        self._commands: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._entries: dict[int, _Entry] = {}
        self._news: list[_Entry] = []
        self._told = 0.0

    def run(self) -> None:
        engine = self._engine
        self._tell(
            {
                "op": "ready",
                "config": asdict(engine.config),
                "identity": asdict(engine.identity()),
                "max_model_len": engine.max_model_len,
                "limits": engine.limits(),
                "scheduler": asdict(engine.scheduler.config),
                "stats": asdict(engine.stats()),
                "snapshot": asdict(engine.snapshot()),
            }
        )
        threading.Thread(target=self._listen, daemon=True).start()
        while self._obey():
            self._turn()

    def _listen(self) -> None:
        """Read commands, also while a step runs, so that the parent never blocks on this process."""
        for line in sys.stdin.buffer:
            self._commands.put(decode(line))
        self._commands.put(None)

    def _obey(self) -> bool:
        """Execute pending commands; wait for one if there is no other work. Returns false at the end."""
        if not self._engine.has_work:
            while self._commands.empty() and self._engine.step_shadow():
                time.sleep(SHADOW_S)
            self._tell_state()
        while not self._commands.empty() or not self._engine.has_work:
            command = self._commands.get()
            if command is None or command["op"] == "close":
                return False
            getattr(self, f"_on_{command['op']}")(command)
        return True

    def _on_submit(self, command: Message) -> None:
        from xla_engine.sampling_params import SamplingParams

        number, name = command["number"], command["id"]
        entry = _Entry(number, name, self._news, every_token=command["every_token"])
        try:
            params = SamplingParams.from_mapping(command["params"])
            adapter = command.get("adapter")
            self._engine.submit(
                tuple(command["tokens"]),
                params,
                request_id=name,
                collector=entry.collector,
                lora_request=None if adapter is None else self._loaded(adapter),
                **command["options"],
            )
        except Exception as error:  # the parent validated the request, but a failure is still reported
            self._tell({"op": "refused", "number": number, "message": f"{type(error).__name__}: {error}"})
            return
        self._entries[number] = entry

    def _loaded(self, told: Message) -> LoRARequest:
        """Load an adapter unless it is loaded. Raises InvalidRequestError if its files have changed."""
        from xla_engine.model_loader.peft.request import LoRARequest

        request = LoRARequest(**told["request"])
        if self._engine.adapters.of(request).key != told["key"]:
            self._engine.remove_lora(request.lora_int_id)
            raise InvalidRequestError(
                f"the files of adapter {request.lora_name!r} have changed since it was first loaded; give another "
                f"lora_int_id, or remove the adapter first (remove_lora)"
            )
        return request

    def _on_load(self, command: Message) -> None:
        with contextlib.suppress(InvalidRequestError):  # the first request that uses it gets the error
            self._loaded(command["adapter"])

    def _on_unload(self, command: Message) -> None:
        self._engine.remove_lora(command["adapter"])

    def _on_stream(self, command: Message) -> None:
        """Send every token of these requests from now on, or only their ends."""
        for number in command["numbers"]:
            if (entry := self._entries.get(number)) is not None:
                entry.collector.every_token = command["every_token"]

    def _on_abort(self, command: Message) -> None:
        entry = self._entries.pop(command["number"], None)
        if entry is not None:
            self._engine.abort(entry.name)

    def _on_snapshot(self, command: Message) -> None:
        self._tell({"op": "snapshot", "snapshot": asdict(self._engine.snapshot())})

    def _on_reset(self, command: Message) -> None:
        self._engine.reset_prefix_cache()

    def _turn(self) -> None:
        self._engine.advance()
        if (cause := self._engine.closed_because) is not None:
            # Its requests can run elsewhere, so they are not told.
            print(f"an engine ended: {cause}", file=sys.stderr, flush=True)
            os._exit(1)
        entries, self._news[:] = list(self._news), []
        news: list[Any] = []
        for entry in entries:
            for request in entry.collector.take():
                if entry.number not in self._entries:  # aborted
                    continue
                output = request.output()
                news.append({"number": entry.number, **news_of(output, entry.sent)})
                if output.finished:
                    del self._entries[entry.number]
        if news:
            self._tell({"op": "news", "news": news, "running": self._engine.num_running})
        if time.monotonic() - self._told > STATS_EVERY_S:
            self._tell_state()

    def _tell_state(self) -> None:
        self._told = time.monotonic()
        self._tell(
            {"op": "stats", "stats": asdict(self._engine.stats()), "running": self._engine.num_running}
        )

    def _tell(self, message: Message) -> None:
        view = memoryview(encode(message))
        while view:
            view = view[self._out.write(view) :]
