"""The device state that persists between calls: KV cache, row state and tables."""

from dataclasses import replace

import jax
import numpy as np

from xla_engine.config import EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.kv_cache.cache import KVCache, States, make_cache, make_states
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.graphs.row_state.rows import Pool, Rows, RowState, Tables, make_rows, pack_rows
from xla_engine.runner.devices import Devices
from xla_engine.runner.row_settings import HostTables
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS


class DeviceState:
    """Owns the arrays that programs read and return.

    cache, rows, saved: donated to a program and replaced by what it returns.
    saved: recurrent states by place, for prompts that begin after a prefix; empty if none are saved.
    tables: read by programs; changes are made in the host copy `host`.
    """

    cache: KVCache
    rows: RowState
    saved: States
    tables: Tables

    def __init__(
        self,
        spec: ModelSpec,
        config: EngineConfig,
        positions: int,
        context_length: int,
        pool: Pool | None,
        devices: Devices,
        *,
        rope_offsets: bool,
    ) -> None:
        """positions: of a slot, a multiple of the span. context_length: how many of them are used.
        pool: the block pool; None: every slot has its own memory. devices: hold the arrays.
        rope_offsets: rows have `Rows.rope_offset`."""
        self._spec, self._config, self._pool, self._devices = spec, config, pool, devices
        self._positions, self._context_length, self._rope_offsets = positions, context_length, rope_offsets
        self.cache, self.saved = self._empty()
        self.rows = self.idle_rows()
        self.host = host_tables(spec, config, pool)
        self.tables = Tables(**devices.put(self.host.take_stale()))

    @property
    def donated(self) -> tuple[KVCache, RowState]:
        """The arrays that programs take by donation and return."""
        return self.cache, self.rows

    @donated.setter
    def donated(self, returned: tuple[KVCache, RowState]) -> None:
        self.cache, self.rows = returned

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(self.cache))

    def refresh(self) -> None:
        """Copy changed tables to the device."""
        if (block_tables := self.host.take_block_tables()) is not None:
            self.rows = replace(self.rows, block_tables=self._devices.put(block_tables))
        if stale := self.host.take_stale():
            self.tables = replace(self.tables, **self._devices.put(stale))

    def reset(self) -> None:
        """Make every row inactive; the cache keeps its content."""
        self.rows = self.idle_rows()

    def blank_cache(self) -> None:
        """Replace the cache by zeros, even if the old one was lost. Nothing may be in flight."""
        for leaf in jax.tree.leaves((self.cache, self.saved)):
            leaf.delete()
        self.cache, self.saved = self._empty()

    def delete(self) -> None:
        """Free the device memory."""
        for leaf in jax.tree.leaves((self.cache, self.saved, self.rows, self.tables)):
            leaf.delete()
        self.cache, self.saved = [], []

    def make_rows(self) -> Rows:
        """Inactive rows, unpacked."""
        return inactive_rows(self._config, self._context_length, self._pool, rope_offsets=self._rope_offsets)

    def idle_rows(self) -> RowState:
        """Inactive rows, packed, on the device."""
        return self.placed(jax.tree.map(np.asarray, self.make_rows()))

    def placed(self, rows: Rows) -> RowState:
        """Rows of the host, packed, on the device."""
        return self._devices.put(pack_rows(rows))

    def local(self) -> tuple[KVCache, States]:
        """The abstract cache and saved states of one device."""
        return jax.eval_shape(lambda: self._make(self._spec.local))

    def _empty(self) -> tuple[KVCache, States]:
        """Zeros over the devices."""
        if self._devices.is_one:
            return self._make(self._spec.local)
        whole = jax.eval_shape(lambda: self._make(self._spec.sharding.across))
        return self._devices.zeros(self.local(), whole)

    def _make(self, config: ModelConfig) -> tuple[KVCache, States]:
        return zeroed_state(self._spec, self._config, self._positions, self._pool, config)


def inactive_rows(
    config: EngineConfig, context_length: int, pool: Pool | None, *, rope_offsets: bool
) -> Rows:
    """Inactive rows, unpacked. Arguments: as of `DeviceState`."""
    asked = {"dry": config.enable_dry, "lora": config.enable_lora, "rope_offsets": rope_offsets}
    return make_rows(config.device_rows, MAX_STOP_TOKEN_IDS, context_length, pool, **asked)


def host_tables(spec: ModelSpec, config: EngineConfig, pool: Pool | None) -> HostTables:
    """The host's copy of the tables that programs read."""
    drafts = max((width for _, width in config.verify_shapes), default=1) - 1
    max_blocks = None if pool is None else pool.max_blocks
    return HostTables(config.device_rows, spec.config.vocab_size, max_blocks, drafts=drafts)


def zeroed_state(
    spec: ModelSpec, config: EngineConfig, positions: int, pool: Pool | None, model: ModelConfig
) -> tuple[KVCache, States]:
    """The cache and room for saved states, zeroed. model: with the heads of one device, or of all of them."""
    length, blocks = (positions, None) if pool is None else (pool.block_size, pool.num_blocks)
    cache = make_cache(spec, config.device_rows, length, num_blocks=blocks, config=model)
    return cache, make_states(model, config.saved_states) if config.saved_states else []
