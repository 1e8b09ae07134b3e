"""The threshold of top-k and top-p in a kernel for TPUs, interpreted: that of the form in JAX, for any rows."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from xla_engine.graphs.sampling.threshold import bisect
from xla_engine.graphs.sampling.tpu import tpu_threshold


def rows_of(vocabulary: int, count: int) -> dict[str, jnp.ndarray]:
    """Rows with and without top-k, top-p and min-p, among them all and one token, ties, and masked tokens."""
    draw = np.random.default_rng(vocabulary)
    logits = (3 * draw.standard_normal((vocabulary, count))).astype(np.float32)
    logits[:: max(2, vocabulary // 7), 0] = 2.5
    logits[vocabulary // 2 :, -1] = -np.inf
    wanted = draw.choice([1, 2, vocabulary // 3, vocabulary - 1, vocabulary], count)
    return {
        "logits": jnp.asarray(logits),
        "peak": jnp.asarray(logits.max(0)),
        "temperature": jnp.asarray(draw.choice([0.3, 1.0, 2.0], count), jnp.float32),
        "wanted": jnp.asarray(wanted, jnp.int32),
        "top_p": jnp.asarray(draw.choice([0.1, 0.5, 0.9, 1.0], count), jnp.float32),
        "min_p": jnp.asarray(draw.choice([0.0, 0.05], count), jnp.float32),
    }


@pytest.mark.full
@pytest.mark.parametrize(("vocabulary", "count"), [(199, 8), (1024, 3), (2500, 11)])
def test_the_threshold_is_that_of_jax_and_of_the_row_alone(vocabulary: int, count: int) -> None:
    rows = rows_of(vocabulary, count)
    found = np.asarray(tpu_threshold(**rows, interpret=True))
    wanted = np.asarray(bisect(**rows))
    logits, last = np.asarray(rows["logits"]), np.asarray(rows["wanted"])
    for at in range(count):
        if rows["top_p"][at] == 1 and last[at] < vocabulary:  # a count is exact in any order
            assert found[at] == wanted[at] == np.sort(logits[:, at])[-last[at]]
        # Sums in another order may decide about one more token, or one less.
        kept, expected = (int((logits[:, at] >= each[at]).sum()) for each in (found, wanted))
        assert abs(kept - expected) <= 1
    alone = tpu_threshold(**{name: each[..., -1:] for name, each in rows.items()}, interpret=True)
    assert np.asarray(alone)[0] == found[-1]
