"""One life of an engine: rounds of requests, and its end."""

import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.engine.identity import logprob_bits
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import EngineClosedError, InvalidRequestError
from xla_engine.model_loader.checkpoint import Checkpoint
from xla_engine.observability.observer import Observer
from xla_engine.outputs import CompletionOutput, Logprob, RequestOutput
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import QueueFullError
from xla_engine.tools.soak.faults import PLANTED, Clock, FaultyDevice, FaultyTokenizer, PlantedInterrupt
from xla_engine.tools.soak.requests import SoakRequest, bad_requests, draw_requests, stems

ENDS = ("drain", "hang", "close", "lost")
OWN_ENDS = ("stop", "length", "error")
REQUESTS = 24  # of a round
_COMPARED_SHARE = 6  # one in so many of a round is compared, and all that ended with an unplanted error


@dataclass(slots=True)
class Tally:
    """What happened in a soak.

    ends: sequences by reason. problems: what broke, in words; empty where all held.
    """

    lives: int = 0
    rounds: int = 0
    requests: int = 0
    refused: int = 0
    compared: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    drafted_tokens: int = 0
    failed_steps: int = 0
    interrupts: int = 0
    slow_steps: int = 0
    hangs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Life:
    """An engine from start to end. All that is drawn follows from `seed`; problems are added to `tally`.

    engine: with faults under and above it. end: one of `ENDS`. requests: of each round.
    alone_s: wall time so far that requests ran alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: FaultyTokenizer | None,
        config: EngineConfig,
        seed: str,
        tally: Tally,
        *,
        end: str,
        requests: int = REQUESTS,
    ) -> None:
        self.end = end
        self.alone_s = 0.0
        self._requests = requests
        self._seed = seed
        self._tally = tally
        self._draw = random.Random(seed)
        self._tokenizer = tokenizer
        self._ended: Counter[str] = Counter()  # by sequence: how often the engine said so
        self.engine = engine = XlaBatchEngine(checkpoint, tokenizer, config)
        engine.clock = clock = Clock()
        self._clock = clock
        self.device = FaultyDevice(engine.runner, clock, random.Random(f"{seed}/faults"))
        engine.state.runner = self.device
        engine.observers.add(Observer(ended=lambda name, _: self._ended.update([name])))
        engine.state.waiter.sleep = self.device.sleep
        self._stems = stems(engine, self._draw)
        self._compiles = engine.stats().compiles_after_warmup

    def problem(self, what: str) -> None:
        """Note what broke."""
        self._tally.problems.append(f"{self._seed}, {what}")

    def run_round(self, number: int, *, last: bool) -> None:
        """Run the requests of one round to their ends, check that nothing is left of them, and run some alone.

        last: the engine ends in the middle of it.
        """
        name = f"round {number}"
        requests = draw_requests(self.engine, self._draw, self._requests, f"{number}", self._stems)
        self.device.active = True
        self.engine.lag = self._draw.choice((0, 1, 1, 2))
        try:
            self._run(requests, last=last)
        except Exception as error:
            self.problem(f"{name}: {type(error).__name__}: {error}")
            return
        finally:
            self.device.active = False
            self.device.release()
            self.device.poison = {}
        self._tally.rounds += 1
        for request in requests:
            for problem in self._look_at(request, ends_with_engine=last):
                self.problem(f"{name}, request {request.name}: {problem}")
        if self.engine.closed_because is None:
            for problem in self._left_behind():
                self.problem(f"{name}: {problem}")
            began = time.monotonic()
            self._compare(name, requests)
            self.alone_s += time.monotonic() - began
        elif not last:
            self.problem(f"{name}: the engine is closed: {self.engine.closed_because}")
        self.device.hits.clear()

    def finish(self) -> None:
        """Close the engine and count what it did."""
        engine, tally, device = self.engine, self._tally, self.device
        found = engine.stats()
        engine.close()
        tally.lives += 1
        tally.tokens += found.generation_tokens
        tally.steps += found.steps
        tally.preemptions += engine.snapshot().counters.preemptions
        tally.cached_tokens += engine.snapshot().counters.cached_tokens
        tally.drafted_tokens += found.drafted_tokens
        tally.failed_steps += device.failed
        tally.interrupts += device.interrupted
        tally.slow_steps += device.slow
        tally.hangs += self.end == "hang"

    def _run(self, requests: list[SoakRequest], *, last: bool) -> None:
        engine, waiting = self.engine, list(reversed(requests))
        end_turn = self._draw.randrange(2, 10) if last else None
        only_finished = self._draw.random() < 0.5
        live: dict[str, SoakRequest] = {}
        turn = 0
        while waiting or engine.has_unfinished:
            if not engine.has_unfinished:
                turn = max(turn, waiting[-1].turn)
            while waiting and waiting[-1].turn <= turn and engine.closed_because is None:
                request = waiting.pop()
                if self._submit(request):
                    live[request.name] = request
            self._act(live, turn)
            if turn == end_turn and self._end_now(live):
                break
            outputs = self._turn(only_finished)
            for output in outputs:
                self._read(live[output.request_id], output)
            for request in live.values():
                if request.reader == "own" or (request.reader == "slow" and turn % 16 == 0):
                    self._read_own(request)
            if engine.closed_because is not None and not engine.has_unfinished:
                break
            turn += 1
        requests[:] = live.values()  # the others were never taken
        for request in requests:
            self._read_own(request)

    def _turn(self, only_finished: bool) -> list[RequestOutput]:
        try:
            return self.engine.step(only_finished=only_finished)
        except (PlantedInterrupt, EngineClosedError):
            return []

    def _submit(self, request: SoakRequest) -> bool:
        """Send a request; whether the queue had room for it."""
        self._prepare(request)
        if request.reader != "step":
            request.collector = OutputCollector(every_token=request.reader == "own")
        try:
            self.engine.submit(
                request.prompt,
                request.params,
                request_id=request.name,
                collector=request.collector,
                **request.options,
            )
        except QueueFullError:
            self._tally.refused += 1
            return False
        self._tally.requests += 1
        return True

    def _prepare(self, request: SoakRequest) -> None:
        """Plant what goes wrong with a request that is about to be sent, and send a bad one before some."""
        if self._draw.random() < 0.15:
            self._submit_bad(request)
        if self._tokenizer is not None:
            self._tokenizer.tokens_left = request.text_fails
        if request.poison and not self.device.poison:
            self.device.poison = dict.fromkeys(request.sequences, request.poison == "decode")

    def _submit_bad(self, request: SoakRequest) -> None:
        found = self.engine.snapshot()
        live = next(iter(found.waiting), None)
        arguments = dict(
            self._draw.choice(bad_requests(self.engine, None if live is None else live.request_id))
        )
        try:
            params = SamplingParams.from_mapping(arguments.pop("params", {}))
            self.engine.submit(arguments.pop("prompt"), params, **arguments)
        except InvalidRequestError:
            self._tally.refused += 1
        else:
            self.problem(f"before request {request.name}: not refused: {arguments}")
        if self.engine.snapshot().counters.submitted != found.counters.submitted:
            self.problem(f"before request {request.name}: refused, but queued: {arguments}")

    def _act(self, live: dict[str, SoakRequest], turn: int) -> None:
        for request in live.values():
            if request.abort_turn == turn:
                request.aborted |= self.engine.abort(request.name)
            self._preempt(request, turn)

    def _preempt(self, request: SoakRequest, turn: int) -> None:
        if request.preempt is not None and request.preempt[0] == turn:
            self.engine.preempt(request.name, how=request.preempt[1], to_back=self._draw.random() < 0.3)

    def _fail_for_good(self) -> bool:
        """Let the device hang or be lost, if that is how the engine is to end; whether it is."""
        if self.end == "hang":
            self.device.hang_after(self._draw.randrange(4))
        elif self.end == "lost":
            self.device.lose()
        return self.end in ("hang", "lost")

    def _end_now(self, live: dict[str, SoakRequest]) -> bool:
        """Begin the end of the engine; whether it is over."""
        if not self._fail_for_good():
            for request in live.values():
                request.aborted = True  # unless it has ended before
            if self.end == "drain":
                outputs = []
                while self.engine.has_unfinished:
                    try:
                        outputs += self.engine.drain(0.05)
                    except PlantedInterrupt:
                        continue
            else:
                self.engine.close()
                outputs = self.engine.step() if self.engine.has_unfinished else []
            for output in outputs:
                self._read(live[output.request_id], output)
            return True
        return False

    def _read_own(self, request: SoakRequest) -> None:
        for news in () if request.collector is None else request.collector.take():
            self._read(request, news.output())

    def _read(self, request: SoakRequest, output: RequestOutput) -> None:
        for completion in output.outputs:
            had, has = request.tokens.get(completion.index, 0), len(completion.token_ids)
            if has < had:
                self.problem(f"request {request.name}: {had - has} tokens were taken back")
            request.tokens[completion.index] = has
        if output.finished:
            request.ends.append(output)

    def _look_at(self, request: SoakRequest, *, ends_with_engine: bool) -> Iterator[str]:
        if len(request.ends) != 1 and not (request.left and not request.ends):
            yield f"{len(request.ends)} terminal results"
            return
        for name in request.sequences:
            if (times := self._ended.pop(name, 0)) != 1:
                yield f"sequence {name} ended {times} times"
        if not request.ends:
            self._tally.ends["disconnect"] += request.params.n
            return
        (output,) = request.ends
        allowed = request.allowed_ends()
        if ends_with_engine and self.end in ("hang", "lost"):
            allowed.add("error")
        if any(self.device.hits[name] > 1 for name in request.sequences):
            allowed.add("error")
        for completion in output.outputs:
            reason = str(completion.finish_reason)
            self._tally.ends[reason] += 1
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

    def _compare(self, name: str, requests: list[SoakRequest]) -> None:
        """Run some of the requests alone, and all that ended with an error of their own."""
        if self._tokenizer is not None:
            self._tokenizer.tokens_left = None  # of a request that was refused
        one_end = [request for request in requests if len(request.ends) == 1]
        own_errors = [request for request in one_end if _has_own_error(request)]
        rest = [request for request in one_end if request not in own_errors and any(request.tokens.values())]
        count = -(-self._requests // _COMPARED_SHARE)
        for request in own_errors + self._draw.sample(rest, min(count, len(rest))):
            self.engine.reset_prefix_cache()
            self.engine.submit(request.prompt, request.params, request_id=request.name)
            outputs = self.engine.drain()
            self._ended.clear()
            self._tally.compared += 1
            if len(outputs) != 1:
                self.problem(f"{name}, request {request.name} alone: {len(outputs)} terminal results")
            elif (problem := _difference(outputs[0], request.ends[0])) is not None:
                self.problem(f"{name}, request {request.name}: not as alone: {problem}")


def _has_own_error(request: SoakRequest) -> bool:
    (output,) = request.ends
    reasons = {completion.finish_reason for completion in output.outputs}
    return "error" in reasons and PLANTED not in str(output.error)


def _difference(alone: RequestOutput, found: RequestOutput) -> str | None:
    """The difference in words; None if there is none."""
    for expected, got in zip(alone.outputs, found.outputs, strict=True):
        whole = got.finish_reason in OWN_ENDS and PLANTED not in str(found.error)
        if (what := _differs(expected, got, whole=whole)) is not None:
            return f"{what} of sequence {got.index}"
        if whole and _bits_of(alone.prompt_logprobs) != _bits_of(found.prompt_logprobs):
            return "log-probabilities of the prompt"
    return None


def _differs(alone: CompletionOutput, found: CompletionOutput, *, whole: bool) -> str | None:
    count = len(found.token_ids)
    if alone.token_ids[:count] != found.token_ids:
        return "tokens"
    if _bits((alone.logprobs or ())[:count]) != _bits(found.logprobs or ()):
        return "log-probabilities"
    if _bits_of((alone.top_logprobs or ())[:count]) != _bits_of(found.top_logprobs or ()):
        return "most likely tokens"
    if not whole:
        return None
    if len(alone.token_ids) != count:
        return "number of tokens"
    if (alone.finish_reason, alone.stop_reason) != (found.finish_reason, found.stop_reason):
        return f"end ({alone.finish_reason}, not {found.finish_reason})"
    return None if alone.text == found.text else "text"


def _bits_of(places: Iterable[dict[int, Logprob] | None] | None) -> list[object]:
    return [
        None if place is None else (*place, *_bits([each.logprob for each in place.values()]))
        for place in places or ()
    ]


def _bits(logprobs: Iterable[float]) -> list[int]:
    return list(map(logprob_bits, logprobs))
