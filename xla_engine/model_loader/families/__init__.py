"""Model families as data: one `Family` for each architecture name in config.json."""

from xla_engine.model_loader.families import dense, experts
from xla_engine.model_loader.families.dense import LLAMA, QWEN3
from xla_engine.model_loader.families.family import Family, Source, tensor_sources

__all__ = ["FAMILIES", "LLAMA", "QWEN3", "Family", "Source", "tensor_sources"]

_ALL = (
    *(LLAMA, dense.SMOLLM3, dense.MISTRAL, dense.MINISTRAL, dense.QWEN2, QWEN3, dense.GEMMA, dense.GEMMA2),
    *(dense.GEMMA3, dense.PHI3, dense.OLMO2, dense.OLMO3, dense.GRANITE, dense.GEMMA3_VISION),
    *(dense.MISTRAL3, experts.QWEN3_5_VISION, dense.QWEN3_VL, dense.IDEFICS3, dense.SMOLVLM),
    *(dense.COHERE, dense.COHERE2, experts.MIXTRAL, experts.QWEN3_MOE, experts.GPT_OSS),
    *(experts.QWEN3_NEXT, experts.QWEN3_5, experts.QWEN3_5_MOE),
)
FAMILIES = {family.architecture: family for family in _ALL}
