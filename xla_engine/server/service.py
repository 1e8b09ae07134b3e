"""The engine behind the server's endpoints: admission, preparation and submission of requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xla_engine import prompts
from xla_engine.async_llm import AsyncLLM
from xla_engine.engine.requests.output_collector import AllSeen, OutputCollector, Seen
from xla_engine.errors import EngineClosedError, TokenLimitError
from xla_engine.graphs.row_state.limits import MAX_LOGPROBS
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.openai.requests import LineRequest, Prompt
from xla_engine.openai.results import ResultHeader
from xla_engine.outputs import RequestOutput
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import TextPair, TokensPrompt, prompt_parts, without_pictures
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import QueueFullError
from xla_engine.server.bodies import Bodies
from xla_engine.server.errors import ApiError, ClientGone, busy, invalid
from xla_engine.server.history import History
from xla_engine.server.preparation import Constraints, Pictures, Rendering, check_parts
from xla_engine.server.settings import ServerSettings
from xla_engine.server.turns import PIECE_S, Turns
from xla_engine.text.fill_in import FillIn
from xla_engine.text.parsers.chats import Chat, Dialect, opens_reasoning

if TYPE_CHECKING:
    from xla_engine.server.tracing import Tracing

_RECENT = 0.1  # weight of the last request in `recent_seconds`
LONG_TEXT = 8192  # characters; a longer prompt is tokenised in another thread
ECHOED_TEXT = 256  # the same limit for an echoed prompt, whose exact length the size check needs
WHOLE = SamplingParams()  # prompts are not truncated
_EXPECTED_TOKENS = 2048  # assumed for a sequence that may have more


def most_tokens(content: str | Sequence[int] | TextPair | FillIn) -> int:
    """The number of a prompt's tokens; for text an upper bound: one for each byte, and two special tokens."""
    if isinstance(content, FillIn):
        return most_tokens(content.token_ids or content.before + content.after) + 3
    if isinstance(content, TextPair):
        content = content.first + content.second
    return len(content.encode(errors="replace")) + 2 if isinstance(content, str) else len(content)


class RequestTimes:
    """Counts of requests that only the server has.

    recent_seconds: moving average of request times. refused: requests rejected because the queue was full.
    responses: counts by path and status.
    """

    def __init__(self) -> None:
        self.recent_seconds = 1.0
        self.refused = 0
        self.responses: Counter[tuple[str, str]] = Counter()

    def count(self, output: RequestOutput) -> None:
        if (metrics := output.metrics) is not None and metrics.finished_time is not None:
            seconds = metrics.finished_time - metrics.arrival_time
            self.recent_seconds += _RECENT * (seconds - self.recent_seconds)


