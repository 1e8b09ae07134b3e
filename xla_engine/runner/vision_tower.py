"""A vision tower on the device: tiles in, features out."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_engine.graphs.inventory import GraphReport, Inventory
from xla_engine.graphs.vision.config import VisionConfig
from xla_engine.graphs.vision.tower import (
    CHANNELS,
    EMBED,
    LAYER,
    PROJECT,
    embed_shapes,
    layer_shapes,
    project_shapes,
    vision_programs,
)
from xla_engine.model_loader.weights import DTYPES

Array = np.ndarray[Any, Any]


class VisionTower:
    """The compiled programs of a tower and its weights.

    A call takes one tile. It runs the same programs whatever other tiles there are, so that a tile's features are a
    function of its pixels, on one machine and number of threads.
    """

    def __init__(
        self,
        config: VisionConfig,
        dtype: str,
        weights: Mapping[str, Array],
        table: Array,
        fingerprint: str = "given",
    ) -> None:
        """weights: by the names of `vision_shapes`. table: `ImageProcessor.table`.

        fingerprint: of everything that features depend on besides a picture's file; part of an engine's identity.
        """
        self.config, self.fingerprint = config, fingerprint
        self._inventory = Inventory()
        self._inventory.compile(vision_programs(config, jnp.dtype(DTYPES[dtype])))

        def placed(names: Mapping[str, Any], prefix: str = "") -> dict[str, jax.Array]:
            return {name: jax.device_put(weights[prefix + name]) for name in names}

        self._embed, self._project = placed(embed_shapes(config)), placed(project_shapes(config))
        self._layers = [
            placed(layer_shapes(config), f"layers.{index}.") for index in range(config.num_hidden_layers)
        ]
        self._table = jax.device_put(table)

    def __call__(self, tile: Array) -> Array:
        """The features of a tile: uint8 `[T, T, 3]` to float32 `[tokens, text_size]`."""
        return np.asarray(self.advance(tile, None, 0, self.stages))

    def glance(self, tile: Array) -> jax.Array:
        """What every program makes of a tile, with the first layer only: features for a check, in little time."""
        last = self.stages - 1
        return self.advance(tile, self.advance(tile, None, 0, 2), last, last + 1)

    def tokens(self, shape: tuple[int, ...]) -> int | None:
        """Tokens of a tile of this shape; None if it does not fit the tower."""
        side = self.config.image_size
        return self.config.tokens if shape == (side, side, CHANNELS) else None

    def grid(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """None: the decoder's keys and queries turn by their places in the prompt."""
        return None

    @property
    def axes(self) -> tuple[int, ...]:
        """See `prefill_chunk`."""
        return ()

    @property
    def outputs(self) -> tuple[int, ...]:
        """Rows of features that the last stage may return."""
        return (self.config.tokens,)

    @property
    def examples(self) -> list[Array]:
        """A tile for each of `outputs`."""
        side = self.config.image_size
        return [np.zeros((side, side, CHANNELS), np.uint8)]

    @property
    def stages(self) -> int:
        """Calls for one tile: patches, each layer, features."""
        return len(self._layers) + 2

    def advance(self, tile: Array, x: jax.Array | None, begin: int, end: int) -> jax.Array:
        """Start stages `begin` to `end` for a tile. x: what the stages before have returned, which is donated.

        Returns the residual stream, or after the last stage the features, float32 `[tokens, text_size]`.
        """
        run = self._inventory
        for stage in range(begin, end):
            if stage == 0:
                x = run(EMBED, self._embed, self._table, jax.device_put(np.ascontiguousarray(tile)))
            elif stage <= len(self._layers):
                x = run(LAYER, self._layers[stage - 1], x)
            else:
                x = run(PROJECT, self._project, x)
        assert x is not None, "no stage was asked for"
        return x

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        """What each program cost and needs."""
        return tuple(self._inventory)

    def close(self) -> None:
        """Drop the programs."""
        self._inventory.clear()
