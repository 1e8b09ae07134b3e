// Linear layers with adapters of weights in eight bits.

#include "linear_lora.h"

namespace xla_engine {

using Eights = PackedKind<int8_t, GroupKernel>;
XLA_ENGINE_LORA(Int8, Eights)

}  // namespace xla_engine
