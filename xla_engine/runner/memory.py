"""Memory planning, before anything is loaded: the memory that weights and slots need, and what the device has.

Sizes come from the shapes that the engine will allocate, in the layout of the attention backend, so the plan always
agrees with a real start. All sizes are bytes.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from xla_engine.config import SMALLEST_BATCH, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs.attention.backend import whole_spans
from xla_engine.graphs.kv_cache.cache import block_bytes, cache_bytes, rows_bytes, state_bytes, tree_bytes
from xla_engine.graphs.model.decoder import ModelSpec
from xla_engine.graphs.row_state.limits import MAX_LOGIT_BIAS
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS

_LONGEST = 1 << 24  # positions: a multiple of the span, and longer than every window
_GROUPS = (  # control groups, version 2 and 1: directory, limit, usage, the part of the usage that is clean file cache
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def weights_bytes(spec: ModelSpec) -> int:
    """Bytes of all leaves on each device."""
    return tree_bytes(spec.leaves.on_device())


def kv_bytes_per_token(spec: ModelSpec) -> int:
    """Bytes of one more position of a slot, once every window is full: layers with a window or a recurrent state add
    nothing."""
    return (cache_bytes(spec, 1, 2 * _LONGEST) - cache_bytes(spec, 1, _LONGEST)) // _LONGEST


def slot_bytes(spec: ModelSpec, max_model_len: int) -> int:
    """Bytes of one slot: its cache, its row state, and its entries in the tables of bias and masks."""
    rows = rows_bytes(1, MAX_STOP_TOKEN_IDS, max_model_len)
    return cache_bytes(spec, 1, max_model_len) + rows + _table_bytes(spec)


def borrowing_slot_bytes(spec: ModelSpec, max_model_len: int, block_size: int) -> int:
    """Bytes of one slot with a block pool: without the cache, but with a block table and its changes."""
    return rows_bytes(1, MAX_STOP_TOKEN_IDS, max_model_len, block_size) + _table_bytes(spec) + 12


def blocks_within(spec: ModelSpec, size_bytes: int, block_size: int) -> int:
    """How many blocks fit into `size_bytes`, possibly none."""
    return size_bytes // block_bytes(spec, block_size)


def _table_bytes(spec: ModelSpec) -> int:
    return 8 * MAX_LOGIT_BIAS + 4 * -(-spec.config.vocab_size // 32)


def scratch_bytes(spec: ModelSpec) -> int:
    """An upper estimate of the scratch memory of one decode row: three times its float32 logits, and activations."""
    return 12 * spec.config.vocab_size + _activations(spec)


def workspace_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """An upper estimate of the scratch memory of the largest prefill program."""
    rows = config.chunk_size * config.prefill_lanes[-1]
    return 12 * spec.config.vocab_size * config.head_rows + rows * _activations(spec)


def _activations(spec: ModelSpec) -> int:
    model = spec.config
    widths = 4 * model.hidden_size + 2 * model.qkv_features + 3 * model.intermediate_size
    if model.experts is not None:
        widths += model.experts.num_experts_per_tok * model.hidden_size
    if model.delta is not None:
        widths += 8 * model.delta.projected_features
    return 4 * widths


def available_bytes(device: Any) -> int | None:
    """The available memory of `device` (a jax device); None if the system does not report it.

    On an accelerator, what XLA may use and has not used. On the host, available (not merely free) memory, within the
    limits of the control group.
    """
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    left = (limit - in_use for limit, in_use in _groups())
    found = [size for size in (_available_on_host(), *left) if size is not None]
    return min(found, default=None)


def total_to_each(device: Any, devices: int) -> int | None:
    """The total memory of each of `devices` devices like `device`, used or not, so that it is the same at every start.

    On the host all devices share its memory. None if unknown.
    """
    if device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
        return None if limit is None else int(limit)
    found = [size for size in (_size_of_host(), *(limit for limit, _ in _groups())) if size is not None]
    return min(found) // devices if found else None


class ExtraMemory(NamedTuple):
    """Memory in addition to the model's, for a draft model or head, or a vision tower: in total, and for each slot."""

    weights: int = 0
    slot: int = 0


NOTHING = ExtraMemory()


