"""The type of a cache, as steps take and return it."""

from xla_engine.graphs.attention.backend import LayerCache
from xla_engine.graphs.delta_net.layer import DeltaState

KVCache = list[LayerCache | DeltaState]
