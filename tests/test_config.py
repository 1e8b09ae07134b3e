"""Options of an engine: unknown ones are refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from xla_engine.config import EngineConfig
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
