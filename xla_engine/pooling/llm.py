"""`LLM.embed`, `classify`, `score_documents` and `rerank`: the offline front door of models that pool."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)
from xla_engine.pooling.params import PoolingParams
from xla_engine.prompts import Prompt, TextPair, prompt_list
from xla_engine.sampling_params import SamplingParams


class PoolsPrompts:
    """What an `LLM` of a model that pools offers. Each result depends on its own prompt alone, to the bit.

    `options` are those of `LLM.generate` beside the parameters; errors are those of `LLM.generate`, and
    InvalidRequestError where the model cannot do what is asked.
    """

    engine: Any

    def _complete(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        **options: Any,
    ) -> list[RequestOutput]:
        """Run all prompts; outputs in their order. `LLM` has it."""
        raise NotImplementedError

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in their order.

        prompts: texts or token ids, as for `generate`. pooling_params: `dimensions` cuts vectors off.
        """
        outputs = self._pool(prompt_list(prompts), "embed", pooling_params, use_tqdm=use_tqdm, **options)
        return [
            EmbeddingRequestOutput(**_common(each), outputs=EmbeddingOutput(embedding=pooled_of(each)))
            for each in outputs
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each prompt's classes; prompts as for `embed`."""
        outputs = self._pool(prompt_list(prompts), "classify", pooling_params, use_tqdm=use_tqdm, **options)
        return [
            ClassificationRequestOutput(**_common(each), outputs=ClassificationOutput(probs=pooled_of(each)))
            for each in outputs
        ]

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

        queries, documents: as many of one as of the other, or one query for all. A classifier of one class reads both
        at once; of a model without a classifier, it is the cosine of their vectors.
        chat_template: jinja2 source that makes the classifier's prompt of messages with the roles "query" and
            "document"; without it the tokenizer joins the two.
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
                _cosine(vectors[query], vectors[document])
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
        return [
            ScoringRequestOutput(**_common(each), outputs=ScoringOutput(score=pooled_of(each)[0]))
            for each in outputs
        ]

    def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[RerankResult]:
        """The documents from the best fit to the worst, the first `top_n` of them; equals in the order given.

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


def ranked(documents: Sequence[str], scores: Sequence[float], top_n: int | None) -> list[RerankResult]:
    """Documents by score, highest first. Raises InvalidRequestError for a `top_n` that is no count."""
    if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
        raise InvalidRequestError(f"top_n must be an integer of at least 1, not {top_n!r}")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        RerankResult(index=index, document=documents[index], relevance_score=scores[index])
        for index in order[:top_n]
    ]


def pair_messages(query: str, document: str) -> list[dict[str, str]]:
    """A query and a document as a chat template of a reranker sees them."""
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def pooled_of(output: RequestOutput) -> list[float]:
    """The numbers of a request. Raises InvalidRequestError where it ended without."""
    if output.pooled is None:
        ended = output.error or f"it ended with reason {output.outputs[0].finish_reason!r}"
        raise InvalidRequestError(f"request {output.request_id} was not pooled: {ended}")
    return list(output.pooled)


def _common(output: RequestOutput) -> Mapping[str, Any]:
    return {
        "request_id": output.request_id,
        "prompt_token_ids": list(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }


def _cosine(query: RequestOutput, document: RequestOutput) -> ScoringRequestOutput:
    one, other = pooled_of(query), pooled_of(document)
    lengths = math.hypot(*one) * math.hypot(*other)
    score = math.fsum(a * b for a, b in zip(one, other, strict=True)) / max(lengths, 1e-12)
    return ScoringRequestOutput(
        request_id=document.request_id,
        outputs=ScoringOutput(score=score),
        prompt_token_ids=[*query.prompt_token_ids, *document.prompt_token_ids],
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
    )
