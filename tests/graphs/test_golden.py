"""The external oracle, from committed files: transformers' greedy tokens and logits in float32 (make_golden.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import embedded_model_directory
from xla_engine.equivalence.reference import Reference
from xla_engine.model_loader.checkpoint import load_checkpoint
from xla_engine.sampling_params import SamplingParams

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = {
    "gqa_tied": GOLDEN / "gqa_tied",
    "untied_odd_heads": GOLDEN / "untied_odd_heads",
    "llama3_rope": GOLDEN / "llama3_rope",
    "embedded": embedded_model_directory(),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_logits_are_transformers(name: str) -> None:
    """At least 8 prompts of 48 greedy tokens each, all in one batch; last-position logits within 2e-4."""
    golden = np.load(GOLDEN / name / "golden.npz")
    checkpoint = load_checkpoint(MODELS[name], dtype="float32")
    prompts = [row[row >= 0].tolist() for row in golden["prompts"]]
    assert len(prompts) >= 8 and golden["tokens"].shape[1] >= 48
    cap = golden["tokens"].shape[1]
    # One prefill and one decode graph: `verify` and the self-check see to it that others give the same.
    config = EngineConfig(
        max_num_seqs=16,
        max_model_len=min(256, checkpoint.config.max_position_embeddings),
        prefill_lanes=(8,),
        self_check=False,
    )
    with XlaBatchEngine(checkpoint, None, config) as engine:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=cap, ignore_eos=True)
            engine.submit(prompt, params, request_id=str(index))
        outputs = {output.request_id: output.outputs[0].token_ids for output in engine.drain()}
    for index, expected in enumerate(golden["tokens"].tolist()):
        gaps = golden["gaps"][index]
        assert list(outputs[str(index)]) == expected, f"prompt {index}; smallest logit gap {gaps.min():.2g}"

    reference = Reference(checkpoint)
    for prompt, expected in zip(prompts, golden["logits"], strict=False):
        np.testing.assert_allclose(reference.logits(prompt)[-1], expected, atol=2e-4, rtol=2e-4)
