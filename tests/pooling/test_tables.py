"""Tables of texts become tables of vectors, classes and scores, with the numbers of `LLM`, to the bit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.command_line import invoke
from tests.support.encoder_models import BERT, encoder_tensors, write_encoder
from xla_engine import LLM, PoolingParams
from xla_engine.ray.results import ERROR
from xla_engine.ray.stage import EngineActor, ModelStage

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "hat",
    "unable",
    "cats",
    "playing",
    "documents",
]
TEXTS = [" ".join(WORDS[: 1 + 7 * at % 13]) for at in range(40)]
OPTIONS = ("--dtype", "float32", "--max-num-seqs", "4")
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
HEAD = "BertForSequenceClassification"


@pytest.fixture(scope="module")
def embeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(
        tmp_path_factory.mktemp("embeds"), encoder_tensors(BERT), "BertModel", BERT, pooling=MEAN
    )


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = encoder_tensors(BERT, "bert.", "bert", labels=1)
    return write_encoder(tmp_path_factory.mktemp("scores"), tensors, HEAD, BERT, num_labels=1)


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def run(model: Path, source: Path, out: Path, *more: str) -> Any:
    return invoke("run", str(source), "-o", str(out), "--model", str(model), *OPTIONS, *more)


def floats(column: Any) -> list[list[float]]:
    return [None if each is None else each for each in column.to_pylist()]


def test_a_table_of_vectors(embeds: Path, tmp_path: Path) -> None:
    """Every row has its vector in float32, in the order of the input, with its own columns; one without a text has an
    error; and a run that is resumed makes the same bytes."""
    source = table(tmp_path / "in.parquet", key=[*range(len(TEXTS)), 99], text=[*TEXTS, None])
    out = tmp_path / "out.parquet"
    found = run(embeds, source, out, "--prompt-column", "text", "--id-column", "key")
    assert found.exit_code == 1, found.output  # one row failed
    rows = pq.read_table(out)
    names = ["key", "text", "custom_id", "embedding", "num_input_tokens", "error"]
    assert rows.column_names == names
    assert rows.schema.field("embedding").type == pa.list_(pa.float32())
    assert rows["key"].to_pylist() == [*range(len(TEXTS)), 99]
    with LLM(embeds, dtype="float32", max_num_seqs=4) as llm:
        expected = [each.outputs.embedding for each in llm.embed(TEXTS, use_tqdm=False)]
    assert floats(rows["embedding"]) == [*expected, None]
    assert rows["error"].to_pylist()[:-1] == [None] * len(TEXTS)
    assert "is empty in this row" in rows["error"].to_pylist()[-1]
    again = run(
        embeds,
        source,
        tmp_path / "again.parquet",
        "--prompt-column",
        "text",
        "--id-column",
        "key",
        "--ordered",
    )
    assert again.exit_code == 1 and (tmp_path / "again.parquet").read_bytes() == out.read_bytes()


def test_fields_of_a_request(embeds: Path, tmp_path: Path) -> None:
    """Texts that are too long are cut if the command says so; templates make texts; CSV has lists as JSON."""
    long = " ".join(WORDS * 12)
    source = table(tmp_path / "in.parquet", prompt=[long, TEXTS[1]])
    out = tmp_path / "out.csv"
    found = run(embeds, source, out, "--prompt-template", "the {prompt}", "--truncate-prompt-tokens", "-1")
    assert found.exit_code == 0, found.output
    import csv

    rows = list(csv.DictReader(out.read_text().splitlines()))
    with LLM(embeds, dtype="float32", max_num_seqs=4) as llm:
        cut = PoolingParams(truncate_prompt_tokens=-1)
        texts = [f"the {long}", f"the {TEXTS[1]}"]
        expected = [each.outputs.embedding for each in llm.embed(texts, pooling_params=cut, use_tqdm=False)]
    assert [json.loads(row["embedding"]) for row in rows] == expected
    checked = invoke("run", str(source), "--dry-run", "--model", str(embeds), *OPTIONS)
    assert checked.exit_code == 1 and "more than max_model_len" in checked.output


@pytest.mark.full
def test_a_table_of_scores_and_of_classes(scores: Path, tmp_path: Path) -> None:
    source = table(tmp_path / "in.parquet", query=TEXTS[:5], text=TEXTS[5:10])
    options = ("--prompt-column", "text", "--query-column", "query")
    found = run(scores, source, tmp_path / "scores.parquet", *options)
    assert found.exit_code == 0, found.output
    rows = pq.read_table(tmp_path / "scores.parquet")
    with LLM(scores, dtype="float32", max_num_seqs=4) as llm:
        pairs = zip(TEXTS[:5], TEXTS[5:10], strict=True)
        expected = [
            llm.score_documents(query, [text], use_tqdm=False)[0].outputs.score for query, text in pairs
        ]
        probs = [each.outputs.probs for each in llm.classify(TEXTS[5:10], use_tqdm=False)]
    assert rows["score"].to_pylist() == expected
    found = run(scores, source, tmp_path / "classes.parquet", "--prompt-column", "text")
    assert found.exit_code == 0, found.output
    rows = pq.read_table(tmp_path / "classes.parquet")
    assert rows["probs"].to_pylist() == probs and rows["label"].to_pylist() == ["LABEL_0"] * 5


@pytest.mark.full
def test_options_that_do_not_fit_are_refused(embeds: Path, tmp_path: Path) -> None:
    source = table(tmp_path / "in.parquet", prompt=TEXTS[:2])
    for more, words in (
        (("--task", "score"), "give --query-column NAME"),
        (("--query-column", "prompt", "--task", "embed"), "give --query-column NAME"),
        (("--receipts", str(tmp_path / "r")), "leave out --receipts"),
    ):
        found = run(embeds, source, tmp_path / "out.parquet", *more)
        assert found.exit_code == 2 and words in found.output, found.output
    found = invoke(
        "run",
        str(source),
        "-o",
        str(tmp_path / "out.parquet"),
        "--task",
        "embed",
        "--max-num-seqs",
        "4",
    )
    assert found.exit_code == 2 and "for models that pool" in found.output


@pytest.mark.full
def test_a_stage_of_ray_data(embeds: Path, scores: Path) -> None:
    """An actor's batches, without Ray: the same numbers, and the error of a row that has no text."""

    async def batch(actor: EngineActor, given: Any) -> Any:
        return await anext(actor(given))

    def made(stage: ModelStage, **columns: Any) -> Any:
        actor = EngineActor(stage)
        try:
            return asyncio.run(batch(actor, pa.table(columns)))
        finally:
            actor._engine.close()

    engine = {"dtype": "float32", "max_num_seqs": 4}
    rows = made(ModelStage(model=embeds, engine=engine), prompt=[*TEXTS[:9], None], key=list(range(10)))
    with LLM(embeds, dtype="float32", max_num_seqs=4) as llm:
        expected = [each.outputs.embedding for each in llm.embed(TEXTS[:9], use_tqdm=False)]
    assert rows["embeddings"].to_pylist() == [*expected, None]
    assert rows["key"].to_pylist() == list(range(10))
    assert rows[ERROR].to_pylist()[:9] == [""] * 9 and "no prompt" in rows[ERROR].to_pylist()[9]
    found = made(
        ModelStage(model=scores, engine=engine, task_type="score"), prompt=TEXTS[:3], query=TEXTS[3:6]
    )
    assert np.isfinite(found["score"].to_pylist()).all()
