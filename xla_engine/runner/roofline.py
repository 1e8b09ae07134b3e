"""The least that a step can cost: the bytes that it must read and the operations that it must do, on each device."""

from math import prod
from typing import NamedTuple

from xla_engine.config import EngineConfig
from xla_engine.graphs.inventory import program_name
from xla_engine.graphs.kv_cache.cache import cache_bytes
from xla_engine.graphs.model.leaves import Leaf
from xla_engine.graphs.model.spec import ModelSpec
from xla_engine.runner.chips import Chip
from xla_engine.runner.programs import PREFILL, VERIFY, decode_name


class Work(NamedTuple):
    """bytes: weights, keys and values, each once. ops: multiplications and additions of products."""

    bytes: float
    ops: float

    def seconds(self, chip: Chip, *, int8: bool) -> float:
        """How long the chip needs at its peak rates."""
        return max(self.bytes / chip.bandwidth, self.ops / (chip.int8_ops if int8 else chip.flops))


def step_work(spec: ModelSpec, config: EngineConfig, keys: int) -> dict[str, Work]:
    """The work of the programs that run a whole model, by name. keys: that every row attends to."""
    rows, lanes = config.device_rows, config.prefill_lanes
    found = {decode_name(keys): _work(spec, rows, rows, rows, keys)}
    for count in lanes:
        name = program_name(PREFILL, lanes=count, keys=keys)
        found[name] = _work(spec, count * config.chunk_size, config.head_rows, count, keys)
    for count, width in config.verify_shapes:
        name = program_name(VERIFY, lanes=count, width=width, keys=keys)
        found[name] = _work(spec, count * width, count * width, count, keys)
    return found


def _work(spec: ModelSpec, rows: int, head_rows: int, slots: int, keys: int) -> Work:
    """rows: of the layers' products. head_rows: of the output head's. slots: whose keys are read."""
    model, size, ops = spec.local, 0.0, 0.0
    for name, leaf in spec.leaves.items():
        share = _share_of_a_row(spec, leaf)
        embeds = name.startswith("embed") and not model.tie_word_embeddings
        looked_up = embeds or name.startswith("layer_inputs_table")  # a row for each token
        if leaf.role != "adapter" and not looked_up:
            size += min(1.0, share * rows) * _bytes(leaf)
        if leaf.role in ("linear", "head") or share < 1:
            multiplied = head_rows if leaf.role == "head" else rows
            ops += 2 * share * multiplied * prod(leaf.on_devices().shape)
    attending = (index for index in range(model.num_hidden_layers) if model.attends(index))
    heads = sum(model.num_attention_heads * model.layer(index).head_dim for index in attending)
    return Work(size + cache_bytes(spec, slots, keys), ops + 4.0 * rows * keys * heads)


def _bytes(leaf: Leaf) -> int:
    local = leaf.on_devices()
    return prod(local.shape) * local.dtype.itemsize


def _share_of_a_row(spec: ModelSpec, leaf: Leaf) -> float:
    """Which part of a leaf one row uses: its experts, of the matrices of all experts; all of any other leaf."""
    experts = spec.config.experts
    if experts is None or len(leaf.shape) < 3 or leaf.role != "plain":
        return 1.0
    return experts.num_experts_per_tok / experts.num_experts
