"""Evaluation by lm-evaluation-harness: the same digits at every batch size, and those of its own `hf` model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xla_engine.environment import embedded_model_directory
from xla_engine.errors import ConfigError, XlaEngineError

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance

TASKS = Path(__file__).parent / "tasks"
LINES = [json.loads(line) for line in (TASKS / "python_choices.jsonl").read_text().splitlines()]
PAIRS = [(line["prefix"], choice) for line in LINES for choice in line["choices"]]
TEXTS = ["def add(a, b):\n    return a + b\n" * 9, "import os", "x = 1\n" * 60]


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., Any]]:
    from xla_engine.lm_eval import XlaLM

    made: list[Any] = []

    def one(**options: Any) -> Any:
        made.append(XlaLM(**options))
        return made[-1]

    yield one
    for each in made:
        each._llm.close()


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=at) for at, each in enumerate(arguments)]


def answers(model: Any) -> tuple[Any, ...]:
    until = [
        ("def main(", {"until": ["\n\n"], "max_gen_toks": 24}),
        ("x =", {"until": "\n", "temperature": 0.0}),
    ]
    return (
        model.loglikelihood(instances("loglikelihood", [*PAIRS, ("", "import os")]), disable_tqdm=True),
        model.loglikelihood_rolling(
            instances("loglikelihood_rolling", [(text,) for text in TEXTS]), disable_tqdm=True
        ),
        model.generate_until(instances("generate_until", until), disable_tqdm=True),
    )


def test_every_batch_size_gives_the_same_digits(make: Callable[..., Any]) -> None:
    """Windows of 100 tokens, so that long texts are read in several; the three answers are equal to the last bit."""
    first, *others = (answers(make(batch_size=size, max_model_len=100)) for size in (1, 8, 64))
    assert all(other == first for other in others)
    scores, rolling, texts = first
    assert len(scores) == len(PAIRS) + 1 and all(logprob < 0 for logprob, _ in scores)
    assert len(rolling) == len(TEXTS) and rolling[0] < scores[-1][0]
    assert all("\n\n" not in text for text in texts) and texts[0]


@pytest.mark.full
def test_several_engines_give_the_digits_of_one(make: Callable[..., Any]) -> None:
    """And everything else that the harness asks of a model, with lm-eval's way to name a batch size."""
    one, two = (
        make(max_model_len=100, **options)
        for options in ({}, {"data_parallel_size": 2, "batch_size": "auto:4", "max_batch_size": 8})
    )
    assert two._llm.engine.max_num_seqs == 16 and one._llm.engine.max_num_seqs == 16
    assert answers(two) == answers(one)
    asked: dict[str, Callable[[Any], Any]] = {
        "eot_token_id": lambda model: model.eot_token_id,
        "prefix_token_id": lambda model: model.prefix_token_id,
        "max_length": lambda model: model.max_length,
        "max_gen_toks": lambda model: model.max_gen_toks,
        "tokenizer_name": lambda model: model.tokenizer_name,
        "chat_template": lambda model: model.chat_template(True),
        "apply_chat_template": lambda model: refused(
            lambda: model.apply_chat_template([{"role": "user", "content": "x"}])
        ),
        "tok_encode": lambda model: model.tok_encode("import os"),
    }
    in_answers = {"loglikelihood_rolling", "generate_until"}
    assert {name for name in vars(type(one)) if not name.startswith("_")} == {*asked, *in_answers}
    for name, ask in asked.items():
        assert ask(two) == ask(one), name


def refused(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except XlaEngineError as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        *((("auto", None), None), (("auto:4", None), None), (("auto", 8), 8), (("auto:2", 64), 16)),
        *(((7, None), 7), (("7", 3), 7)),
    ],
    ids=str,
)
def test_batch_sizes_as_the_harness_names_them(given: tuple[Any, Any], slots: int | None) -> None:
    from xla_engine.lm_eval import _slots

    assert _slots(*given) == slots


@pytest.mark.parametrize("size", ["auto:x", "many", "0", "-4", "4:4", "", "1.5", 0], ids=repr)
def test_other_batch_sizes_are_refused_before_a_model_is_loaded(make: Callable[..., Any], size: Any) -> None:
    with pytest.raises(ConfigError, match="give a number of at least 1, auto, or auto:N"):
        make(batch_size=size, pretrained="no such model")


def test_long_contexts_lose_their_beginning(make: Callable[..., Any]) -> None:
    model = make(batch_size=8, max_model_len=64)
    long, tail = "import sys;" * 60, " os"
    [(found, _)] = model.loglikelihood(instances("loglikelihood", [(long, tail)]), disable_tqdm=True)
    ids = model.tok_encode(long)[-(64 - 1 - len(model.tok_encode(tail))) :]
    [(expected, _)] = model._loglikelihood_tokens([(None, ids, model.tok_encode(tail))], disable_tqdm=True)
    assert found == expected


def test_chats_go_through_the_models_template(make: Callable[..., Any]) -> None:
    model = make(batch_size=8)
    chat = [{"role": "user", "content": "Add."}]
    assert model.apply_chat_template(chat) == "# Add.\ndef"
    assert model.chat_template(True) and model.chat_template(False) is None


@pytest.mark.full
def test_the_command_runs_a_task_of_ones_own(tmp_path: Path) -> None:
    task = (TASKS / "python_choices.yaml").read_text().replace("${DATA}", str(TASKS / "python_choices.jsonl"))
    (tmp_path / "python_choices.yaml").write_text(task)
    words = [
        "run",
        "--tasks",
        "python_choices",
        "--include_path",
        str(tmp_path),
        "--output_path",
        str(tmp_path / "out"),
    ]
    found = []
    for size in (1, 64):
        command = [sys.executable, "-m", "xla_engine", "lm-eval", *words, "--batch_size", str(size)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=_environment() | offline
        )
        assert done.returncode == 0, done.stderr[-2000:]
        [file] = (tmp_path / "out").rglob("results_*.json")
        found.append(json.loads(file.read_text())["results"]["python_choices"])
        file.unlink()
    assert found[0] == found[1] and 0.5 < found[0]["acc,none"] <= 1


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


@pytest.mark.oracle
def test_scores_are_those_of_lm_evals_hf_model(make: Callable[..., Any]) -> None:
    """To 1e-5 of a score: a sum over tokens in float32, in which each side rounds."""
    pytest.importorskip("torch")
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(pretrained=str(embedded_model_directory()), dtype="float32", device="cpu", batch_size=4)
    ours = make(batch_size=8, dtype="float32")
    requests = instances("loglikelihood", PAIRS)
    for (mine, greedy), (other, as_greedy) in zip(
        ours.loglikelihood(requests, disable_tqdm=True),
        theirs.loglikelihood(requests, disable_tqdm=True),
        strict=True,
    ):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-5) and greedy == as_greedy