class Service:
    """One engine with the server's settings and the state of its requests.

    draining: the server is shutting down, and its probes say so. refusing: it rejects new requests, and batches read
    no more lines.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.settings = settings
        self.fingerprint = llm.engine.identity().digest()
        self.times = RequestTimes()
        self.history = History(self.engine)
        self.bodies = Bodies(settings)
        self.turns = Turns()
        self.rendering = Rendering(self.engine.render_chat)
        self.pictures = Pictures(self.engine.validator)
        self.constraints = Constraints(self.compile, self.engine.validator.knows_constraint)
        self.batch_jobs: set[str] = set()  # ids of the batches that run now
        self.draining = self.refusing = False
        self.started = int(time.time())
        self.dialect = Dialect.of(self._template(), settings.tool_parser, settings.reasoning_parser)
        self.tracing: Tracing | None = None
        if settings.otlp_traces_endpoint is not None:
            from xla_engine.server.tracing import Tracing

            self.tracing = Tracing(settings.otlp_traces_endpoint, settings.model_names[0])
        self._compiling = threading.Lock()
        self.live = 0  # admitted, unfinished sequences of interactive requests
        self.values = 0  # upper bound of the log-probabilities held for live answers
        self.submissions: set[Submission] = set()
        self.loaded: dict[str, LoRARequest] = {}  # adapters loaded over HTTP, by name

    def defaults(self) -> dict[str, Any]:
        """The `defaults` of `parse_line` for request bodies and batch lines."""
        return self.settings.defaults() | self.dialect.as_defaults()

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model and of its current adapters."""
        return (*self.settings.model_names, *self.loaded)

    def _template(self) -> str:
        """The source of the chat templates in use."""
        own = self.engine.chat_template
        given = self.settings.sampling_defaults.get("chat_template")
        return str(given) if given is not None else "" if own is None else "\n".join(own.sources.values())

    @property
    def is_alive(self) -> bool:
        """Whether the engine still runs."""
        return self.engine.closed_because is None

    def header(self, *, created: int | None = None) -> ResultHeader:
        """The fields that all answers of this server share."""
        return ResultHeader(
            created=int(time.time()) if created is None else created,
            model=self.settings.model_names[0],
            system_fingerprint=self.fingerprint,
            tokenizer=self.engine.tokenizer,
            labels=self.engine.validator.labels,
        )

    @contextlib.contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Admit a request, from before its prompt is rendered until its end. Raises ApiError."""
        if self.refusing:
            raise busy("the server is shutting down; use another one", code="draining", status=503)
        if not self.is_alive:
            gone = f"the engine is closed ({self.engine.closed_because}); restart the server"
            raise ApiError(503, gone, code=EngineClosedError.code)
        limit = self.engine.max_num_seqs + self.settings.max_waiting
        if sequences > limit:
            message = f"{sequences} choices in one request, but only {limit} may run or wait; request fewer"
            raise invalid(message, "n")
        if self.live + sequences > limit:
            self.times.refused += 1
            raise busy(
                f"{self.live} sequences run or wait, and the limit is {limit}; retry later or raise --max-waiting",
                seconds=self._retry_after(),
            )
        self.live += sequences
        try:
            yield
        finally:
            self.live -= sequences

    def _retry_after(self) -> int:
        """Value of the retry-after header: the mean time of recent requests, between 1 and 60 seconds."""
        return min(60, max(1, math.ceil(self.times.recent_seconds)))

    async def ready_prompt(
        self, prompt: Prompt, *, key: str, long: int = LONG_TEXT, params: SamplingParams = WHOLE
    ) -> prompts.Prompt:
        """Prepare a prompt; long work runs in other threads. Raises ApiError and InvalidRequestError.

        key: of the caller. long: text with more characters is tokenised here, in another thread. params: of the
        request, which may truncate the prompt.
        """
        longest, truncates = self.engine.max_model_len, params.truncate_prompt_tokens is not None
        if isinstance(prompt, tuple) and len(prompt) > longest and not truncates:
            raise TokenLimitError(
                f"the prompt has {len(prompt)} tokens, more than max_model_len {longest}; shorten it or raise "
                "max_model_len"
            )
        ready: prompts.Prompt
        if isinstance(prompt, Chat):
            check_parts(prompt)
            messages, pictures = without_pictures(prompt.messages)
            ready = await self.rendering.render(replace(prompt, messages=messages), key)
            if pictures:
                return await self.pictures.decoded(ready, pictures, key, add_special_tokens=False)
        else:
            ready = prompt
        tokenizer = self.engine.tokenizer
        if isinstance(ready, FillIn) and tokenizer is not None and len(ready.before + ready.after) > long:
            found = await asyncio.to_thread(self.engine.validator.token_ids, ready, SamplingParams())
            return replace(ready, token_ids=found)
        if not isinstance(ready, str) or len(ready) <= long or tokenizer is None:
            return ready
        validator, special = (
            self.engine.validator,
            not isinstance(prompt, Chat),
        )  # a chat's template adds them
        part = validator.part_of(ready, params)
        if len(part) < len(ready) and not truncates:  # the engine rejects it without tokenising
            return ready
        if truncates and isinstance(params, PoolingParams):
            found = await asyncio.to_thread(validator.token_ids, ready, params, add_special_tokens=special)
            return TokensPrompt(prompt=ready, prompt_token_ids=found)
        ids = await asyncio.to_thread(tokenizer.encode, part, add_special_tokens=special)
        return TokensPrompt(prompt=ready, prompt_token_ids=ids)

    def _bounded(self, request: LineRequest, most: Sequence[int]) -> int:
        """Upper bound of the log-probabilities held for the answer. most: tokens of each prompt, at most.

        Raises ApiError if it, or the sum of all, is too large.
        """
        longest = self.engine.max_model_len
        limit = max(self.settings.max_answer_values, (1 + MAX_LOGPROBS) * longest)
        lengths = [min(tokens, longest) for tokens in most]
        if (size := answer_values(request, lengths, longest)) > limit:
            raise invalid(
                f"the answer may have {size} values (over all prompts: n x (max_tokens, and with echo the prompt) x "
                f"(1 + logprobs)), and {limit} are allowed; lower n, max_tokens or logprobs, leave out echo, send "
                "fewer prompts, or raise --max-answer-values",
                "logprobs" if request.params.logprobs else "n",
            )
        held = held_values(request, lengths)
        if held and self.values + held > 2 * limit:
            self.times.refused += 1
            message = "too many answers with log-probabilities are in progress; retry later"
            raise busy(message, seconds=self._retry_after())
        return held

    def adapter_named(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request's `model` names; None for the base model."""
        return None if name in self.settings.base_names else self.engine.adapter_named(name)

    def compile(self, params: SamplingParams) -> None:
        """Compile a request's constraint. This may take a second, so call it outside the event loop's thread.

        The engine caches the result for the submission that follows. Raises InvalidRequestError.
        """
        if params.structured_outputs is not None:
            validator = self.engine.validator
            with self._compiling:
                validator.token_mask(params, validator.stop_token_ids(params))

    async def submit(
        self,
        request: LineRequest,
        name: str,
        *,
        every_token: bool,
        salt: str,
        deadline_s: float | None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> Submission:
        """Queue all prompts of a request, or none. Raises what `XlaBatchEngine.submit` raises.

        name: a unique id; it determines the noise if the request has no seed.
        salt: separates its cached prefixes from other callers'. deadline_s: time limit of the whole request, in
        seconds.
        headers: of HTTP; a `traceparent` names the trace that the request belongs to.
        """
        long = ECHOED_TEXT if request.echo else LONG_TEXT
        ready = [
            await self.ready_prompt(prompt, key=salt, long=long, params=request.params)
            for prompt in request.prompts
        ]
        parts = [prompt_parts(prompt) for prompt in ready]
        kept = self.engine.validator.most_kept(request.params) or self.engine.max_model_len
        held = self._bounded(request, [min(most_tokens(each.content), kept) for each in parts])
        params = request.reading.sampling(request.params, parts[0].text)
        await self.constraints.compile(params, salt)
        options = dict(request.options)
        if (adapter := self.adapter_named(request.model)) is not None:
            options["lora_request"] = adapter
        if salt:
            options["cache_salt"] = f"{salt}/{options.get('cache_salt', '')}"
        asked = options.get("deadline_s")
        if deadline_s is not None and (
            asked is None or (isinstance(asked, int | float) and asked > deadline_s)
        ):
            options["deadline_s"] = deadline_s
        trace = None
        if (tracing := self.tracing) is not None:
            trace = partial(tracing.record, request, context=tracing.context(headers))
        thinking = request.is_chat and opens_reasoning(parts[0].text or "")
        submission = Submission(
            self, salt, every_token=every_token, thinking=thinking, values=held, trace=trace
        )
        if params.structured_outputs is not None:
            submission.left = self.engine.validator.grammars.left(params.structured_outputs)
        self.values += held
        paused = time.perf_counter()
        try:
            for index, (given, prompt) in enumerate(zip(request.prompts, ready, strict=True)):
                if time.perf_counter() - paused > PIECE_S:
                    await asyncio.sleep(0)
                    paused = time.perf_counter()
                request_id = name + (f"-{index}" if index else "")
                self.engine.submit(
                    prompt,
                    params,
                    request_id=request_id,
                    add_special_tokens=not isinstance(given, Chat),  # a chat's template adds them
                    collector=submission.collector,
                    **options,
                )
                submission.unfinished[request_id] = index
        except BaseException as error:
            submission.close()
            if isinstance(error, QueueFullError):
                self.times.refused += 1
            raise
        self.submissions.add(submission)
        self.llm.keep_running()
        return submission

    def abort_all(self) -> None:
        """Abort all interactive requests; each reader gets the text so far."""
        for submission in list(self.submissions):
            submission.abort()


class Submission:
    """The prompts of one POST in the engine, which are read together.

    news: set when there is new output. tenant: the caller. thinking: whether the prompt opened the model's reasoning.
    left: what the constraint leaves to the client.
    """

    def __init__(
        self,
        service: Service,
        tenant: str,
        *,
        every_token: bool,
        thinking: bool = False,
        values: int = 0,
        trace: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """values: log-probabilities counted in `Service.values` until this is closed. trace: called with each prompt's
        output when it has ended."""
        self.tenant, self.thinking = tenant, thinking
        self.left: tuple[str, ...] = ()
        self._trace = trace
        self._values = values
        self.news = asyncio.Event()
        self._gone: asyncio.Task[None] | None = None
        self.collector = OutputCollector(on_news=self.news.set, every_token=every_token)
        self._service = service
        self.unfinished: dict[str, int] = {}  # requests, with the index of their prompt
        self._seen: defaultdict[str, AllSeen] = defaultdict(lambda: defaultdict(Seen))

    @property
    def finished(self) -> bool:
        return not self.unfinished

    def end_with(self, gone: asyncio.Task[None]) -> None:
        """Wake the reader when the client disconnects, which ends this task."""
        self._gone = gone
        gone.add_done_callback(lambda _: self.news.set())

    async def next_news(self) -> None:
        """Wait for new output. Raises ClientGone."""
        await self.news.wait()
        if self._gone is not None and self._gone.done():
            raise ClientGone

    def take(self) -> list[tuple[int, RequestOutput]]:
        """New outputs, each with the index of its prompt: for streams every token, otherwise sequences that ended."""
        self.news.clear()
        found, only_ended = [], not self.collector.every_token
        for request in self.collector.take():
            output = request.news(self._seen[request.request_id], only_ended=only_ended)
            if output.outputs or output.finished:
                found.append((self.unfinished[output.request_id], output))
            if output.finished:
                del self.unfinished[output.request_id]
                self._service.times.count(output)
                if self._trace is not None:
                    self._trace(request.output())
        return found

    def abort(self) -> None:
        """Abort unfinished requests; the reader gets their text so far."""
        for request_id in list(self.unfinished):
            self._service.engine.abort(request_id)

    def close(self) -> None:
        """Abort unfinished requests and discard their output."""
        self.abort()
        if self.unfinished:
            self.take()
        self.unfinished.clear()
        self._service.values -= self._values
        self._values = 0
        self._service.submissions.discard(self)


def answer_values(request: LineRequest, prompt_lengths: Sequence[int], longest: int) -> int:
    """The most values that the answer can have: each token counts one, plus one for each of its `logprobs`.

    With `echo` every choice repeats its prompt. prompt_lengths: tokens of each prompt. longest: the model's limit
    on prompt plus answer, in tokens.
    """
    params, total = request.params, 0
    each = 1 + (params.logprobs or 0)
    for length in prompt_lengths:
        new = max(longest - length, 0) if params.max_tokens is None else params.max_tokens
        total += params.n * each * (new + (length if request.echo else 0))
        if params.prompt_logprobs is not None and not request.echo:
            total += length * (1 + params.prompt_logprobs)
    return total


def held_values(request: LineRequest, prompt_lengths: Sequence[int]) -> int:
    """The number of log-probabilities that the server may hold until the answer is sent; each prompt counts once.

    A sequence counts as at most `_EXPECTED_TOKENS` tokens.
    """
    params, total = request.params, 0
    if params.prompt_logprobs is not None:
        total += sum(prompt_lengths) * (1 + params.prompt_logprobs)
    if params.logprobs is not None:
        expected = min(params.max_tokens or _EXPECTED_TOKENS, _EXPECTED_TOKENS)
        total += len(prompt_lengths) * params.n * expected * (1 + params.logprobs)
    return total
