"""Packs many small arrays into one, because a call pays for each buffer, above all for outputs.

See findings/host_time.md.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WORD = jnp.uint32


def pack(record: Any) -> Any:
    """Concatenate the leaves `[N, ...]` of a record, four-byte elements or bools, to u32 `[N, W]`.

    Returns a numpy array if the leaves are numpy arrays.
    """
    leaves = jax.tree.leaves(record)
    columns = [_words(leaf).reshape(leaf.shape[0], -1) for leaf in leaves]
    on_host = isinstance(leaves[0], np.ndarray)
    return np.concatenate(columns, 1) if on_host else jnp.concatenate(columns, 1)


def unpack(words: jax.Array, like: Any) -> Any:
    """The inverse of `pack`. like: a record with the same dtypes and shapes, except for the leading axis."""
    leaves, tree = jax.tree.flatten(like)
    found, at = [], 0
    for leaf in leaves:
        width = int(np.prod(leaf.shape[1:]))
        column = words[:, at : at + width].reshape(words.shape[0], *leaf.shape[1:])
        at += width
        is_bool = leaf.dtype == jnp.bool_
        found.append(column != 0 if is_bool else jax.lax.bitcast_convert_type(column, leaf.dtype))
    assert at == words.shape[1], f"{words.shape[1]} words a row, the record has {at}"
    return jax.tree.unflatten(tree, found)


def _words(leaf: Any) -> Any:
    if leaf.dtype == jnp.bool_:
        return leaf.astype(WORD)
    return leaf.view(WORD) if isinstance(leaf, np.ndarray) else jax.lax.bitcast_convert_type(leaf, WORD)
