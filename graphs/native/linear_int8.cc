// Linear layers of weights in eight bits.

#include "linear.h"

namespace xla_engine {

using Eights = PackedKind<int8_t, GroupKernel>;
XLA_ENGINE_LINEAR(Int8, Eights)

}  // namespace xla_engine
