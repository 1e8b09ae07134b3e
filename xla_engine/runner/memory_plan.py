"""The memory that an engine needs, as sums that do not depend on its graphs. Does not import jax."""

from dataclasses import dataclass

from xla_engine.config import SMALLEST_BATCH
from xla_engine.errors import ConfigError
from xla_engine.utils.sizes import size


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
