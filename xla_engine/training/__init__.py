"""Train the model of a running engine on what it sampled: the trainer's log-probabilities are the sampler's bits.

See docs/training.md.
"""

from xla_engine.training.batch import Batch
from xla_engine.training.policy import Policy

__all__ = ["Batch", "Policy"]
