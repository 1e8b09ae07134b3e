// Linear layers with adapters of weights in bf16.

#include "linear_lora.h"

namespace xla_engine {

using Halves16 = PackedKind<BFloat16, HalvesKernel>;
XLA_ENGINE_LORA(Bf16, Halves16)
XLA_ENGINE_WIDENING(LoraBf16, BFloat16)

}  // namespace xla_engine
