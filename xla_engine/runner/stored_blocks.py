"""The content of KV blocks and saved states on the host: as one program reads them, and one by one as bytes.

A block's content is the list of its arrays (the keys and values of each layer, then its tokens), as
`graphs.kv_cache.moves.read_blocks` orders them; a state's is what `graphs.kv_cache.cache.read_state` returns. As bytes
these follow each other without padding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.attention.native import floats
from xla_engine.scheduler import StoredBlock

BlockContent = Any  # the arrays of one block, in the structure of `read_blocks`


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """Which arrays a block has. structure: of the tree. shapes, dtypes: of its leaves, without the axis of blocks."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, group: Any) -> BlockLayout:
        """group: what `read_blocks` returns, abstract or not."""
        leaves, structure = jax.tree.flatten(group)
        return cls(
            structure=structure,
            shapes=tuple(leaf.shape[1:] for leaf in leaves),
            dtypes=tuple(np.dtype(leaf.dtype) for leaf in leaves),
        )

    @staticmethod
    def blocks_in(group: Any) -> int:
        """How many blocks a group has room for."""
        return len(jax.tree.leaves(group)[0])

    @property
    def sizes(self) -> list[int]:
        """Bytes of each array."""
        return [
            int(np.prod(shape)) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return sum(self.sizes)

    @property
    def digest(self) -> str:
        """Sixteen hex digits; equal layouts have equal ones."""
        known = json.dumps([self.shapes, [each.name for each in self.dtypes], str(self.structure)])
        return hashlib.sha256(known.encode()).hexdigest()[:16]

    def to_bytes(self, group: Any, at: int) -> bytes | None:
        """The content of a group's block `at`; None if a number in it is not finite, as after a failed request."""
        content = jax.tree.map(lambda leaf: np.asarray(leaf)[at], group)
        if not all(np.isfinite(each).all() for each in _floats(content)):
            return None
        return b"".join(leaf.tobytes() for leaf in jax.tree.leaves(content))

    def from_bytes(self, content: bytes) -> BlockContent:
        """The inverse of `to_bytes`; the arrays share the memory of `content`."""
        leaves, start = [], 0
        for shape, dtype, size in zip(self.shapes, self.dtypes, self.sizes, strict=True):
            leaves.append(np.frombuffer(content, np.uint8, size, start).view(dtype).reshape(shape))
            start += size
        return jax.tree.unflatten(self.structure, leaves)


def _floats(content: BlockContent) -> list[np.ndarray]:
    """The floats of a block or a state on the host."""
    if isinstance(content, list):  # a state, all float32
        return jax.tree.leaves(content)
    spans, _ = content
    return [each for span in spans for each in floats(LayerCache(*span))]


class BlockStorage(Protocol):
    """Where blocks and states of a plan's `stores` go, and those of its `loads` come from."""

    def store(self, blocks: Sequence[StoredBlock], groups: Sequence[Any]) -> None:
        """Take over the content of blocks or states, in groups of `read_blocks` or `read_state`, which may still be
        computed."""

    def take(self, blocks: Sequence[StoredBlock]) -> Mapping[bytes, BlockContent]:
        """Hand out the content of blocks by key; each is handed out once."""

    def clear(self) -> None:
        """Forget content that was not taken."""


def stacked(blocks: Sequence[BlockContent], most: int) -> Any:
    """A group of blocks, the inverse of `read_blocks`; filled with zeros to `most` blocks."""

    def stack(*leaves: np.ndarray) -> np.ndarray:
        group = np.zeros((most, *leaves[0].shape), leaves[0].dtype)
        for at, leaf in enumerate(leaves):
            group[at] = leaf
        return group

    return jax.tree.map(stack, *blocks)
