"""What the device keeps from call to call: cache, row state and tables, and the weights' way there."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np

from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import make_cache
from xla_engine.graphs.kv_cache.types import KVCache
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.rows import Pool, Rows, RowState, Tables, make_rows, pack_rows
from xla_engine.runner.devices import Devices
from xla_engine.runner.row_settings import HostTables
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS


class DeviceState:
    """Owner of the arrays that programs read and give back.

    cache, rows: donated to a program and replaced by what it returns.
    tables: read by programs; `host` holds them on the host, where they change.
    """

    cache: KVCache
    rows: RowState
    tables: Tables

    def __init__(
        self,
        spec: ModelSpec,
        slots: int,
        positions: int,
        context_length: int,
        pool: Pool | None,
        devices: Devices,
        *,
        drafts: int = 0,
        dry: bool = False,
        lora: bool = False,
    ) -> None:
        """positions: of a slot, whole spans. context_length: those in use. pool: slots borrow blocks of it. devices:
        where all of it lies. drafts: that a row may have. dry: rows have its parameters. lora: rows
        may have adapters."""
        self._dry, self._lora = dry, lora
        self._spec, self._slots, self._pool, self._devices = spec, slots, pool, devices
        self._positions, self._context_length = positions, context_length
        self.cache = self._empty_cache()
        self.rows = self.idle_rows()
        max_blocks = None if pool is None else pool.max_blocks
        self.host = HostTables(slots, spec.config.vocab_size, max_blocks, drafts=drafts)
        self.tables = Tables(**devices.put(self.host.take_stale()))

    @property
    def held(self) -> tuple[KVCache, RowState]:
        """What programs are given for good, and return anew."""
        return self.cache, self.rows

    @held.setter
    def held(self, returned: tuple[KVCache, RowState]) -> None:
        self.cache, self.rows = returned

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on a device."""
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(self.cache))

    def refresh(self) -> None:
        """Send up what has changed in the tables."""
        if (block_tables := self.host.take_block_tables()) is not None:
            self.rows = replace(self.rows, block_tables=self._devices.put(block_tables))
        if stale := self.host.take_stale():
            self.tables = replace(self.tables, **self._devices.put(stale))

    def reset(self) -> None:
        """Make every row inactive and every count zero; the cache keeps what it holds."""
        self.rows = self.idle_rows()

    def blank_cache(self) -> None:
        """A cache of zeros, whatever became of the old one. Nothing may be in flight."""
        for leaf in jax.tree.leaves(self.cache):
            leaf.delete()
        self.cache = self._empty_cache()

    def delete(self) -> None:
        """Free the memory."""
        for leaf in jax.tree.leaves((self.cache, self.rows, self.tables)):
            leaf.delete()
        self.cache = []

    def make_rows(self) -> Rows:
        """All rows inactive, unpacked."""
        positions = self._context_length
        asked = {"dry": self._dry, "lora": self._lora}
        return make_rows(self._slots, MAX_STOP_TOKEN_IDS, positions, self._pool, **asked)

    def idle_rows(self) -> RowState:
        """The same as they lie on the device."""
        on_host = jax.tree.map(np.asarray, self.make_rows())
        return self._devices.put(pack_rows(on_host))

    def local_cache(self) -> KVCache:
        """The cache of one device, abstract."""
        return jax.eval_shape(self._make_cache)

    def _empty_cache(self) -> KVCache:
        if self._devices.is_one:
            return self._make_cache()
        whole = jax.eval_shape(lambda: self._make_cache(self._spec.sharding.across))
        return self._devices.zeros(self.local_cache(), whole)

    def _make_cache(self, config: ModelConfig | None = None) -> KVCache:
        spec, slots, pool = self._spec, self._slots, self._pool
        if pool is None:
            return make_cache(spec, slots, self._positions, config=config)
        return make_cache(spec, slots, pool.block_size, num_blocks=pool.num_blocks, config=config)
