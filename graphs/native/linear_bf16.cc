// Linear layers of weights in bf16.

#include "linear.h"

namespace xla_engine {

using Halves16 = PackedKind<BFloat16, HalvesKernel>;
XLA_ENGINE_LINEAR(Bf16, Halves16)

}  // namespace xla_engine
