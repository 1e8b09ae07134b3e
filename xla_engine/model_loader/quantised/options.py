"""Fields that several methods have in `quantization_config`."""

from xla_engine.model_loader.json_fields import Fields


def group_size(fields: Fields, name: str = "group_size") -> int:
    """How many columns share a scale; -1: all of them. Raises CheckpointError."""
    size = fields.integer(name, low=-1, high=2**20, default=-1)
    if size == 0:
        fields.fail(name, "must be -1 or at least 1. Correct the file or download it again")
    return size
