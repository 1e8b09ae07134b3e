"""Memory planning, before anything is loaded: the memory that weights and slots need, and what the device has.

Sizes come from the shapes that the engine will allocate, in the layout of the attention backend, so the plan always
agrees with a real start. All sizes are bytes.
"""

from math import prod
from typing import Any, NamedTuple

from xla_engine.config import EngineConfig
from xla_engine.graphs import target
from xla_engine.graphs.config import whole_spans
from xla_engine.graphs.kv_cache.cache import block_bytes, cache_bytes, rows_bytes, state_bytes, tree_bytes
from xla_engine.graphs.model.spec import ModelSpec, parameter_shapes
from xla_engine.graphs.row_state.limits import MAX_LOGIT_BIAS
from xla_engine.graphs.steps.encode import ENCODER_ROWS
from xla_engine.runner.chips import CHIPS
from xla_engine.runner.memory_plan import MemoryPlan
from xla_engine.sampling_params import MAX_STOP_TOKEN_IDS
from xla_engine.utils import host_memory
from xla_engine.utils.pages_ahead import touched_ahead

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
    """Bytes of one slot with a block pool: without keys and values, but with a block table and its changes."""
    rows = rows_bytes(1, MAX_STOP_TOKEN_IDS, max_model_len, block_size)
    return state_bytes(spec) + rows + _table_bytes(spec) + 12


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
    streams = 1 if model.alternating is None else model.alternating.streams
    widths = 4 * streams * streams * model.hidden_size + 2 * model.qkv_features + 3 * model.intermediate_size
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
