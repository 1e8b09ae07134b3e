"""Log-likelihoods: only the scored part of a prompt is computed, the rest is cached, and the bits are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.models import TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.tiers import default
from xla_engine import LLM
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.errors import InvalidRequestError
from xla_engine.outputs import RequestOutput
from xla_engine.pooling_outputs import Score
from xla_engine.sampling_params import SamplingParams

DRAW = random.Random(3)
STEM = [DRAW.randrange(TINY.vocab_size) for _ in range(120)]
ENDS = [[DRAW.randrange(TINY.vocab_size) for _ in range(DRAW.randint(1, 40))] for _ in range(12)]
WHOLE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=2, logprobs=1)


@pytest.fixture(
    scope="module",
    params=["slots", *(pytest.param(each, marks=pytest.mark.full) for each in ("blocks", "xla"))],
)
def engine(request: pytest.FixtureRequest) -> Iterator[XlaBatchEngine]:
    config = {
        "slots": TINY_ENGINE,
        "blocks": replace(TINY_ENGINE, num_blocks=60, block_size=32),
        "xla": replace(TINY_ENGINE, attention_backend="xla", prefill_lanes=(8,), key_buckets=(512,)),
    }[request.param]
    with XlaBatchEngine(tiny_checkpoint(), None, config) as made:
        yield made


def run(
    engine: XlaBatchEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    for at, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        engine.submit(prompt, each, request_id=f"r{at}")
    outputs = {output.request_id: output for output in engine.drain()}
    return [outputs[f"r{at}"] for at in range(len(prompts))]


def bits(output: RequestOutput, start: int) -> list[tuple[int, bytes, int]]:
    assert output.prompt_logprobs is not None
    return [
        (token, np.float32(found.logprob).tobytes(), found.rank)
        for each in output.prompt_logprobs[start:]
        if each is not None
        for token, found in each.items()
    ]


@pytest.mark.parametrize("start", default([0, 17, 120, 1, 2, 16, 64, 119], 3))
def test_scores_from_a_position_on_are_those_of_the_whole_prompt(engine: XlaBatchEngine, start: int) -> None:
    """The bits are the same with a cold cache, a warm one, and in a batch; earlier positions are not returned."""
    prompts = [[*STEM, *end] for end in ENDS]
    engine.reset_prefix_cache()
    whole = [run(engine, [prompt], [WHOLE])[0] for prompt in prompts]
    part = replace(WHOLE, logprobs_start=start)
    engine.reset_prefix_cache()
    cold = run(engine, prompts[:1], [part])
    warm = run(engine, prompts, [part] * len(prompts))
    for expected, output in zip([whole[0], *whole], [*cold, *warm], strict=True):
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        assert set(output.prompt_logprobs[: max(start, 1)]) == {None}
        assert None not in output.prompt_logprobs[max(start, 1) :]
        assert bits(output, 1) == bits(expected, max(start, 1))
        assert output.outputs == expected.outputs
    most = max(start - 1, 0)
    assert all(output.num_cached_tokens <= most for output in warm)
    if start > TINY_ENGINE.chunk_size:
        assert min(output.num_cached_tokens for output in warm) > 0


def test_a_request_that_was_stopped_on_the_way_is_scored_as_ever(engine: XlaBatchEngine) -> None:
    """It is preempted after its first token, and its prompt runs again."""
    part = replace(WHOLE, logprobs_start=100, max_tokens=20)
    prompts = [[*STEM, *end] for end in ENDS[:8]]
    expected = [run(engine, [prompt], [part])[0] for prompt in prompts]
    engine.reset_prefix_cache()
    for at, prompt in enumerate(prompts):
        engine.submit(prompt, part, request_id=f"r{at}")
    for _ in range(12):
        engine.step()
    for at in range(4):
        engine.preempt(f"r{at}")
    outputs = {output.request_id: output for output in engine.drain()}
    for at, other in enumerate(expected):
        assert bits(outputs[f"r{at}"], 1) == bits(other, 1) and outputs[f"r{at}"].outputs == other.outputs


@pytest.mark.parametrize("params", [{"logprobs_start": 3}, {"logprobs_start": -1, "prompt_logprobs": 0}])
def test_a_start_without_sense_is_refused(params: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match="logprobs_start"):
        SamplingParams(**params)  # type: ignore[arg-type]


def test_a_start_behind_the_prompt_is_refused(engine: XlaBatchEngine) -> None:
    with pytest.raises(InvalidRequestError, match="beyond the prompt of 5 tokens"):
        engine.submit([1, 2, 3, 4, 5], replace(WHOLE, logprobs_start=5))


def test_scores_do_not_depend_on_their_company(engine: XlaBatchEngine) -> None:
    llm = LLM.from_engine(engine)
    contexts = [STEM, STEM[:50], STEM[:1], STEM, STEM[:119]] * 4
    pairs = list(zip(contexts, [DRAW.choice(ENDS) for _ in contexts], strict=True))

    def scores(some: list[tuple[list[int], list[int]]]) -> list[Score]:
        found = llm.score([one for one, _ in some], [two for _, two in some], use_tqdm=False)
        return [replace(each, num_cached_tokens=0) for each in found]

    together = scores(pairs)
    alone = []
    for pair in pairs:
        engine.reset_prefix_cache()
        alone += scores([pair])
    assert together == alone
    for (context, rest), score in zip(pairs, together, strict=True):
        (output,) = run(engine, [[*context, *rest]], [WHOLE])
        assert output.prompt_logprobs is not None
        tokens = [each[token].logprob for each, token in _ends(output, len(context))]
        assert score.token_logprobs == tuple(tokens) and score.logprob == sum(tokens)


def _ends(output: RequestOutput, begin: int) -> Iterator[tuple[dict[int, object], int]]:  # type: ignore[misc]
    assert output.prompt_logprobs is not None
    for each, token in zip(output.prompt_logprobs[begin:], output.prompt_token_ids[begin:], strict=True):
        assert each is not None
        yield each, token  # type: ignore[misc]


def test_what_greedy_decoding_writes_is_greedy(embedded: XlaBatchEngine) -> None:
    llm, params = LLM.from_engine(embedded), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [output] = llm.generate("import numpy as", params, use_tqdm=False)
    written = list(output.outputs[0].token_ids)
    right, wrong = llm.score(
        list(output.prompt_token_ids), [written, [*written[:-1], written[-1] + 1]], use_tqdm=False
    )
    assert right.is_greedy and not wrong.is_greedy and right.logprob > wrong.logprob


def test_texts_are_scored_as_one_text(embedded: XlaBatchEngine) -> None:
    """Blanks at the end of the context belong to the continuation's first token."""
    llm = LLM.from_engine(embedded)
    spaced, joined = llm.score(["import ", "import"], ["numpy", " numpy"], use_tqdm=False)
    assert replace(spaced, num_cached_tokens=0) == replace(joined, num_cached_tokens=0)
    assert embedded.tokenizer is not None
    assert embedded.tokenizer.decode(joined.token_ids) == " numpy"
    [melted] = llm.score("a", "s", use_tqdm=False)  # "as" is one token
    assert len(embedded.tokenizer.encode("as")) == 1 and embedded.tokenizer.decode(melted.token_ids) == "s"


@pytest.mark.parametrize(
    ("contexts", "continuations", "message"),
    [
        (["a", "b"], ["c", "d", "e"], "2 contexts for 3 continuations"),
        (["a", ""], ["c", "d"], "pair 1: the context is empty"),
        (["a"], ["c", ""], "pair 1: the continuation is empty"),
        (["a"], [[1, 2]], "pair 0: .*both be text"),
    ],
)
def test_a_pair_without_sense_is_named(
    embedded: XlaBatchEngine, contexts: list[str], continuations: list[str], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        LLM.from_engine(embedded).score(contexts, continuations, use_tqdm=False)
    assert not embedded.has_unfinished
