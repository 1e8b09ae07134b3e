"""Model families as data: one `Family` for each architecture name in config.json."""

from xla_engine.model_loader.families.cohere import COHERE, COHERE2
from xla_engine.model_loader.families.experts import MIXTRAL, QWEN3_MOE
from xla_engine.model_loader.families.family import Family, Source, tensor_sources
from xla_engine.model_loader.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_VISION
from xla_engine.model_loader.families.gpt_oss import GPT_OSS
from xla_engine.model_loader.families.granite import GRANITE
from xla_engine.model_loader.families.hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_5_VISION, QWEN3_NEXT
from xla_engine.model_loader.families.idefics import IDEFICS3, SMOLVLM
from xla_engine.model_loader.families.llama import LLAMA
from xla_engine.model_loader.families.mistral import MINISTRAL, MISTRAL, MISTRAL3
from xla_engine.model_loader.families.olmo import OLMO2, OLMO3
from xla_engine.model_loader.families.phi import PHI3
from xla_engine.model_loader.families.qwen import QWEN2, QWEN3, QWEN3_VL
from xla_engine.model_loader.families.smollm import SMOLLM3

__all__ = ["FAMILIES", "LLAMA", "QWEN3", "Family", "Source", "tensor_sources"]

_ALL = (
    *(LLAMA, SMOLLM3, MISTRAL, MINISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, PHI3, OLMO2, OLMO3, GRANITE),
    *(GEMMA3_VISION, MISTRAL3, QWEN3_5_VISION, QWEN3_VL, IDEFICS3, SMOLVLM),
    *(COHERE, COHERE2, MIXTRAL, QWEN3_MOE, GPT_OSS, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE),
)
FAMILIES = {family.architecture: family for family in _ALL}
