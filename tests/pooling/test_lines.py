"""Vectors and scores by batch lines, and by the server with the client of OpenAI: the same numbers, to the bit."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.pooling.test_models import LAST, OPTIONS
from tests.server.conftest import Running
from tests.support.pooling_models import qwen3_tensors, write_model
from xla_engine import LLM, PoolingParams
from xla_engine.async_llm import AsyncLLM
from xla_engine.batch.dry_run import DryRun
from xla_engine.batch.lines import read_lines
from xla_engine.batch.run import BatchRun
from xla_engine.config import EngineConfig
from xla_engine.openai.fields import URLS
from xla_engine.openai.requests import LineError, parse_record
from xla_engine.openai.results import ResultHeader
from xla_engine.server.service import Service
from xla_engine.server.settings import ServerSettings

TEXTS = ["def push(self)", "the cat sat on the mat", "naïve café"]
BODIES = [
    ("/v1/embeddings", {"input": TEXTS, "dimensions": 8}),
    ("/v1/embeddings", {"input": TEXTS[1], "encoding_format": "base64", "user": "me"}),
    ("/v1/embeddings", {"input": [5, 6, 7], "use_activation": False}),
    ("/v1/score", {"queries": TEXTS[0], "documents": TEXTS}),
    ("/v1/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]}),
    ("/v1/rerank", {"query": TEXTS[1], "documents": TEXTS, "top_n": 2}),
    ("/classify", {"input": TEXTS, "use_activation": False}),
    ("/pooling", {"input": TEXTS[1], "task": "embed"}),
    ("/pooling", {"input": TEXTS, "task": "classify", "use_activation": False}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that embeds and has a classifier of one class."""
    directory = tmp_path_factory.mktemp("both")
    return write_model(
        directory, qwen3_tensors(labels=1), "Qwen3ForSequenceClassification",
        modules=("Transformer", "Pooling", "Normalize"), pooling=LAST, is_matryoshka=True, id2label={"0": "relevant"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, **OPTIONS) as made:
        yield made


def answers(llm: LLM, bodies: list[tuple[str, dict[str, Any]]], **defaults: Any) -> list[dict[str, Any]]:
    lines = [
        json.dumps({"custom_id": f"c{at}", "method": "POST", "url": url, "body": {"model": "any", **body}})
        for at, (url, body) in enumerate(bodies)
    ]
    sink = BytesIO()
    header = ResultHeader(created=1, model="tiny", labels=llm.engine.validator.labels)
    raw = BytesIO("\n".join(lines).encode())
    BatchRun(llm.engine, read_lines(raw), sink, header=header, ordered=True, defaults=defaults).run()
    records = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [each["custom_id"] for each in records] == [f"c{at}" for at in range(len(bodies))]
    return records


def test_lines(llm: LLM) -> None:
    records = answers(llm, BODIES)
    bodies = [each["response"]["body"] for each in records]
    vectors = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
    short = np.array(vectors)[:, :8]
    np.testing.assert_allclose(
        [each["embedding"] for each in bodies[0]["data"]],
        short / np.linalg.norm(short, axis=1, keepdims=True),
        rtol=1e-5,
    )
    assert bodies[0]["usage"]["prompt_tokens"] == sum(len(llm.get_tokenizer().encode(text)) for text in TEXTS)
    found = np.frombuffer(base64.b64decode(bodies[1]["data"][0]["embedding"]), "<f4")
    assert found.tolist() == vectors[1]
    scores = [each.outputs.score for each in llm.score_documents(TEXTS[0], TEXTS, use_tqdm=False)]
    assert [each["score"] for each in bodies[3]["data"]] == scores
    crossed = llm.score_documents(TEXTS, TEXTS[::-1], use_tqdm=False)
    assert [each["score"] for each in bodies[4]["data"]] == [each.outputs.score for each in crossed]
    ranks = llm.rerank(TEXTS[1], TEXTS, top_n=2, use_tqdm=False)
    assert [
        (each["index"], each["document"]["text"], each["relevance_score"]) for each in bodies[5]["results"]
    ] == [(each.index, each.document, each.relevance_score) for each in ranks]
    assert ranks[0].relevance_score >= ranks[1].relevance_score
    raw = llm.classify(TEXTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert bodies[6]["data"] == [
        {"index": at, "label": "relevant", "probs": list(each.outputs.probs), "num_classes": 1}
        for at, each in enumerate(raw)
    ]
    assert bodies[7]["data"] == [{"object": "pooling", "index": 0, "data": vectors[1]}]
    assert [each["data"] for each in bodies[8]["data"]] == [list(each.outputs.probs) for each in raw]
    ids = [each["id"].partition("-")[0] for each in bodies]
    assert ids == [*["embd"] * 3, *["score"] * 2, "rerank", "classify", *["pooling"] * 2]


def test_a_template_makes_the_prompts_of_pairs(llm: LLM) -> None:
    template = "{{ messages[0].content }}? {{ messages[1].content }}"
    [record] = answers(llm, BODIES[3:4], chat_template=template)
    told = llm.score_documents(TEXTS[0], TEXTS, chat_template=template, use_tqdm=False)
    assert [each["score"] for each in record["response"]["body"]["data"]] == [
        each.outputs.score for each in told
    ]


@pytest.mark.parametrize(
    ("url", "body", "message"),
    [
        ("/v1/embeddings", {}, 'no "input"'),
        ("/v1/embeddings", {"input": []}, "at least one"),
        ("/v1/embeddings", {"input": ["a", ""]}, r"input\[1\]"),
        ("/v1/embeddings", {"input": [[1, True]]}, r"input\[0\]"),
        ("/v1/embeddings", {"input": "a", "dimension": 3}, "did you mean 'dimensions'"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "base64"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "at most 2048"),
        ("/v1/embeddings", {"input": "a", "stream": True}, "unknown field 'stream'"),
        ("/v1/score", {"queries": ["a", "b"], "documents": ["c"] * 3}, "give one or 3"),
        ("/v1/score", {"queries": "a"}, "documents must be text"),
        ("/classify", {"input": "a", "dimensions": 3}, "unknown field 'dimensions'; /classify has input"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task must be one of"),
        ("/v1/rerank", {"query": ["a"], "documents": ["b"]}, "query must be text"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": 1}, "true or false"),
    ],
)
def test_bodies_that_cannot_be(url: str, body: dict[str, Any], message: str) -> None:
    found = parse_record({"method": "POST", "url": url, "body": body}, 1)
    assert isinstance(found, LineError) and found.code == "invalid_request"
    assert re.search(message, found.message), found.message


def test_a_dry_run_knows_what_the_model_is_for(model: Path) -> None:
    lines = [*BODIES, ("/v1/completions", {"prompt": "a"})]
    raw = BytesIO("\n".join(json.dumps({"url": url, "body": body}) for url, body in lines).encode())
    errors: list[LineError] = []
    report = DryRun(model, EngineConfig(max_model_len=128)).run(read_lines(raw), on_error=errors.append)
    assert (report.ok, [each.line for each in errors]) == (len(BODIES), [len(lines)])
    assert "pools and does not generate" in errors[0].message


def test_the_server_answers_as_a_batch_does(llm: LLM) -> None:
    expected = [each["response"]["body"] for each in answers(llm, BODIES)]
    llm.engine.reset_prefix_cache()
    running = Running(Service(AsyncLLM.from_engine(llm.engine), ServerSettings(model_names=("any",))))
    try:
        for (url, body), wanted in zip(BODIES, expected, strict=True):
            found = httpx.post(f"{running.url}{url}", json=body, timeout=1800)
            assert found.status_code == 200, found.text
            shown = ("id", "created", "model")
            assert {k: v for k, v in found.json().items() if k not in shown} == {
                k: v for k, v in wanted.items() if k not in shown
            }
        for path, number in (("/score", 3), ("/rerank", 5), ("/v2/rerank", 5)):
            url, body = BODIES[number]
            alias, usual = (
                httpx.post(running.url + each, json=body, timeout=1800).json() for each in (path, url)
            )
            for name in ("data", "results"):
                assert alias.get(name) == usual.get(name)
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
            vector = client.embeddings.create(model="any", input=TEXTS[1]).data[0].embedding
        assert vector == np.frombuffer(base64.b64decode(expected[1]["data"][0]["embedding"]), "<f4").tolist()
        refused = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"}, timeout=1800)
        assert refused.status_code == 400 and "pools" in refused.text
        wrong = httpx.post(f"{running.url}/v1/rerank", json={"query": "a", "documents": 3}, timeout=1800)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "documents")
        assert "/v1/embeddings" in URLS
    finally:
        running.stop()
