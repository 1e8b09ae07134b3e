"""The leaves of models on disk, so that a start that traces nothing needs no flax (`graphs.model.spec`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from xla_engine.environment import compile_cache_directory
from xla_engine.graphs.model.leaves import Leaf
from xla_engine.graphs.model.leaves import Path as LeafPath
from xla_engine.graphs.model.spec import KEPT_LEAVES, KeptLeaves, ModelSpec
from xla_engine.graphs.ops.coded import CodedForm
from xla_engine.runner.native_library.cache import private_directory, read_sealed, write_sealed
from xla_engine.runner.program_key import NoKeyError, code_key, spec_key

_MOST = 100  # files; those that were not read for longest are deleted


@contextlib.contextmanager
def leaves_on_disk(*, enabled: bool = True) -> Iterator[None]:
    """Specs that are made in the block take their leaves from the user's cache directory, or put them there."""
    kept = None
    with contextlib.suppress(NoKeyError):  # of code that was replaced in this process
        kept = LeavesOnDisk(compile_cache_directory() / "leaves") if enabled else None
    with keeping_leaves(kept):
        yield


@contextlib.contextmanager
def keeping_leaves(kept: KeptLeaves | None) -> Iterator[None]:
    """Specs that are made in the block take their leaves from `kept`, or put them there."""
    before = KEPT_LEAVES.set(kept)
    try:
        yield
    finally:
        KEPT_LEAVES.reset(before)


class LeavesOnDisk:
    """The `KeptLeaves` of a directory, for models on one device."""

    def __init__(self, directory: Path) -> None:
        """Raises NoKeyError if code was replaced in this process."""
        self._code = code_key()
        self._directory = private_directory(directory)

    def load(self, spec: ModelSpec) -> Sequence[tuple[LeafPath, Leaf]] | None:
        path = self._path(spec)
        content = None if path is None else read_sealed(path)
        return None if content is None else [(tuple(path), _read(leaf)) for path, leaf in json.loads(content)]

    def save(self, spec: ModelSpec, found: Sequence[tuple[LeafPath, Leaf]]) -> None:
        if (path := self._path(spec)) is None:
            return
        with contextlib.suppress(OSError):  # the next start makes them again
            write_sealed(path, json.dumps([(place, _written(leaf)) for place, leaf in found]).encode())
            files = sorted(self._directory.glob("*.json"), key=lambda each: each.stat().st_mtime)
            for old in files[:-_MOST]:
                old.unlink(missing_ok=True)

    def _path(self, spec: ModelSpec) -> Path | None:
        """None for a spec that is sharded, or has parts of an unknown kind."""
        if spec.sharding.devices is not None:
            return None
        try:
            return self._directory / f"{spec_key(spec, self._code)[:40]}.json"
        except NoKeyError:
            return None


def _written(leaf: Leaf) -> dict[str, Any]:
    """The leaf as JSON."""
    assert leaf.cut is None
    form = leaf.form and [leaf.form.features, leaf.form.width, leaf.form.runs, leaf.form.order]
    return {"shape": leaf.shape, "dtype": leaf.dtype.name, "role": leaf.role, "form": form}


def _read(leaf: dict[str, Any]) -> Leaf:
    form = None
    if leaf["form"] is not None:
        features, width, runs, order = leaf["form"]
        form = CodedForm(features, width, tuple((kind, blocks) for kind, blocks in runs), order)
    return Leaf(shape=tuple(leaf["shape"]), dtype=jnp.dtype(leaf["dtype"]), role=leaf["role"], form=form)
