"""Options of an engine: unknown ones are refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_engine.cli import main
from xla_engine.cli._help import SECTIONS
from xla_engine.config import EngineConfig
from xla_engine.config_options import option_of
from xla_engine.errors import ConfigError

SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3)),
    st.sampled_from([10**400, -(10**400), 10**5000]),
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.tuples(SCALARS) | st.dictionaries(st.text(), SCALARS)


@given(name=st.sampled_from([field.name for field in fields(EngineConfig)]), value=VALUES)
def test_a_value_is_taken_or_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    try:
        config = EngineConfig(**{name: value})
    except ConfigError as error:
        assert name in str(error) or "block" in str(error)
        return
    repr(config)


@pytest.mark.parametrize("value", [8, 8.0, np.int64(8), np.float32(8)])
def test_integers_count_by_value(value: Any) -> None:
    config = EngineConfig(max_num_seqs=value, max_model_len=value)
    assert config == EngineConfig(max_num_seqs=8, max_model_len=8)
    assert type(config.max_num_seqs) is type(config.max_model_len) is int


@pytest.mark.parametrize("value", [8.5, "8", True, float("nan")])
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs must be an integer of at least 1"):
        EngineConfig(max_num_seqs=value)


def test_an_option_is_declared_by_its_field_and_nowhere_else() -> None:
    """Each field that has help is an option of a command, with this help and under its heading."""
    commands = [main.get_command(click.Context(main), name) for name in ("run", "serve")]
    shown = {each.name: each for command in commands if command for each in command.params}
    for each in fields(EngineConfig):
        about = option_of(each)
        assert about.section in ("", *SECTIONS)
        if about.help:
            found = shown[each.name]
            assert isinstance(found, click.Option) and found.help == about.help


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mamba_block_size": 64}, "needs mamba_cache_mode 'align'"),
        ({"mamba_cache_mode": "align", "mamba_block_size": 96}, "multiple of 64.*: give 128"),
        ({"mamba_cache_mode": "align", "enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"mamba_cache_mode": "all"}, "must be one of none, align"),
        ({"mamba_cache_mode": "align", "runner": "pooling"}, "requests that generate"),
    ],
)
def test_options_of_saved_states_are_refused_with_the_remedy(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize(("chunk_size", "interval"), [(32, 1024), (512, 1024), (24, 1152)])
def test_the_default_interval_of_saved_states_is_a_multiple_of_chunk_and_block(
    chunk_size: int, interval: int
) -> None:
    config = EngineConfig(mamba_cache_mode="align", chunk_size=chunk_size, max_num_seqs=4)
    assert (config.state_interval, config.saved_states) == (interval, 8)
