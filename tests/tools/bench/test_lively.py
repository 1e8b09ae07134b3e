"""Streams of the benchmark's random models show a fault, and streams that would not are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.reference import greedy_tokens
from xla_engine.equivalence.forward_pass import ForwardPass
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, load_checkpoint, random_weights
from xla_engine.tools.bench.models import lively_weights, write_checkpoint
from xla_engine.tools.bench.rounds import NEAR_TIE, dull_reason, verdict, void_reason
from xla_engine.tools.bench.workers.xla import judge as make_judge

SMALL = ModelConfig(
    vocab_size=1499,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=128,
    rope_theta=100000.0,
    tie_word_embeddings=True,
)
PROMPT, NEW = 30, 32


class LatePositions(ForwardPass):
    """Behind the prompt every token stands one place too late."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        forward = self._forward
        place = np.arange(64) + (np.arange(64) >= PROMPT)
        self._forward = lambda weights, rope, tokens: forward(weights, rope[:, place.clip(0, 63)], tokens)


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lively")
    write_checkpoint(SMALL, lively_weights(SMALL), path)
    return path


def prompts() -> list[list[int]]:
    return np.random.default_rng(0).integers(0, SMALL.vocab_size, (4, PROMPT)).tolist()


def greedy(engine: ForwardPass) -> list[list[int]]:
    return [greedy_tokens(engine, prompt, NEW) for prompt in prompts()]


@pytest.mark.full
def test_the_streams_of_a_random_model_are_lively_and_faults_in_them_are_found(lively: Path) -> None:
    judge = make_judge(1)
    judge.load(str(lively))
    checkpoint = load_checkpoint(lively, dtype="bfloat16")
    streams = greedy(ForwardPass(checkpoint))
    assert dull_reason(streams) is None
    assert min(len(set(stream)) for stream in streams) >= NEW // 2

    def judged(streams: Sequence[Sequence[int]]) -> str | None:
        regrets = judge.regrets(prompts(), [list(stream) for stream in streams])["regrets"]
        return void_reason(verdict(regrets, streams, None, [NEAR_TIE["bfloat16"]] * 4 * NEW))

    assert judged(streams) is None
    assert "wrong streams" in str(judged([*streams[1:], streams[0]])), "every row reads its neighbour's slot"
    assert "wrong streams" in str(judged(greedy(LatePositions(checkpoint))))


def test_plain_normal_weights_are_refused(tmp_path: Path) -> None:
    write_checkpoint(SMALL, random_weights(SMALL, dtype="bfloat16"), tmp_path)
    assert "dull streams" in str(dull_reason(greedy(ForwardPass(load_checkpoint(tmp_path)))))


@pytest.mark.parametrize(
    ("streams", "word"),
    [
        ([[1, 2, 3] * 16] * 1, "3 distinct tokens of 48"),
        ([[*range(11)] * 5, [*range(100, 111)] * 5], "11 distinct tokens of 48"),
        ([[*range(12)] * 4, [*range(100, 112)] * 4], None),  # a quarter
        ([[7] * 48, [*range(48)], [*range(1, 49)]], None),  # one of three
        ([[*range(48)] + [7] * 400], None),  # the beginning counts
        ([[5] * 15], None),  # too short to tell
        ([[5], [5], [5], [6]], None),
        ([[5], [5], [5]], "begin in 1 ways"),
        ([[*range(30)]] * 3, "swapped slot"),
        ([], None),
    ],
)
def test_dull_is_told_from_lively(streams: list[list[int]], word: str | None) -> None:
    found = dull_reason(streams)
    assert (found is None) if word is None else (found is not None and word in found)
