"""A thread that runs an engine's turns and passes each request's outputs to a callback."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from xla_engine.engine.protocol import Engine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError
from xla_engine.observability.log import engine_log
from xla_engine.outputs import RequestOutput
from xla_engine.prompts import Prompt
from xla_engine.sampling_params import SamplingParams

OnOutput = Callable[[RequestOutput], object]


class _Job:
    """One request: its callback, whether the callback has failed, and whether the request has ended."""

    def __init__(self, on_output: OnOutput) -> None:
        self.on_output = on_output
        self.failed = self.ended = False
        self.collector = OutputCollector()


class Callbacks:
    """Runs the turns of an engine in a background thread until `stop`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.watches = True  # requests with deadlines may arrive while turns run
        self._news: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None only wakes the thread
        self._lock = threading.Lock()  # never held while the engine or a caller's function runs
        self._jobs: dict[str, _Job] = {}
        self._submitting = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="xla-engine callbacks", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        on_output: OnOutput,
        *,
        only_finished: bool,
        **options: Any,
    ) -> str:
        """Queue a prompt; see `LLM.submit`."""
        job = _Job(on_output)
        job.collector = OutputCollector(lambda: self._news.put(job), every_token=not only_finished)
        with self._lock:
            if self._stopping:
                raise EngineClosedError("stop() was called; call start() again")
            self._submitting += 1
        name = None
        try:
            name = self._engine.submit(prompt, params, collector=job.collector, **options)
        finally:
            with self._lock:
                self._submitting -= 1
                if name is not None and not job.ended:
                    self._jobs[name] = job
            self._news.put(None)
        return str(name)

    def stop(self, timeout_s: float | None) -> None:
        """Refuse new requests and end the thread when all have ended; abort those left after `timeout_s` seconds."""
        with self._lock:
            self._stopping = True
        self._news.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(timeout_s)
        while self._thread.is_alive():
            with self._lock:
                names = list(self._jobs)
            for name in names:
                self._engine.abort(name)
            self._thread.join(0.1)  # abort again: another thread may still be in `submit`

    def _run(self) -> None:
        while not self._is_over():
            try:
                job = self._news.get(block=not self._engine.has_work)
            except queue.Empty:
                self._turn()
                continue
            if job is not None:
                self._tell(job)

    def _is_over(self) -> bool:
        with self._lock:
            return self._stopping and not self._jobs and not self._submitting

    def _turn(self) -> None:
        try:
            self._engine.advance()
        except EngineClosedError:
            pass  # every request has ended already
        except Exception as error:
            self._engine.fail(f"the engine's loop failed: {type(error).__name__}: {error}")

    def _tell(self, job: _Job) -> None:
        with self._engine.lock:
            outputs = [request.output() for request in job.collector.take()]
        for output in outputs:
            if not job.failed:
                try:
                    job.on_output(output)
                except Exception:
                    job.failed = True
                    engine_log.exception(
                        "request %r is aborted because its on_output failed", output.request_id
                    )
                    self._engine.abort(output.request_id)
            if output.finished:
                with self._lock:
                    job.ended = True
                    if self._jobs.get(output.request_id) is job:  # a new request may have the id by now
                        del self._jobs[output.request_id]
