"""Every family of encoders compared with transformers, from committed files (make_golden_encoders.py)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from xla_engine import LLM
from xla_engine.cli import main
from xla_engine.errors import ConfigError
from xla_engine.pooling_params import PoolingParams
from xla_engine.runner.native_library.instruction_sets import available

GOLDEN = Path(__file__).parents[1] / "golden" / "encoders"
CASES = sorted(path.name for path in GOLDEN.iterdir())
QUICK = ("modernbert",)
ISAS = (*(each.name for each in available()), "none")
BOUND = 1e-4


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def prompts_of(golden: Any) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in golden["prompts"]]


def vectors(llm: LLM, prompts: list[list[int]]) -> Any:
    raw = PoolingParams(use_activation=False)
    return np.array(
        [each.outputs.embedding for each in llm.embed(prompts, pooling_params=raw, use_tqdm=False)]
    )


def opened(name: str, **options: Any) -> LLM:
    """Heads are left out: they are not part of an embedding."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    (architecture,) = config["architectures"]
    bare = architecture.replace("ForSequenceClassification", "Model").replace("ForMaskedLM", "Model")
    return LLM(GOLDEN / name, hf_overrides={"architectures": [bare]}, max_num_seqs=4, **options)


def test_vectors_are_those_of_transformers(name: str) -> None:
    """In float32 each number within 1e-4 and the direction within 1e-4 of a cosine of 1; by both kinds of pooling."""
    golden = np.load(GOLDEN / name / "golden.npz")
    prompts = prompts_of(golden)
    for kind, key in (("MEAN", "mean"), ("CLS", "first")):
        with opened(name, dtype="float32", pooler_config={"pooling_type": kind}) as llm:
            found = vectors(llm, prompts)
        expected = golden[key]
        np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND)
        cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() > 0.9999


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
def test_a_vector_depends_on_its_text_alone(name: str, isa: str) -> None:
    options: dict[str, Any] = {"isa": isa, "dtype": "float32" if isa == "none" else "auto"}
    prompts = prompts_of(np.load(GOLDEN / name / "golden.npz"))
    with opened(name, pooler_config={"pooling_type": "MEAN"}, **options) as llm:
        alone = [vectors(llm, [each])[0].tolist() for each in prompts]
        for seed in range(3):
            order = random.Random(seed).choices(range(len(prompts)), k=30)
            assert vectors(llm, [prompts[at] for at in order]).tolist() == [alone[at] for at in order]
        assert llm.engine.runner.compiles.after == 0


@pytest.mark.full
def test_half_precision_keeps_the_vectors(name: str) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    with opened(name, pooler_config={"pooling_type": "MEAN"}) as llm:
        assert llm.engine.limits()["dtype"] == "bfloat16"
        found = vectors(llm, prompts_of(golden))
    expected = golden["mean"]
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.999


CLASSIFIERS = [name for name in CASES if "logits" in np.load(GOLDEN / name / "golden.npz")]


@pytest.mark.full
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_give_the_logits_of_transformers(name: str) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    with LLM(GOLDEN / name, dtype="float32", max_num_seqs=4) as llm:
        raw = PoolingParams(task="classify", use_activation=False)
        found = llm.classify(prompts_of(golden), pooling_params=raw, use_tqdm=False)
        np.testing.assert_allclose(
            [each.outputs.probs for each in found], golden["logits"], rtol=0, atol=BOUND
        )


def test_inspect_says_what_it_is(name: str) -> None:
    found = CliRunner().invoke(main, ["inspect", str(GOLDEN / name)])
    assert found.exit_code == 0, found.output


def test_a_decoder_that_sees_later_tokens_generates_nothing() -> None:
    with pytest.raises(ConfigError, match="generates no text"):
        LLM(GOLDEN / "qwen2_bidirectional", runner="generate")
