"""Draw random requests for schedules."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.row_state.sampling_fields import SAMPLING_FIELDS
from xla_engine.prompts import PicturedPrompt
from xla_engine.sampling_params import SamplingParams
from xla_engine.scheduler import PromptImage
from xla_engine.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request. images: its pictures, decoded; drawn requests have none."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    images: tuple[PromptImage, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...] | PicturedPrompt:
        """What an engine is given."""
        return (
            PicturedPrompt("", self.prompt_token_ids, self.images) if self.images else self.prompt_token_ids
        )


def draw_cases(
    engine: XlaBatchEngine, count: int, seed: int, *, max_new_tokens: int = 24, every_field: bool = False
) -> list[Case]:
    """Draw requests: prompts of 1 token to the longest that fits, caps up to `max_new_tokens`, all kinds of sampling.

    If the model has a tokenizer, half of the prompts are cut from a text that the model continues well. The rest
    are random token ids, so that no two requests share a prefix by accident.

    every_field: most requests also have some of the fields that change logits, forbid tokens, end a text or ask for
        more log-probabilities (`draw_fields`).
    """
    draw, again = random.Random(seed), random.Random(f"{seed}/fields")
    vocabulary = engine.checkpoint.config.vocab_size
    limit = engine.max_model_len
    corpus = corpus_of(engine)
    cases = []
    for index in range(count):
        cap = draw.choice(
            (1, 1, 2, 3, draw.randint(1, max_new_tokens), draw.randint(1, max_new_tokens), max_new_tokens)
        )
        cap = min(cap, limit - 1)
        # Mostly short prompts, a tail up to the longest that fits.
        longest = limit - cap
        length = min(longest, 1 + int(longest * draw.random() ** 3))
        if corpus and draw.random() < 0.5:
            at = draw.randrange(len(corpus))
            prompt = tuple((corpus * (1 + (at + length) // len(corpus)))[at : at + length])
        else:
            prompt = tuple(draw.randrange(vocabulary) for _ in range(length))
        params = _draw_params(draw, cap, vocabulary)
        if every_field:
            params = replace(params, **draw_fields(again, engine, params, corpus))
        cases.append(Case(request_id=f"case-{index}", prompt_token_ids=prompt, params=params))
    return cases


def draw_fields(
    draw: random.Random, engine: XlaBatchEngine, params: SamplingParams, corpus: Sequence[int]
) -> dict[str, Any]:
    """Draw additional fields, each with probability 1/8; text fields only if the engine has a tokenizer.

    corpus: tokens of text that the model knows.
    """
    vocabulary = engine.checkpoint.config.vocab_size

    def some(count: int) -> list[int]:
        return draw.sample(range(vocabulary), min(count, vocabulary))

    fields: dict[str, Any] = {
        "min_tokens": draw.randint(0, params.token_limit),
        **{str(line.param): draw.choice(line.tried) for line in SAMPLING_FIELDS.values() if line.tried},
        "logit_bias": {token: draw.choice((-100.0, 4.5)) for token in some(3)},
        "allowed_token_ids": some(40),
        "ignore_eos": True,
        "logprobs": draw.choice((1, 5, 20)),
    }
    if engine.tokenizer is not None and corpus:
        at = draw.randrange(len(corpus))
        text = engine.tokenizer.decode((*corpus[at:], *corpus)[: draw.randint(1, 3)])
        fields["stop"] = [text] if text else []
        fields["bad_words"] = [text] if text.strip() else []
    if engine.tokenizer is not None and engine.checkpoint.eos_token_ids and find_spec("llguidance"):
        constraint = draw.choice(
            ({"regex": "[a-z_ ]{3,30}"}, {"json_object": True}, {"choice": ["yes", "no"]})
        )
        fields["structured_outputs"] = StructuredOutputsParams.from_mapping(constraint)
    drawn = {name: value for name, value in fields.items() if draw.random() < 0.125}
    if "structured_outputs" in drawn:  # only what the grammar allows, and its end
        for name in ("allowed_token_ids", "ignore_eos", "bad_words"):
            drawn.pop(name, None)
    return drawn


def _draw_params(draw: random.Random, cap: int, vocabulary: int) -> SamplingParams:
    stop = [draw.randrange(vocabulary) for _ in range(4)] if draw.random() < 0.3 else []
    if draw.random() < 0.4:
        return SamplingParams(temperature=0, max_tokens=cap, logprobs=0, stop_token_ids=stop)
    return SamplingParams(
        temperature=draw.choice((0.3, 0.7, 1.0, 1.5)),
        top_k=draw.choice((0, 0, 1, 5, 40, 200)),
        top_p=draw.choice((1.0, 1.0, 0.95, 0.5, 0.1)),
        min_p=draw.choice((0.0, 0.0, 0.05, 0.3)),
        seed=draw.choice((None, draw.randrange(2**63))),
        max_tokens=cap,
        logprobs=0,
        stop_token_ids=stop,
    )


def corpus_of(engine: XlaBatchEngine) -> tuple[int, ...]:
    """Tokens of `prompts.txt`, some Python source: the same text on every machine. Empty without a tokenizer."""
    if engine.tokenizer is None:
        return ()
    text = files("xla_engine.equivalence").joinpath("prompts.txt").read_text(encoding="utf-8")
    return tuple(engine.tokenizer.encode(text))
