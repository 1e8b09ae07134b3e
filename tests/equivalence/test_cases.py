"""Requests drawn at random."""

from __future__ import annotations

import hashlib

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases


def test_a_seed_draws_the_same_prompts_everywhere(embedded: XlaBatchEngine) -> None:
    """Half of them are cut from a text that is shipped; it was a module of Python's own, which changes."""
    cases = draw_cases(embedded, 40, seed=0)
    prompts = repr([case.prompt_token_ids for case in cases])
    assert hashlib.sha256(prompts.encode()).hexdigest()[:16] == "5588fd38dc5c4103"
    assert any("def " in embedded.tokenizer.decode(case.prompt_token_ids) for case in cases)


def test_another_seed_draws_others(embedded: XlaBatchEngine) -> None:
    assert (
        draw_cases(embedded, 5, seed=0) == draw_cases(embedded, 5, seed=0) != draw_cases(embedded, 5, seed=1)
    )
