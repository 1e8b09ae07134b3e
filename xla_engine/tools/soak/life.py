"""One life of an engine: rounds of requests, their callers, and its end.

Callers send requests, read the outputs, and disturb the engine, for example by aborts. The callers of
`StepCallers` take turns in calling `XlaBatchEngine.step`; those of `TaskCallers` are asyncio tasks that read from an
`AsyncLLM`.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

from xla_engine.async_llm import AsyncLLM
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.equivalence.verify import samples_of, tops
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.observability.observer import Observer
from xla_engine.outputs import RequestOutput
from xla_engine.runner.runner import Runner
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import NO_TOKEN, QueueFullError
from xla_engine.tools.soak.faults import (
    PLANTED,
    STEP_TIMEOUT_S,
    Clock,
    FaultyDevice,
    FaultyTokenizer,
    PlantedInterrupt,
)
from xla_engine.tools.soak.report import SoakReport
from xla_engine.tools.soak.requests import SoakRequest, bad_requests, draw_requests, stems
from xla_engine.utils.comparison import TokenSample, first_difference

ENDS = ("drain", "hang", "close", "lost")
OWN_ENDS = ("stop", "length", "error")
REQUESTS = 24  # of a round
# One of this many requests runs again alone and is compared, and so does each with an error that was not planted.
_COMPARED_SHARE = 6
_PATIENCE = 100_000  # turns after which a round has failed because a caller still waits, if callers are few
_PATIENCE_EACH = 1_500  # the same for each of many callers
_TURN_S = 0.001  # how often tasks look whether they are due, in seconds
_DRAIN_S = 0.05


class Life:
    """An engine from start to end. All that is drawn follows from `seed`; what happens is added to `report`.

    engine: with faults under and above it: `device` and `clock`. end: one of `ENDS`. requests: of each round.
    has_tasks: requests go through `AsyncLLM`. Then steps are not interrupted: that ends the event loop itself.
    live: the requests of a round that were accepted, by name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: FaultyTokenizer | None,
        config: EngineConfig,
        seed: str,
        report: SoakReport,
        *,
        end: str,
        requests: int,
        has_tasks: bool,
    ) -> None:
        self.end = end
        self.report = report
        self.draw = random.Random(seed)
        self.live: dict[str, SoakRequest] = {}
        self._requests = requests
        self._seed = seed
        self._tokenizer = tokenizer
        self._ended: Counter[str] = Counter()  # by sequence: how often the engine said so
        self.engine = engine = XlaBatchEngine(checkpoint, tokenizer, config)
        engine.clock = self.clock = Clock()
        runner = engine.runner
        assert isinstance(runner, Runner), "the soak test runs decoders"
        self.device = FaultyDevice(runner, self.clock, random.Random(f"{seed}/faults"), report.counts)
        self.device.interrupts = not has_tasks
        engine.state.runner = self.device  # type: ignore[assignment]  # it passes on what it does not fail
        engine.observers.add(Observer(ended=lambda name, _: self._ended.update([name])))
        engine.state.waiter.sleep = self.device.sleep
        self._llm = AsyncLLM.from_engine(engine) if has_tasks else None
        self._stems = stems(engine, self.draw)
        self._compiles = engine.stats().compiles_after_warmup

    def problem(self, what: str) -> None:
        """Note what broke."""
        self.report.problems.append(f"{self._seed}, {what}")

    def run_round(self, number: int, *, last: bool) -> None:
        """Run the requests of one round to their ends, check that nothing is left of them, and run some alone.

        last: the engine ends in the middle of it.
        """
        name = f"round {number}"
        requests = draw_requests(self.engine, self.draw, self._requests, f"{number}", self._stems)
        self.device.active = True
        self.engine.lag = self.draw.choice((0, 1, 1, 2))
        self.live.clear()
        try:
            asyncio.run(self._run(requests, last=last))
        except Exception as error:
            self.problem(f"{name}: {type(error).__name__}: {error}")
            return
        finally:
            self.device.active = False
            self.device.release()
            self.device.poison = {}
        self.report.counts["rounds"] += 1
        for request in self.live.values():
            for problem in self._look_at(request, ends_with_engine=last):
                self.problem(f"{name}, request {request.name}: {problem}")
        if self.engine.closed_because is None:
            for problem in self._left_behind():
                self.problem(f"{name}: {problem}")
            for problem in self._differences():
                self.problem(f"{name}, request {problem}")
        elif not last:
            self.problem(f"{name}: the engine is closed: {self.engine.closed_because}")
        self.device.hits.clear()

    def finish(self) -> None:
        """Close the engine and count what it did."""
        found, counters = self.engine.stats(), self.engine.snapshot().counters
        self.engine.close()
        if self._llm is not None:
            asyncio.run(self._llm.close())
        self.report.counts.update(
            {
                "engines": 1,
                "tokens": found.generation_tokens,
                "steps": found.steps,
                "steps that hung": self.end == "hang",
                "preempted": counters.preemptions,
                "tokens found in the cache": counters.cached_tokens,
                "drafts checked": found.drafted_tokens,
            }
        )

    async def _run(self, requests: list[SoakRequest], *, last: bool) -> None:
        engine, waiting = self.engine, requests[::-1]
        end_turn = self.draw.randrange(2, 10) if last else None
        callers = StepCallers(self) if self._llm is None else TaskCallers(self, self._llm)
        turn = 0
        # Counts turns and not the time, which passes while the process is stopped.
        for _ in range(max(_PATIENCE, _PATIENCE_EACH * len(requests))):
            if engine.closed_because is not None:
                waiting.clear()
            if not waiting and not callers.are_busy:
                break
            if waiting and not engine.has_unfinished:
                turn = max(turn, waiting[-1].turn)
            while waiting and waiting[-1].turn <= turn:
                callers.submit(waiting.pop())
            for request in list(self.live.values()):
                if request.abort_turn == turn:
                    callers.abort(request)
                if request.preempt is not None and request.preempt[0] == turn:
                    engine.preempt(request.name, how=request.preempt[1], to_back=self.draw.random() < 0.3)
            if turn == end_turn and not self._fail_for_good():
                waiting.clear()
                for request in requests:
                    request.aborted = True  # unless it has ended before
                await callers.end()
            await callers.turn(turn)
            turn += 1
        else:
            raise TimeoutError(f"some of these still wait: {', '.join(self.live)}")
        callers.finish()

    def _fail_for_good(self) -> bool:
        """Let the device hang or be lost, if that is how the engine is to end; whether it is."""
        if self.end == "hang":
            self.device.hang_after(self.draw.randrange(4))
        elif self.end == "lost":
            self.device.lose()
        return self.end in ("hang", "lost")

    def prepare(self, request: SoakRequest) -> None:
        """Plant what goes wrong with a request that is about to be sent, and send a bad one before some."""
        if self.draw.random() < 0.15:
            self._submit_bad(request)
        if self._tokenizer is not None:
            self._tokenizer.tokens_left = request.text_fails
        if request.poison and not self.device.poison:
            self.device.poison = dict.fromkeys(request.sequences, request.poison == "decode")

    def _submit_bad(self, request: SoakRequest) -> None:
        found = self.engine.snapshot()
        live = next(iter(found.waiting), None)
        arguments = dict(
            self.draw.choice(bad_requests(self.engine, None if live is None else live.request_id))
        )
        try:
            params = SamplingParams.from_mapping(arguments.pop("params", {}))
            self.engine.submit(arguments.pop("prompt"), params, **arguments)
        except InvalidRequestError:
            self.report.counts["refused"] += 1
        else:
            self.problem(f"before request {request.name}: not refused: {arguments}")
        if self.engine.snapshot().counters.submitted != found.counters.submitted:
            self.problem(f"before request {request.name}: refused, but queued: {arguments}")

    def read(self, output: RequestOutput) -> None:
        """Note an output of a live request."""
        request = self.live[output.request_id]
        for completion in output.outputs:
            had, has = request.tokens.get(completion.index, 0), len(completion.token_ids)
            if has < had:
                self.problem(f"request {request.name}: {had - has} tokens were taken back")
            request.tokens[completion.index] = has
        if output.finished:
            request.ends.append(output)

    def has_ended(self, request: SoakRequest) -> bool:
        """Whether the engine said so of one of its sequences."""
        return any(name in self._ended for name in request.sequences)

    def _look_at(self, request: SoakRequest, *, ends_with_engine: bool) -> Iterator[str]:
        if len(request.ends) != 1 and not (request.left and not request.ends):
            yield f"{len(request.ends)} terminal results"
            return
        for name in request.sequences:
            if (times := self._ended.pop(name, 0)) != 1:
                yield f"sequence {name} ended {times} times"
        if not request.ends:
            self.report.ends["disconnect"] += request.params.n
            return
        (output,) = request.ends
        allowed = request.allowed_ends()
        if ends_with_engine and self.end in ("hang", "lost"):
            allowed.add("error")
        if any(self.device.hits[name] > 1 for name in request.sequences):
            allowed.add("error")
        for completion in output.outputs:
            reason = str(completion.finish_reason)
            self.report.ends[reason] += 1
            if reason not in allowed and not (reason == "error" and PLANTED not in str(output.error)):
                yield f"ended with {reason!r} ({output.error}), not {' or '.join(sorted(allowed))}"

    def _left_behind(self) -> Iterator[str]:
        """What an idle engine must not have."""
        engine = self.engine
        try:
            engine.scheduler.check()
        except AssertionError as error:
            yield f"the scheduler: {error}"
        found = engine.snapshot()
        if held := sum(view.request is not None for view in found.slots):
            yield f"{held} slots are held by no request that lives"
        if free := engine.max_num_seqs - engine.scheduler.num_free:
            yield f"{free} slots were not given back"
        if used := engine.scheduler.blocks_used:
            yield f"{used} blocks were not given back"
        if kept := engine.runner.parked_bytes:
            yield f"{kept} bytes of parked requests are left"
        if found.waiting or found.draining or engine.has_work:
            yield "requests are left in the engine"
        if compiles := engine.stats().compiles_after_warmup - self._compiles:
            yield f"{compiles} programs were compiled after warm-up"

    def _differences(self) -> Iterator[str]:
        """Run some requests of the round alone, and all that ended with an error of their own."""
        if self._tokenizer is not None:
            self._tokenizer.tokens_left = None  # of a request that was refused
        one_end = [request for request in self.live.values() if len(request.ends) == 1]
        own_errors = [request for request in one_end if _has_own_error(request)]
        rest = [request for request in one_end if request not in own_errors and any(request.tokens.values())]
        count = -(-self._requests // _COMPARED_SHARE)
        for request in own_errors + self.draw.sample(rest, min(count, len(rest))):
            self.engine.reset_prefix_cache()
            self.engine.submit(request.prompt, request.params, request_id=request.name)
            outputs = self.engine.drain()
            self._ended.clear()
            self.report.counts["compared with alone"] += 1
            if len(outputs) != 1:
                yield f"{request.name} alone: {len(outputs)} terminal results"
            elif (difference := _difference(outputs[0], request.ends[0])) is not None:
                yield f"{request.name}: not as alone: {difference}"


class StepCallers:
    """Callers of a round who take turns in one thread. Some read from a collector of their own."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._engine = life.engine
        self._only_finished = life.draw.random() < 0.5

    @property
    def are_busy(self) -> bool:
        return self._engine.has_unfinished

    def submit(self, request: SoakRequest) -> None:
        """Send a request, which is added to the live ones if the queue has room for it."""
        self._life.prepare(request)
        if request.reader != "step":
            request.collector = OutputCollector(every_token=request.reader == "own")
        try:
            self._engine.submit(
                request.prompt,
                request.params,
                request_id=request.name,
                collector=request.collector,
                **request.options,
            )
        except QueueFullError:
            self._life.report.counts["refused"] += 1
        else:
            self._life.report.counts["requests"] += 1
            self._life.live[request.name] = request

    def abort(self, request: SoakRequest) -> None:
        request.aborted |= self._engine.abort(request.name)

    async def turn(self, number: int) -> None:
        """Run a step, and read what came."""
        try:
            for output in self._engine.step(only_finished=self._only_finished):
                self._life.read(output)
        except (PlantedInterrupt, EngineClosedError):
            pass
        self._read_collectors(*(("own", "slow") if number % 16 == 0 else ("own",)))

    async def end(self) -> None:
        """Drain or close the engine."""
        while self._life.end == "drain" and self._engine.has_unfinished:
            try:
                for output in self._engine.drain(_DRAIN_S):
                    self._life.read(output)
            except PlantedInterrupt:
                continue
        if self._life.end == "close":
            self._engine.close()

    def finish(self) -> None:
        """Read what is left."""
        self._read_collectors("own", "slow", "gone")

    def _read_collectors(self, *readers: str) -> None:
        for request in self._life.live.values():
            if request.collector is not None and request.reader in readers:
                for news in request.collector.take():
                    self._life.read(news.output())


class TaskCallers:
    """Callers of a round in an event loop of their own: each is a task that reads its stream or disconnects.

    A thread waits for the device, so a seed repeats the requests, and not the moments at which they end.
    """

    def __init__(self, life: Life, llm: AsyncLLM) -> None:
        self._life = life
        self._llm = llm
        self._readers: dict[str, asyncio.Task[None]] = {}

    @property
    def are_busy(self) -> bool:
        engine = self._life.engine
        has_work = engine.has_work if engine.closed_because is None else engine.has_unfinished
        return has_work or not all(reader.done() for reader in self._readers.values())

    def submit(self, request: SoakRequest) -> None:
        """Send a request from a task, which adds it to the live ones when it begins."""
        self._readers[request.name] = asyncio.create_task(self._follow(request))

    def abort(self, request: SoakRequest) -> None:
        """Abort the request, or cancel its reader."""
        life = self._life
        if request.reader != "gone" and life.draw.random() < 0.5:
            request.aborted |= self._llm.abort(request.name)
        elif self._readers[request.name].cancel():
            request.left = True
            life.report.counts["requests"] += 1

    async def turn(self, number: int) -> None:
        """Let the tasks run for a while. The time of a step that hangs passes at once."""
        if self._life.device.hangs and self._life.engine.closed_because is None:
            self._life.clock.now += STEP_TIMEOUT_S
            self._llm.keep_running()
        await asyncio.sleep(_TURN_S)

    async def end(self) -> None:
        """Close the engine, perhaps drained."""
        if self._life.end == "drain":
            await self._llm.drain(_DRAIN_S)
        await self._llm.close()

    def finish(self) -> None:
        """Raise what a reader raised."""
        for reader in self._readers.values():
            if not reader.cancelled():
                reader.result()

    async def _follow(self, request: SoakRequest) -> None:
        """Send a request and read its outputs."""
        life = self._life
        life.live[request.name] = request
        if request.params.structured_outputs is not None:
            request.text_fails = None  # the text begins when the constraint was tried, in another turn
        outputs = self._llm.generate(
            request.prompt, request.params, request_id=request.name, **request.options
        )
        try:
            life.prepare(request)
            async for output in outputs:
                life.read(output)
                if request.reader == "slow":
                    await asyncio.sleep(16 * _TURN_S)
        except (QueueFullError, EngineClosedError):
            if request.tokens or life.has_ended(request):
                raise
            life.report.counts["refused"] += 1
            del life.live[request.name]
        else:
            life.report.counts["requests"] += 1


def _has_own_error(request: SoakRequest) -> bool:
    (output,) = request.ends
    reasons = {completion.finish_reason for completion in output.outputs}
    return "error" in reasons and PLANTED not in str(output.error)


def _difference(alone: RequestOutput, found: RequestOutput) -> str | None:
    """The first difference in words; None if there is none. What ended from outside is compared as far as it came."""
    for expected, got in zip(alone.outputs, found.outputs, strict=True):
        is_whole = got.finish_reason in OWN_ENDS and PLANTED not in str(found.error)
        samples = samples_of(got)
        others = samples_of(expected)[: None if is_whole else len(samples)]
        if (first := first_difference(others, samples)) is not None:
            return f"sequence {got.index}, sample {first.position}: {first.found}, alone {first.expected}"
        for name in ("finish_reason", "stop_reason", "text") if is_whole else ():
            if (one := getattr(got, name)) != (other := getattr(expected, name)):
                return f"sequence {got.index}, {name}: {one!r}, alone {other!r}"
        if is_whole and _prompt(found) != _prompt(alone):
            return "log-probabilities of the prompt"
    return None


def _prompt(output: RequestOutput) -> list[TokenSample]:
    return [TokenSample(NO_TOKEN, None, tops(place)) for place in output.prompt_logprobs or ()]