def available_to_each(device: Any, devices: int) -> int | None:
    """`available_bytes` for each of `devices` devices like `device`: on the host they share its memory."""
    available = available_bytes(device)
    return available if available is None or device.platform != "cpu" else available // devices


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory that an engine needs on a device, in bytes.

    weights: of the model, and of a draft model.
    blocks: number of blocks of the pool; 0 without a pool.
    block: of one block.
    states: how many saved states of recurrent layers there is room for.
    state: of one such state.
    slot: state of one slot.
    scratch: of a slot's row in a step.
    slots: number of slots.
    workspace: scratch of the largest prefill program.
    available: None if unknown.
    """

    weights: int
    blocks: int = 0
    block: int = 0
    states: int = 0
    state: int = 0
    slot: int
    scratch: int
    slots: int
    workspace: int
    available: int | None

    @property
    def needed(self) -> int:
        return self._fixed + self.pool + self.slots * (self.slot + self.scratch)

    @property
    def _fixed(self) -> int:
        """Bytes of all that does not grow with slots or blocks."""
        return self.weights + self.states * self.state + self.workspace

    @property
    def pool(self) -> int:
        """Bytes of all blocks."""
        return self.blocks * self.block

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available

    @property
    def most_slots(self) -> int | None:
        """How many slots fit, possibly none; None if the available memory is unknown."""
        if self.available is None:
            return None
        return max(0, (self.available - self._fixed - self.pool) // (self.slot + self.scratch))

    @property
    def most_pool(self) -> int | None:
        """Bytes that are left for blocks, possibly none; None if the available memory is unknown."""
        return None if self.available is None else max(0, self.available - self.needed + self.pool)

    def arithmetic(self) -> str:
        """The sum, as in `weights 2.5 GB + 16 slots x (67 MB + 3 MB scratch) + workspace 31 MB = 3.6 GB`."""
        pool = f" + {self.blocks} blocks x {size(self.block)}" if self.blocks else ""
        if self.states:
            pool += f" + {self.states} saved states x {size(self.state)}"
        total = (
            f"weights {size(self.weights)}{pool} + {self.slots} slots x ({size(self.slot)} + {size(self.scratch)} "
            f"scratch) + workspace {size(self.workspace)} = {size(self.needed)}"
        )
        return total if self.available is None else f"{total} of {size(self.available)} available"


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    max_model_len: int,
    available: int | None,
    extra: ExtraMemory = NOTHING,
) -> MemoryPlan:
    blocks, block = config.num_blocks or 0, 0
    if blocks:
        if config.shadow_rate:  # the shadow probe has blocks of its own
            blocks += whole_spans(max_model_len) // config.block_size
        slot = borrowing_slot_bytes(spec, max_model_len, config.block_size)
        block = block_bytes(spec, config.block_size)
    else:
        slot = slot_bytes(spec, max_model_len)
    return MemoryPlan(
        states=config.saved_states,
        state=state_bytes(spec) if config.saved_states else 0,
        weights=weights_bytes(spec) + extra.weights,
        blocks=blocks,
        block=block,
        slot=slot + extra.slot,
        scratch=scratch_bytes(spec),
        slots=config.device_rows,
        workspace=workspace_bytes(spec, config),
        available=available,
    )


def check_memory(plan: MemoryPlan) -> None:
    """Raise ConfigError, with the arithmetic and a remedy, if the plan does not fit."""
    if plan.fits:
        return
    most = plan.most_slots or 0
    if plan.blocks and (pool := plan.most_pool or 0) >= plan.block:
        remedy = f"Use kv_cache_memory_bytes {pool} (num_blocks {pool // plan.block}) at most, or fewer slots"
    elif (
        plan.states
        and plan.available is not None
        and plan.needed - plan.states * plan.state <= plan.available
    ):
        remedy = "Use fewer mamba_cache_states, or leave mamba_cache_mode out"
    elif most >= SMALLEST_BATCH:
        remedy = f"Use max_num_seqs {most} at most, or a smaller max_model_len"
    elif plan.available is not None and plan.weights + plan.workspace < plan.available:
        remedy = f"Use a smaller max_model_len; {SMALLEST_BATCH} slots are the minimum"
    else:
        remedy = "Use dtype bfloat16 instead of float32, a smaller model or a larger device"
    raise ConfigError(f"the engine does not fit: {plan.arithmetic()}. {remedy}")


def size(count: int) -> str:
    """Format bytes in decimal units with three digits: `1.23 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def _available_on_host() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return _size_of_host()


def _size_of_host() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _groups() -> list[tuple[int, int]]:
    """Limit and usage of each control group that has a limit."""
    found = []
    for name, limit, used, reclaimable in _GROUPS:
        group = Path(name)
        try:
            parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            in_use = int((group / used).read_text()) - int(parts.get(reclaimable, 0))
            found.append((int((group / limit).read_text()), in_use))
        except (OSError, ValueError):
            continue  # not this version, or the limit is "max"
    return found
