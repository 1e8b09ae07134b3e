"""A text is scored as it was sampled: `prompt_logprobs` are the log-probabilities of its sampling, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.instruction_sets import HAS_KERNELS
from tests.support.models import BOTH_LANES, TINY_ENGINE, tiny_checkpoint
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.equivalence.cases import draw_cases
from xla_engine.outputs import RequestOutput
from xla_engine.sampling_params import SamplingParams

_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4}
_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
pytestmark = pytest.mark.skipif(
    not HAS_KERNELS, reason="only the C++ kernels run prompts and answers through the same code"
)


def _run(
    engine: XlaBatchEngine, requests: dict[str, tuple[tuple[int, ...], SamplingParams]]
) -> dict[str, RequestOutput]:
    for request_id, (prompt, params) in requests.items():
        engine.submit(prompt, params, request_id=request_id)
    return {output.request_id: output for output in engine.drain()}


def _scored(output: RequestOutput, start: int) -> bytes:
    """The bits of the log-probabilities of the tokens from `start` on."""
    assert output.prompt_logprobs is not None
    found = zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True)
    return np.array([each[token].logprob for token, each in found if each], np.float32).tobytes()


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(BOTH_LANES, id="slots"),
        pytest.param(
            replace(TINY_ENGINE, max_num_seqs=3, num_blocks=256, block_size=32, chunk_size=32), id="blocks"
        ),
        pytest.param(replace(TINY_ENGINE, speculative_config=_LOOKUP), id="lookup"),
        pytest.param(
            replace(TINY_ENGINE, chunk_size=64, kv_cache_dtype="int8"), id="int8-kv", marks=pytest.mark.full
        ),
        pytest.param(
            replace(TINY_ENGINE, bits="portable", num_blocks=256, block_size=32),
            id="portable",
            marks=pytest.mark.full,
        ),
    ],
)
def test_prompt_logprobs_are_those_of_sampling(config: EngineConfig) -> None:
    """They are equal for every sampling field, because the raw distribution does not depend on temperature,
    truncation or penalties. The text is scored as one prompt, in other chunks and beside other requests than
    those it was sampled with, and also from the answer's first token on, after a cached prompt."""
    with XlaBatchEngine(tiny_checkpoint(), None, config) as engine:
        cases = [
            case
            for case in draw_cases(engine, 60, seed=34, every_field=True)
            if len(case.prompt_token_ids) < 200
        ]
        sampled = _run(engine, {each.request_id: (each.prompt_token_ids, each.params) for each in cases})
        texts = {
            request_id: (*output.prompt_token_ids, *output.outputs[0].token_ids)
            for request_id, output in sampled.items()
        }
        whole = _run(
            engine, {name: (text, replace(_PARAMS, prompt_logprobs=0)) for name, text in texts.items()}
        )
        starts = {name: len(output.prompt_token_ids) for name, output in sampled.items()}
        behind = _run(
            engine,
            {
                name: (text, replace(_PARAMS, prompt_logprobs=0, logprobs_start=starts[name]))
                for name, text in texts.items()
                if len(text) > starts[name]
            },
        )
        tokens = 0
        for name, output in sampled.items():
            (answer,) = output.outputs
            expected = np.array(answer.logprobs, np.float32).tobytes()
            assert _scored(whole[name], starts[name]) == expected, name
            if name in behind:
                assert _scored(behind[name], starts[name]) == expected, name
            tokens += len(answer.token_ids)
        assert tokens > 300
        if config.num_blocks is not None:
            assert sum(output.num_cached_tokens for output in behind.values()) > 0
        if config.speculation is not None:
            assert sum(output.num_accepted_tokens for output in sampled.values()) > 0
