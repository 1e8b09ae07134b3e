"""An EAGLE-3 head, which drafts with the hidden states of the engine's model."""

from collections.abc import Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp

from xla_engine.config import EngineConfig
from xla_engine.graphs.config import ModelConfig
from xla_engine.graphs.steps.eagle3 import Eagle3Weights, eagle3_form
from xla_engine.model_loader.eagle3 import Eagle3Checkpoint
from xla_engine.runner.backends import make_spec
from xla_engine.runner.drafting.head import DraftHead, packed


class Eagle3(DraftHead):
    """The `DeviceProposer` of method "eagle3". Its weights are never quantised."""

    def __init__(
        self,
        head: Eagle3Checkpoint,
        model: ModelConfig,
        dtype: str,
        config: EngineConfig,
        context_length: int,
    ) -> None:
        """model, dtype: of the engine. Raises ConfigError."""
        self._head = head
        layer = head.config.within(context_length)
        self._spec = make_spec(replace(config, quantization=None), layer, jnp.dtype(dtype))
        form = eagle3_form(self._spec, head.taps, norm_before_residual=head.norm_before_residual)
        rows = config.chunk_size * config.prefill_lanes[-1]
        seen = 4 * rows * len(head.taps) * model.hidden_size  # bytes that a prefill call hands on
        super().__init__("eagle3", form, config, context_length, head.num_bytes + seen)

    def place(self, weights: Mapping[str, jax.Array]) -> tuple[Eagle3Weights, list[jax.Array]]:
        products, placed = self._spec.products, {}
        for name in self._head.weights:
            leaf = self._head.weights[name]
            if name == "head":
                leaf = leaf if products is None else products.pack_head(leaf)
            elif name != "embed":
                leaf = packed(products, leaf)
            placed[name] = jax.device_put(leaf)
        ids = None if self._head.ids is None else jax.device_put(self._head.ids)
        own = Eagle3Weights(**{"embed": None, **placed}, ids=ids)
        return own, jax.tree.leaves(own)
