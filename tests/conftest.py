"""Shared engines. Tests that compile share one engine per session; every test leaves it idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import profiles as profiles
from tests.support.models import BOTH_LANES, TINY, TINY_ENGINE, tiny_checkpoint
from tests.support.parallel import pytest_cmdline_main as pytest_cmdline_main
from tests.support.parallel import pytest_collection as pytest_collection
from tests.support.parallel import pytest_collection_finish as pytest_collection_finish
from tests.support.parallel import pytest_collection_modifyitems as pytest_collection_modifyitems
from tests.support.shared_programs import shared_inventory, shared_programs
from tests.support.traced_programs import remembering
from xla_engine.config import EngineConfig
from xla_engine.engine.batch_engine import XlaBatchEngine
from xla_engine.environment import compile_cache_directory
from xla_engine.graphs.config import ModelConfig
from xla_engine.runner.compile_cache import use_compile_cache


@pytest.fixture(scope="session", autouse=True)
def compile_cache() -> None:
    """Programs of tests without an engine are kept on disk, too; all processes of a run share them."""
    use_compile_cache(compile_cache_directory())


@pytest.fixture(scope="session", autouse=True)
def programs_of_this_process() -> Iterator[None]:
    """Engines of all processes share programs, and trace all of them while a test replaces what is traced."""
    with pytest.MonkeyPatch.context() as patch, remembering():
        patch.setattr("xla_engine.runner.runner.program_store", shared_programs)
        patch.setattr("xla_engine.runner.vision_tower.Inventory", shared_inventory)
        shared_programs("")  # sees what there is before tests replace it
        yield


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
    with XlaBatchEngine(tiny_checkpoint(), None, BOTH_LANES) as engine:
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
