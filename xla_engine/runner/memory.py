"""Memory planning, before anything is loaded: the memory that weights and slots need, and what the device has.

Sizes come from the shapes that the engine will allocate, in the layout of the attention backend, so the plan always
agrees with a real start. All sizes are bytes.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from xla_engine.config import SMALLEST_BATCH, EngineConfig
from xla_engine.errors import ConfigError
from xla_engine.graphs import target
from xla_engine.graphs.config import whole_spans
from xla_engine.graphs.kv_cache.cache import block_bytes, cache_bytes, rows_bytes, state_bytes, tree_bytes
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.row_state.limits import MAX_LOGIT_BIAS
from xla_engine.graphs.steps.encode import ENCODER_ROWS
from xla_engine.runner.chips import CHIPS
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS
from xla_engine.utils import host_memory
from xla_engine.utils.pages_ahead import touched_ahead
from xla_engine.utils.sizes import size

_LONGEST = 1 << 24  # positions: a multiple of the span, and longer than every window


def weights_bytes(spec: ModelSpec) -> int:
    """Bytes of all leaves on each device."""
    return tree_bytes(spec.leaves.on_device())


def plain_bytes(spec: ModelSpec) -> int:
    """Bytes that the leaves would have on each device in the model's dtype, neither quantised nor padded."""
    shapes = parameter_shapes(spec.config).values()
    total = sum(prod(shape) * (spec.dtype.itemsize if len(shape) > 1 else 4) for shape in shapes)
    return total // (spec.sharding.devices or 1)


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
    if model.recurrent is not None:
        widths += 8 * model.recurrent.projected_features
    return 4 * widths


def available_bytes(device: Any) -> int | None:
    """The available memory of `device` (a jax device); None if the system does not report it.

    On an accelerator, what XLA may use and has not used. On the host, available (not merely free) memory, within the
    limits of the control group.
    """
    if device.platform != "cpu":
        limit, used = _limit_and_use(device)
        return None if limit is None else limit - used
    available = host_memory.available()
    return None if available is None else available + touched_ahead()  # which the weights will take


def total_to_each(device: Any, devices: int) -> int | None:
    """The total memory of each of `devices` devices like `device`, used or not, so that it is the same at every start.

    On the host all its devices share its memory. None if unknown.
    """
    if device.platform != "cpu":
        return _limit_and_use(device)[0]
    total = host_memory.total()
    return None if total is None else total // target.on_this_host(devices)


def _limit_and_use(device: Any) -> tuple[int | None, int]:
    """What XLA may use of an accelerator's memory, and what is in use. That of a topology has no statistics, but its
    kind may be known."""
    if target.is_ahead():
        chip = CHIPS.get(device.device_kind)
        return None if chip is None else chip.memory, 0
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else int(limit), int(stats.get("bytes_in_use", 0))


class ExtraMemory(NamedTuple):
    """Memory in addition to the model's, for a draft model or head, or a vision tower: in total, and for each slot."""

    weights: int = 0
    slot: int = 0


NOTHING = ExtraMemory()


def available_to_each(device: Any, devices: int) -> int | None:
    """`available_bytes` for each of `devices` devices like `device`: on the host they share its memory."""
    available = available_bytes(device)
    if available is None or device.platform != "cpu":
        return available
    return available // target.on_this_host(devices)


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
        """How many slots fit, possibly none; None if the available memory is unknown, or slots need none."""
        if self.available is None or not self.slot + self.scratch:
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


def encoder_plan(spec: ModelSpec, max_model_len: int, available: int | None) -> MemoryPlan:
    """The memory of an encoder, whose slots need none."""
    workspace = max(ENCODER_ROWS, max_model_len) * _activations(spec)
    return MemoryPlan(
        weights=weights_bytes(spec), slot=0, scratch=0, slots=0, workspace=workspace, available=available
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
