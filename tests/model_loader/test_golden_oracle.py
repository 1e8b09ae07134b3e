"""The committed golden files are what transformers computes. Run: `pytest -m oracle` with that extra."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="needs the oracle extra: pip install -e '.[oracle]'")
pytest.importorskip("transformers", reason="needs the oracle extra: pip install -e '.[oracle]'")

GOLDEN = Path(__file__).parents[1] / "golden"
LOGIT_BOUND = 1e-4  # float32 on another CPU sums in another order; the observed difference is below 2e-5
NEAR_TIE = 2 * LOGIT_BOUND  # below this gap another order of summation may choose the other token


@pytest.fixture(scope="module")
def script() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(GOLDEN / "make" / "make_golden.py")))


@pytest.mark.parametrize("name", ["gqa_tied", "untied_odd_heads", "llama3_rope"])
def test_tiny_goldens_are_rederived(script: SimpleNamespace, name: str) -> None:
    directory = GOLDEN / name
    committed = np.load(directory / "golden.npz")
    prompts = script.random_prompts(script.TINY[name][0])
    assert_same(script.golden(directory, prompts, logits_of=len(committed["logits"])), committed)
    assert committed["gaps"].min() > 10 * LOGIT_BOUND, "near-ties prove little; take another seed"


# gemma3n_vision has the decoder of gemma3n, and a class that transformers makes only with timm
DERIVED = sorted({path.name for path in (GOLDEN / "families").iterdir()} - {"gemma3n_vision"})


@pytest.mark.parametrize("name", DERIVED)
def test_goldens_of_families_are_rederived(name: str) -> None:
    import torch
    import transformers

    families = runpy.run_path(str(GOLDEN / "make" / "make_golden_families.py"))
    directory = GOLDEN / "families" / name
    committed = np.load(directory / "golden.npz")
    architecture = families["CASES"][name][0]
    assert json.loads((directory / "config.json").read_text())["architectures"] == [architecture]
    if name.endswith("mxfp4"):  # which transformers reads on GPUs only
        model = families["random_model"](name, int(committed["seed"]))
    else:
        model = getattr(transformers, architecture).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
    assert_same(families["golden"](model.eval(), int(committed["seed"])), committed)
    assert committed["gaps"].min() > 10 * LOGIT_BOUND, "near-ties prove little; take another seed"


def test_embedded_goldens_are_rederived(script: SimpleNamespace) -> None:
    committed = np.load(GOLDEN / "embedded" / "golden.npz")
    derived = script.embedded_golden(GOLDEN.parents[1] / "xla_engine" / "embedded")
    np.testing.assert_array_equal(derived["texts"], committed["texts"])
    assert_same(derived, committed)


def test_chat_goldens_are_rederived() -> None:
    committed = json.loads((GOLDEN / "chat" / "golden.json").read_text(encoding="utf-8"))
    assert runpy.run_path(str(GOLDEN / "make" / "make_golden_chat.py"))["cases"]() == committed["cases"]


@pytest.mark.parametrize("name", ["gqa_tied", "untied_odd_heads", "llama3_rope"])
def test_one_forward_pass_without_cache_chooses_the_same_tokens(name: str) -> None:
    """Tokens come from a loop over transformers' cache; its plain forward pass must agree."""
    import torch
    import transformers

    directory = GOLDEN / name
    committed = np.load(directory / "golden.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for padded, tokens in zip(committed["prompts"], committed["tokens"], strict=True):
        prompt = padded[padded >= 0]
        with torch.inference_mode():
            logits = model(torch.tensor(np.concatenate([prompt, tokens])[None])).logits[0]
        np.testing.assert_array_equal(logits[len(prompt) - 1 : -1].argmax(-1).numpy(), tokens)


def assert_same(derived: dict[str, np.ndarray], committed: dict[str, np.ndarray]) -> None:
    np.testing.assert_array_equal(derived["prompts"], committed["prompts"])
    np.testing.assert_allclose(derived["logits"], committed["logits"], rtol=0, atol=LOGIT_BOUND)
    assert committed["tokens"].shape[0] >= 8 and committed["tokens"].shape[1] >= 48
    for row, (ours, theirs) in enumerate(zip(derived["tokens"], committed["tokens"], strict=True)):
        different = np.flatnonzero(ours != theirs)
        if different.size:  # after a near-tie the two continue from different texts
            step = different[0]
            assert committed["gaps"][row, step] < NEAR_TIE, f"prompt {row}: other token at step {step}"
