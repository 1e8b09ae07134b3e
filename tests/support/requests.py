"""Requests that several tests run, and their answers to the bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tests.support.models import TINY
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.outputs import CompletionOutput, RequestOutput
from xla_engine.sampling_params import SamplingParams

DRAW = random.Random(5)
PROMPTS = [[DRAW.randrange(TINY.vocab_size) for _ in range(count)] for count in (1, 15, 16, 40, 90, 200)]
PARAMS = [
    SamplingParams(temperature=0.8, max_tokens=20, logprobs=2, seed=1, ignore_eos=True),
    SamplingParams(
        temperature=1.0,
        max_tokens=24,
        logprobs=0,
        seed=2,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        min_tokens=15,
        logit_bias={3: 4.0, 5: -4.0},
    ),
    SamplingParams(temperature=0, max_tokens=30, logprobs=0, stop_token_ids=[7, 11, 30]),
]


def answers(outputs: list[RequestOutput]) -> dict[str, tuple[tuple[int, ...], bytes, object]]:
    return {
        output.request_id: (
            output.outputs[0].token_ids,
            np.asarray(output.outputs[0].logprobs, np.float32).tobytes(),
            output.outputs[0].top_logprobs,
        )
        for output in outputs
    }


def submit_all(engine: XlaBatchEngine) -> list[str]:
    return [
        engine.submit(prompt, params, request_id=f"{at}/{kind}")
        for at, prompt in enumerate(PROMPTS)
        for kind, params in enumerate(PARAMS)
    ]


def comparable(output: RequestOutput) -> tuple[Any, ...]:
    """All that a caller can see of a result, with the bits of every number."""

    def bits(value: float) -> bytes:
        return np.float32(value).tobytes()

    def entries(tokens: tuple[Any, ...] | None) -> Any:
        if tokens is None:
            return None
        return [
            each and {token: (bits(found.logprob), found.rank) for token, found in each.items()}
            for each in tokens
        ]

    def one(choice: CompletionOutput) -> tuple[Any, ...]:
        logprobs = choice.logprobs and [bits(value) for value in choice.logprobs]
        return choice.token_ids, choice.finish_reason, choice.text, logprobs, entries(choice.top_logprobs)

    return *map(one, output.outputs), entries(output.prompt_logprobs)
