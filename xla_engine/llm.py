"""`LLM`: offline inference, with the interface of vLLM's class."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from xla_engine.engine.protocol import RequestOptions, SharedOptions, check_options, pop_options
from xla_engine.engine.requests.callbacks import Callbacks, OnOutput
from xla_engine.engine.requests.output_collector import OutputCollector
from xla_engine.errors import ConfigError, EngineClosedError, InvalidRequestError
from xla_engine.model_loader.peft.request import LoRARequest
from xla_engine.open_engine import EngineClient, engine_config, open_engine
from xla_engine.outputs import RequestOutput, RequestOutputs
from xla_engine.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RerankResult,
    Score,
    ScoringRequestOutput,
    classification_of,
    cosine_score,
    document_score_of,
    embedding_of,
    ranked,
    score_of,
)
from xla_engine.pooling_params import PoolingParams
from xla_engine.prompts import (
    Params,
    Prompt,
    TextOrIds,
    TextPair,
    chat_prompt,
    conversations,
    is_pictured,
    pair_messages,
    per_prompt,
    prompt_list,
    sampling_params_of,
    score_requests,
)
from xla_engine.sampling_params import SamplingParams
from xla_engine.text.chat_template import CHAT_OPTIONS, Message
from xla_engine.text.tokenizer import Tokenizer
from xla_engine.utils.progress import prompts_bar
from xla_engine.utils.startup import startup_line

_log = logging.getLogger("xla_engine.llm")  # without a handler, Python prints its warnings

Adapter = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or for each


class LLM:
    """A model ready to generate.

    Arguments:
        model: a Hugging Face model directory, a .gguf file, a Hub id, or "package:NAME" for the model in an installed
            Python package; None is the small embedded model.
        max_num_seqs: the most requests decoded together; "auto" takes as many as fit into memory.
        max_model_len: the most tokens of a request, prompt plus generated; None takes the model's limit, or less if
            that would need more than a quarter of the machine's memory.
        dtype: "auto", "bfloat16" or "float32".
        seed: used for requests without a seed of their own.
        generation_config: the sampling parameters of prompts without any: "model" (default) takes those that the
            checkpoint recommends, "engine" those of `SamplingParams`.
        data_parallel_size: number of engines, each in a process of its own, that share this machine's devices, cores
            and memory. Results are the same. If a process dies, it is restarted and its requests run elsewhere.
        num_hosts, coordinator: share one model with the devices of other hosts, on which `xla-engine join` runs;
            `coordinator` is an address HOST:PORT of this host (docs/more_than_one_machine.md).
        engine_options: further fields of `EngineConfig`, or their names in docs/from_vllm.md. Raises ConfigError for
            an option that can have no effect.

    Runnable example::

        with LLM() as llm:
            for output in llm.generate(["def fib(n):"], SamplingParams(temperature=0, max_tokens=48)):
                print(output.outputs[0].text)

    Thread-safe: requests of all threads run in one batch, and each call returns when its own are done.

    Leaving the `with` block, or calling `close()`, frees the device memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_seqs: int | Literal["auto"] = 16,
        max_model_len: int | None = None,
        dtype: str = "auto",
        seed: int = 0,
        data_parallel_size: int = 1,
        num_hosts: int = 1,
        coordinator: str | None = None,
        **engine_options: Any,
    ) -> None:
        sizes = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "dtype": dtype, "seed": seed}
        config = engine_config({"generation_config": "model"} | sizes | engine_options)
        with startup_line(sys.stderr) as progress:
            engine = open_engine(
                model,
                config,
                engines=data_parallel_size,
                num_hosts=num_hosts,
                coordinator=coordinator,
                progress=progress,
            )
        self._hold(engine)

    @classmethod
    def from_engine(cls, engine: EngineClient) -> LLM:
        """Wrap an engine that was made by hand; closing the LLM closes it."""
        llm = cls.__new__(cls)
        llm._hold(engine)
        return llm

    def _hold(self, engine: EngineClient) -> None:
        self.engine = engine
        self._callbacks: Callbacks | None = None  # runs the requests of `submit`
        self._told_of_cuts = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer. Raises ConfigError if it has none."""
        if self.engine.tokenizer is None:
            raise ConfigError("the model has no tokenizer.json; prompts are token ids")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of prompts without any: the model's recommendations, or the defaults of `SamplingParams`."""
        return self.engine.default_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        receipts: bool = False,
        **options: Unpack[SharedOptions],
    ) -> RequestOutputs:
        """Complete all prompts; results in the order of the prompts.

        Arguments:
            prompts: text, token ids, vLLM's `{"prompt": ...}` or `{"prompt_token_ids": ...}`, or a list of these.
            sampling_params: one for all, or one per prompt; a dict of fields may stand for each.
            use_tqdm: show a progress bar.
            priority: -10 (first) to 10, one for all or one per prompt.
            lora_request: an adapter for all prompts, or one (or None) per prompt; needs `enable_lora`.
            receipts: keep each request with its output, so that `xla_engine.receipts.save` can write files for an
                audit. Prompts are without pictures and adapters then; `xla_engine.receipts.write` takes those.
            options: `deadline_s`, `queue_timeout_s` and `cache_salt`; see `xla_engine.engine.protocol.SharedOptions`.

        Raises InvalidRequestError, naming the first invalid prompt, before any prompt runs.
        """
        check_options("generate", options)
        many = prompt_list(prompts)
        return self._complete(
            many,
            sampling_params,
            use_tqdm=use_tqdm,
            receipts=receipts,
            priority=priority,
            lora_request=lora_request,
            **options,
        )

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[False] = False,
        **options: Any,
    ) -> RequestOutputs: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Iterator[RequestOutput]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        receipts: bool = False,
        **options: Any,
    ) -> RequestOutputs | Iterator[RequestOutput]:
        """Answer one conversation or a list of them; results in their order.

        Arguments:
            messages: dicts with "role" and "content", or a list of such lists.
            sampling_params: as in `generate`; None: without a limit, to the end of the model's turn.
            stream: yield cumulative outputs as tokens arrive, as `stream` does.
            use_tqdm, priority, lora_request, receipts: as in `generate`; a stream has no receipts.
            options: those of `generate`; `chat_template`, jinja2 source that replaces the checkpoint's; and `tools`,
                `add_generation_prompt`, `continue_final_message`, `chat_template_kwargs`, as in
                `xla_engine.text.chat_template.render_chat`.

        Raises InvalidRequestError, naming the first invalid conversation, before any of them runs; its subclass
        ChatTemplateError if the checkpoint has no chat template.
        """
        check_options("chat", options, *CHAT_OPTIONS)
        shared = pop_options(options)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations(messages)):
            try:
                prompts.append(chat_prompt(self.engine.render_chat, conversation, **options))
            except InvalidRequestError as error:
                raise type(error)(f"conversation {index}: {error}") from error
        given = self.engine.default_params.for_chat() if sampling_params is None else sampling_params
        shared |= {"priority": priority, "lora_request": lora_request, "add_special_tokens": False}
        if not stream:
            return self._complete(prompts, given, use_tqdm=use_tqdm, receipts=receipts, **shared)
        if receipts:
            raise InvalidRequestError("a stream has no receipts; leave out stream")
        return (output for _, output in self._run(prompts, given, only_finished=False, **shared))

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        **options: Unpack[SharedOptions],
    ) -> Iterator[RequestOutput]:
        """Like `generate`, yielding cumulative outputs as tokens arrive; `finished` is true once per request.

        Requests are submitted when the first output is read; closing the iterator aborts those that have not ended.
        Several streams may be read alternately: each read runs the engine for all. For concurrent readers use
        `AsyncLLM`.
        """
        check_options("stream", options)
        many = prompt_list(prompts)
        outputs = self._run(
            many,
            sampling_params,
            only_finished=False,
            priority=priority,
            lora_request=lora_request,
            **options,
        )
        return (output for _, output in outputs)

    def score(
        self,
        contexts: TextOrIds | Sequence[TextOrIds],
        continuations: TextOrIds | Sequence[TextOrIds],
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        lora_request: Adapter = None,
        **options: Unpack[SharedOptions],
    ) -> list[Score]:
        """The log-likelihood of each continuation after its context; results in their order.

        Arguments:
            contexts, continuations: texts or token ids; equally many, or one context for all. Common prefixes of
                contexts are computed once.
            use_tqdm, priority, lora_request, options: as in `generate`.

        Raises InvalidRequestError, naming the first invalid pair, before any of them runs. A score depends only on its
        pair, not on the others, the number of slots or the content of the cache.
        """
        encode = None if self.tokenizer is None else self.tokenizer.encode
        pairs = score_requests(contexts, continuations, encode)
        prompts, params = [ids for ids, _ in pairs], [each for _, each in pairs]
        outputs = self._complete(
            list(prompts), params, use_tqdm=use_tqdm, priority=priority, lora_request=lora_request, **options
        )
        return [score_of(output, each.logprobs_start) for output, each in zip(outputs, params, strict=True)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order.

        prompts: texts or token ids, as for `generate`. pooling_params: `dimensions` truncates the vectors.
        options: those of `generate`.

        Raises what `generate` raises, and InvalidRequestError if the model does not support the request. Every bit of
        a vector depends only on its prompt.
        """
        outputs = self._pool(prompt_list(prompts), "embed", pooling_params, use_tqdm=use_tqdm, **options)
        return [embedding_of(each) for each in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """The class probabilities of each prompt; arguments as for `embed`."""
        outputs = self._pool(prompt_list(prompts), "classify", pooling_params, use_tqdm=use_tqdm, **options)
        return [classification_of(each) for each in outputs]

    def score_documents(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        chat_template: str | None = None,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ScoringRequestOutput]:
        """How well each document fits its query: vLLM's `score`.

        A classifier with one class reads both at once; for a model without a classifier, the score is the cosine of
        their vectors.

        queries, documents: equally many, or one query for all.
        chat_template: jinja2 source that renders the classifier's prompt from messages with the roles "query" and
            "document"; by default the tokenizer joins the two.
        """
        queries = [queries] if isinstance(queries, str) else list(queries)
        documents = [documents] if isinstance(documents, str) else list(documents)
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise InvalidRequestError(
                f"{len(queries)} queries for {len(documents)} documents; give one or {len(documents)}"
            )
        shared = {"use_tqdm": use_tqdm, **options}
        pooler = self.engine.validator.pooler
        if pooler is not None and pooler.classifier is None:
            unique = list(dict.fromkeys((*queries, *documents)))
            found = self._pool(list(unique), "embed", pooling_params, **shared)
            vectors = dict(zip(unique, found, strict=True))
            return [
                cosine_score(vectors[query], vectors[document])
                for query, document in zip(queries, documents, strict=True)
            ]
        prompts: list[Prompt] = [
            TextPair(query, document)
            if chat_template is None
            else self.engine.render_chat(pair_messages(query, document), chat_template=chat_template)
            for query, document in zip(queries, documents, strict=True)
        ]
        if chat_template is not None:
            shared["add_special_tokens"] = False
        outputs = self._pool(prompts, "score", pooling_params, **shared)
        return [document_score_of(each) for each in outputs]

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[RerankResult]:
        """The `top_n` best documents for a query, best first; equal ones in the given order.

        options: those of `score_documents`.
        """
        scores = [each.outputs.score for each in self.score_documents(query, documents, **options)]
        return ranked(documents, scores, top_n)

    def _pool(
        self,
        prompts: list[Prompt],
        task: str,
        params: PoolingParams | None,
        *,
        use_tqdm: bool,
        **options: Any,
    ) -> list[RequestOutput]:
        wanted = PoolingParams(task=task) if params is None else replace(params, task=task)
        return self._complete(prompts, wanted, use_tqdm=use_tqdm, **{"priority": 0, **options})

    def extend(
        self,
        outputs: RequestOutput | Sequence[RequestOutput],
        max_tokens: int,
        *,
        use_tqdm: bool = True,
        **options: Unpack[RequestOptions],
    ) -> RequestOutputs:
        """Continue finished requests with up to `max_tokens` more tokens each; results in the order of `outputs`.

        outputs: what `generate`, `chat` or `extend` returned. An `LLM(keep_finished=N)` keeps the latest N requests.
        options: those of `XlaBatchEngine.extend`, which documents results and errors.
        """
        many = [outputs] if isinstance(outputs, RequestOutput) else list(outputs)
        collector = OutputCollector(every_token=False)
        places: dict[str, int] = {}
        try:
            for place, output in enumerate(many):
                self.engine.extend(output.request_id, max_tokens, collector=collector, **options)
                places[output.request_id] = place
            found = self._read(collector, places, only_finished=True)
            return _in_order(found, len(many), use_tqdm=use_tqdm)
        finally:
            self._abort(places)

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        *,
        use_tqdm: bool,
        receipts: bool = False,
        **options: Any,
    ) -> RequestOutputs:
        if receipts and (options.get("lora_request") is not None or any(map(is_pictured, prompts))):
            raise InvalidRequestError(
                "receipts of prompts with pictures or adapters are written by xla_engine.receipts.write, whose "
                "requests name them"
            )
        found = self._run(prompts, sampling_params, only_finished=True, **options)
        outputs = _in_order(found, len(prompts), use_tqdm=use_tqdm)
        if sampling_params is None and not self._told_of_cuts:
            self._tell_of_cuts(outputs)
        if receipts:
            from xla_engine.openai.requests import with_requests

            return with_requests(self.engine, outputs, self._params_of(sampling_params, len(prompts)))
        return outputs

    def _params_of(
        self, sampling_params: Params | Sequence[Params] | None, count: int
    ) -> list[SamplingParams]:
        """The parameters of each of `count` prompts."""
        given = self.engine.default_params if sampling_params is None else sampling_params
        return [
            sampling_params_of(each) for each in per_prompt("sampling_params", given, SamplingParams, count)
        ]

    def _tell_of_cuts(self, outputs: list[RequestOutput]) -> None:
        """Log once that texts of a caller without parameters ended at the default `max_tokens`."""
        cut = sum(each.finish_reason == "length" for output in outputs for each in output.outputs)
        if cut and (most := self.engine.default_params.max_tokens) is not None:
            self._told_of_cuts = True
            _log.warning(
                "%d of %d texts ended at the default of %d tokens; set SamplingParams(max_tokens=...)",
                cut,
                len(outputs),
                most,
            )

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: Params | Sequence[Params] | None,
        *,
        only_finished: bool,
        priority: int | Sequence[int],
        lora_request: Adapter = None,
        **options: Any,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, output) until all have ended; abort the others if the caller stops early."""
        collector = OutputCollector(every_token=not only_finished)
        params = self._params_of(sampling_params, len(prompts))
        priorities = per_prompt("priorities", priority, int, len(prompts))
        adapters = per_prompt("lora_requests", lora_request, LoRARequest, len(prompts))

        every = zip(prompts, params, priorities, adapters, strict=True)
        places: dict[str, int] = {}
        try:
            for place, (prompt, wanted, urgency, adapter) in enumerate(every):
                own = options if adapter is None else {**options, "lora_request": adapter}
                try:
                    name = self.engine.submit(prompt, wanted, priority=urgency, collector=collector, **own)
                except InvalidRequestError as error:
                    raise type(error)(f"prompt {place}: {error}") from error
                places[name] = place
            yield from self._read(collector, places, only_finished=only_finished)
        finally:
            self._abort(places)

    def _read(
        self, collector: OutputCollector, places: dict[str, int], *, only_finished: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, output). places: that index of each request; the ended ones are removed."""
        while places:
            self._await_news(collector)
            with self.engine.lock:
                news = [
                    (request.request_id, request.finished, request.output())
                    for request in collector.take()
                    if request.request_id in places and (request.finished or not only_finished)
                ]
            for request_id, finished, output in news:
                yield (places.pop(request_id) if finished else places[request_id]), output

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _await_news(self, collector: OutputCollector) -> None:
        """Run a turn, or wait for another thread's, unless there is output already. Raises EngineClosedError."""
        try:
            if not collector:
                self.engine.advance()
        except EngineClosedError:
            if not collector:  # otherwise the outputs in it tell the reason
                raise

    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Replace weights, by the checkpoint's names and shapes; see `XlaBatchEngine.update_weights`."""
        self.engine.update_weights(weights)

    def metrics_text(self) -> str:
        """Counters, gauges and histograms in the text format of Prometheus; docs/operators.md explains each."""
        return self.engine.metrics_text()

    def start(self) -> None:
        """Start a thread that runs the engine's turns, unless it is running."""
        if self._callbacks is None:
            self._callbacks = Callbacks(self.engine)

    def submit(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        on_output: OnOutput,
        only_finished: bool = False,
        **options: Any,
    ) -> str:
        """Queue a prompt between `start` and `stop`; returns the request's id.

        on_output: called in the thread with the cumulative output whenever there are new tokens; the last call has the
            `finished` output, however the request ends. It blocks the engine, so it should be short; it may submit and
            abort. If it raises, the error is logged, the request is aborted, and it is not called again.
        only_finished: call it only with the last output.
        options: those of `XlaBatchEngine.submit`.

        Raises EngineClosedError if no thread runs, and what `XlaBatchEngine.submit` raises.
        """
        if self._callbacks is None:
            raise EngineClosedError("submit() needs a running thread; call start() first")
        check_options("submit", options, "request_id", "on_refused")
        params = None if sampling_params is None else sampling_params_of(sampling_params)
        return self._callbacks.submit(prompt, params, on_output, only_finished=only_finished, **options)

    def stop(self, timeout_s: float | None = None) -> None:
        """Refuse new requests by `submit`, wait for the others, and end the thread; `start` starts it again.

        timeout_s: seconds after which unfinished requests are aborted; None: no limit.
        """
        callbacks, self._callbacks = self._callbacks, None
        if callbacks is not None:
            callbacks.stop(timeout_s)

    def close(self) -> None:
        """Free device memory; the object is unusable afterwards."""
        self.stop(timeout_s=0)
        self.engine.close()

    def __repr__(self) -> str:
        if self.engine.closed_because is not None:
            return f"LLM(closed: {self.engine.closed_because})"
        limits = self.engine.limits()
        shown = ("model", "dtype", "max_num_seqs", "max_model_len", "device")
        return f"LLM({', '.join(f'{name}={limits[name]!r}' for name in shown if name in limits)})"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _in_order(found: Iterable[tuple[int, RequestOutput]], count: int, *, use_tqdm: bool) -> RequestOutputs:
    """The outputs in the order of their indices. use_tqdm: show a progress bar."""
    done: dict[int, RequestOutput] = {}
    with prompts_bar(count, enabled=use_tqdm) as bar:
        for place, output in found:
            done[place] = output
            bar.update()
    return RequestOutputs(done[place] for place in range(count))
