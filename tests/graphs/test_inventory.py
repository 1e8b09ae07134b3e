"""How programs are compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_engine.graphs.inventory import Inventory, Program, compiler_options


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="an option of XLA for CPUs")
def test_reciprocal_roots_have_one_arithmetic_on_processors_of_every_maker() -> None:
    """XLA's own reciprocal root starts from the processor's estimate, which AMD and Intel round differently."""
    if compiler_options() is None:
        pytest.skip("this version of XLA has no such option")
    values = np.geomspace(1e-6, 1e6, 4096).astype(np.float32).reshape(4, 1024)
    inventory = Inventory()
    inventory.compile([Program(name="rsqrt", function=jax.lax.rsqrt, arguments=(jnp.asarray(values),))])
    found = np.asarray(inventory("rsqrt", jnp.asarray(values)))
    np.testing.assert_array_equal(found, np.float32(1) / np.sqrt(values))
