"""Shared models and engines. Tests that compile share one engine per session; every test leaves it idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.graphs.config import ModelConfig
from xla_engine.model_loader.checkpoint import Checkpoint, random_checkpoint

TINY = ModelConfig(
    vocab_size=199,  # odd, and no multiple of the sampler's block
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=3,
    head_dim=16,
    max_position_embeddings=512,
)
TINY_ENGINE = EngineConfig(
    max_num_seqs=8, max_model_len=300, prefill_lanes=(2, 8), chunk_size=16, key_buckets=(48,), block_size=16
)


def tiny_checkpoint(
    dtype: str = "bfloat16", *, eos: tuple[int, ...] = (0,), model: ModelConfig = TINY
) -> Checkpoint:
    """A random two-layer model whose logits are far from flat."""
    return random_checkpoint(model, dtype=dtype, seed=1, scale=0.3, eos_token_ids=eos)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., XlaBatchEngine]]:
    """Engines of the tiny model with options of their own, closed at the end of the test."""
    engines: list[XlaBatchEngine] = []

    def make(
        config: EngineConfig = TINY_ENGINE, dtype: str = "bfloat16", model: ModelConfig = TINY
    ) -> XlaBatchEngine:
        engines.append(XlaBatchEngine(tiny_checkpoint(dtype, model=model), None, config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def shared_tiny() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine(tiny_checkpoint(), None, TINY_ENGINE) as engine:
        yield engine


@pytest.fixture
def tiny(shared_tiny: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The session's tiny engine in bfloat16, idle before and after."""
    yield shared_tiny
    _idle(shared_tiny)


@pytest.fixture(scope="session")
def shared_embedded() -> Iterator[XlaBatchEngine]:
    with XlaBatchEngine.from_pretrained() as engine:
        yield engine


@pytest.fixture
def embedded(shared_embedded: XlaBatchEngine) -> Iterator[XlaBatchEngine]:
    """The session's engine of the embedded model, idle before and after."""
    yield shared_embedded
    _idle(shared_embedded)


def _idle(engine: XlaBatchEngine) -> None:
    engine.lag = engine.config.lag
    engine.drain()
    engine.scheduler.check()
    assert engine.num_running == engine.num_waiting == 0
